"""What was left out, cut or taken otherwise than rows say, for messages to the user."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.prompts.conversations import RowCounts
from rlhfless_ray.recipe.supervised_sections import PAIRED, SupervisedData

NAMED = 5  # number of rows that a note names


@dataclass
class RowNotes:
    left_out: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)  # whose two responses are the same
    counts: dict[str, RowCounts] = field(default_factory=dict)  # by how something was taken
    rows: int = 0  # that are counted

    def count(self, said: Iterable[tuple[str, str]], name: str) -> None:
        """Count a row. `said`: how something of it was taken, and what the row says."""
        self.rows += 1
        for what, found in dict.fromkeys(said):
            self.counts.setdefault(what, RowCounts()).count([found], name)

    def counted(self) -> tuple[str, ...]:
        return tuple(f"{what}: {counts.shown(self.rows)}" for what, counts in self.counts.items())

    def of_rows(self, data: SupervisedData, limit: int, sliced: Sequence[str]) -> tuple[str, ...]:
        """Return sentences that name rows. `sliced`: see `ConversationReader`."""
        longer = f"of more than {limit} tokens (data.max_tokens) are"
        named = (
            (self.left_out, f"{longer} left out: they are too long or have no response"),
            (self.cut, f"{longer} cut at their end"),
            (self.same, f"have the same `{data.chosen_column}` and `{data.rejected_column}`, which teach no preference"),
            (
                sliced,
                "are sliced as in OpenRLHF, because the chat template renders their prompt differently without a response; the response is "
                "the rendered text beyond the length of that prompt",
            ),
        )
        return tuple(
            f"{len(names)} rows {what}: {', '.join(names[:NAMED])}{', …' if len(names) > NAMED else ''}" for names, what in named if names
        )


def unread_columns(data: SupervisedData, task: str, row: JsonObject) -> list[tuple[str, str]]:
    """Return the columns with content that nothing reads, as `RowNotes.count` takes them."""
    if data.task:
        return []
    read = {data.prompt_column, data.tools_column if data.template == "chat" else ""}
    read |= {data.chosen_column, data.rejected_column} if task in PAIRED else set()
    read |= {data.response_column} if task in ("sft", "kto", "kd") else set()
    read |= {data.margin_column} if task == "rm" else {data.label_column} if task in ("kto", "prm") else set()
    unread = [column for column, cell in row.items() if column not in read and cell not in (None, "", [], {})]
    return [("columns that nothing reads", column) for column in unread]
