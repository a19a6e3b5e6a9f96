"""Check a data set's rows and render their prompts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError, one_line_with_type
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.prompts.conversations import BadTurns, ChatRenderer, RowCounts, cell_of, is_conversation
from rlhfless_ray.prompts.first_token import FirstToken
from rlhfless_ray.prompts.read_rows import NamedRow, check_characters, missing_column, tools_of
from rlhfless_ray.prompts.row_images import RowImages
from rlhfless_ray.types import PromptImage
from rlhfless_ray.vision.read_image import DATA_URI

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhfless_ray.recipe import Recipe


EMPTY: tuple[object, ...] = (None, "", [], {})  # cells that say nothing


class PromptTexts:
    """Render the prompts of a recipe's rows, and count what nobody reads of them."""

    def __init__(self, recipe: Recipe, column: str, tokenizer: PreTrainedTokenizerBase, images: RowImages) -> None:
        """`column`: column of the prompts."""
        self.images = images
        self.recipe, self.section, self.column = recipe, recipe.prompts, column
        self.tokenizer, self.first = tokenizer, FirstToken(tokenizer, recipe.prompts.template == "none" and recipe.prompts.add_bos)
        self.renderer: ChatRenderer | None = None
        self.rows = 0
        self.ended = RowCounts()  # conversations that end with the assistant's turn
        self.cut, self.tools, self.unread = RowCounts(), RowCounts(), RowCounts()
        read = {images.column, column, recipe.prompts.answer_column, recipe.evaluate.source_column, recipe.prompts.tools_column}
        reward = recipe.reward  # only a function of the user's own gets whole rows
        self.read_columns = None if reward.contract == "row" and reward.function not in ("", "task", "math") else read
        if self.section.template == "none":
            if self.section.system:
                raise UserError("prompts.system: a system turn needs prompts.template=chat; set it, or remove prompts.system")
            self.cuts_first = self.first.is_added or self.first.begins(self.section.input_template or "")
            return
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"prompts.template: the tokenizer of {recipe.policy.path or 'the built-in policy'} has no chat template; set "
                "prompts.template=none or use a chat model"
            )
        self.renderer = ChatRenderer(tokenizer, reads_images=images.are_seen)
        self.cuts_first = self.first.template_writes_it(tokenizer)

    def texts(self, named_rows: list[NamedRow], where: str) -> list[tuple[str, tuple[PromptImage, ...]]]:
        """Return the text of each row's prompt, and its images. Raises UserError for a row without a text, which the message names."""
        found = []
        for name, row in named_rows:
            self.rows += 1
            if self.read_columns is not None:
                self.unread.count([key for key, cell in row.items() if key not in self.read_columns and cell not in EMPTY], name)
            try:
                self.images.begin(row)
                text = self._plain(name, row) if self.renderer is None else self._rendered(name, row, self.renderer)
                pictures = self.images.read()
            except ValueError as error:
                raise UserError(f"{where}, {name}: {error}") from None
            check_characters(text, f"{where}, {name}")
            found.append((text, pictures))
        return found

    def _plain(self, name: str, row: JsonObject) -> str:
        template, text = self.section.input_template, self.images.placed(row[self.column])
        if self.section.tools_column and row.get(self.section.tools_column) and not self.section.task:
            self.tools.count([self.section.tools_column], name)
        return text if template is None else template.format(self._without_first(name, text))

    def _without_first(self, name: str, text: str) -> str:
        if not self.cuts_first or not self.first.begins(text):
            return text
        self.cut.count([self.first.text], name)
        return self.first.cut(text)

    def _rendered(self, name: str, row: JsonObject, renderer: ChatRenderer) -> str:
        cell, system = cell_of(row, self.column), self.section.system
        turns = self.images.placed_in_turns([{"role": "user", "content": cell}] if isinstance(cell, str) else cell)
        if system:
            if turns[0].get("role") == "system":
                raise ValueError("the row has a system turn of its own; remove prompts.system, or the turn")
            turns = [{"role": "system", "content": system}, *turns]
        if all(turn.get("role") in ("system", "developer") for turn in turns):
            raise ValueError("the conversation has a system turn only, so nobody asks anything; add a turn of the user, or remove the row")
        if self.cuts_first:
            cut = self.first.cut_turns(turns)
            self.cut.count([self.first.text] if cut != turns else [], name)
            turns = cut
        try:
            tools = tools_of(row, self.section.tools_column, renderer.template)
        except ValueError as error:
            raise ValueError(f"{error}; fix or remove the row, or set prompts.tools_column to nothing") from None
        try:
            text = renderer.render(turns, tools, prompts=True)
        except BadTurns:
            raise
        except Exception as error:  # a template may raise anything; its message says what it rejects
            raise ValueError(
                f"the chat template failed ({one_line_with_type(error)}); change prompts.system or use prompts.template=none"
            ) from None
        renderer.count(renderer.lost(turns, text, tools, prompts=True), name)
        self.ended.count(["assistant"] if turns[-1].get("role") == "assistant" else [], name)
        return text

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the user about the rows so far."""
        if self.section.task:
            return ()
        notes = list(self.renderer.notes if self.renderer else ())
        if self.cut.rows:
            notes.append(
                f"prompts that begin with the beginning-of-text token, which comes before them in any case: {self.cut.shown(self.rows)}; "
                "it is left out of them. Set prompts.template=none if they are whole texts already"
            )
        if self.unread.rows:
            notes.append(f"columns that nothing reads: {self.unread.shown(self.rows)}")
        if self.tools.rows:
            notes.append(f"columns with tools, which only prompts.template=chat reads: {self.tools.shown(self.rows)}")
        if ended := self.ended.rows.get("assistant"):
            notes.append(
                f"{ended} of {self.rows} prompts end with a turn of the assistant (first {self.ended.first['assistant']}), and the policy "
                "writes another one after it; remove that turn if it is the answer"
            )
        return tuple(notes)


def check_columns(named_rows: list[NamedRow], where: str, prompt_column: str, recipe: Recipe) -> None:
    """Check that the columns exist and hold text. A label may be null if the reward gets it unchanged, as in OpenRLHF."""
    answer_column, is_chat = recipe.prompts.answer_column, recipe.prompts.template == "chat"
    passes_labels_on = not recipe.reward.function or recipe.reward.contract == "openrlhf"
    for name, row in named_rows:
        for key, column in (("prompt_column", prompt_column), ("answer_column", answer_column)):
            if not column:
                continue
            if column not in row:
                unneeded = ", or leave it empty if there are no answers" if key == "answer_column" else ""
                raise UserError(f"{where}, {name}: {missing_column(row, column, f'prompts.{key}')}{unneeded}")
        try:
            cell = cell_of(row, prompt_column)
        except ValueError as error:
            raise UserError(f"{where}, {name}: {error}; fix or remove the row") from None
        is_read_as_text = isinstance(row[prompt_column], str) and recipe.agent.is_used  # an agent may read the turns of a text itself
        if is_conversation(cell) and not is_chat and not is_read_as_text:
            raise UserError(
                f"{where}, {name}: the prompt in column `{prompt_column}` is a list of turns, which only a chat template renders; set "
                "prompts.template=chat"
            )
        if not is_conversation(cell) and not isinstance(cell, str):
            kind = "null" if cell is None else "an empty list" if cell == [] else f"of type {type(cell).__name__}"
            raise UserError(
                f"{where}, {name}: the prompt in column `{prompt_column}` is {kind}, not a string; fix the row or set prompts.prompt_column"
            )
        if isinstance(cell, str) and cell.startswith(DATA_URI):
            raise UserError(
                f"{where}, {name}: the prompt in column `{prompt_column}` is bytes or an image, not a string; fix the row "
                "or set prompts.prompt_column"
            )
        if not cell or (is_chat and isinstance(cell, str) and not cell.strip()):
            raise UserError(f"{where}, {name}: the prompt in column `{prompt_column}` is empty; fix or remove the row")
        answer = row[answer_column] if answer_column else ""
        is_nan = isinstance(answer, float) and math.isnan(answer)  # where a table of numbers lacks one
        if (answer is None or is_nan) and not passes_labels_on:
            raise UserError(
                f"{where}, {name}: the answer in column `{answer_column}` is {'NaN' if is_nan else 'null'}; fix or remove the row, or set "
                "prompts.answer_column to nothing"
            )
