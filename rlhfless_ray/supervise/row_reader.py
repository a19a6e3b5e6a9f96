"""Convert rows of a data set to sequences of tokens, by the recipe of a supervised stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.prompts.conversations import Turn
from rlhfless_ray.prompts.read_rows import NamedRow, check_characters, tools_of
from rlhfless_ray.recipe.supervised_sections import PAIRED, WITH_NEXT, SupervisedRecipe
from rlhfless_ray.supervise import repeated_prompts
from rlhfless_ray.supervise.conversation_reader import ConversationReader, LeftOut
from rlhfless_ray.supervise.examples import Example, Examples
from rlhfless_ray.supervise.row_notes import RowNotes, unread_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SupervisedRows:
    train: Examples
    heldout: Examples
    reward_tokens: list[int] | None = None  # prm: tokens that labels may be; None: all tokens
    notes: tuple[str, ...] = ()  # messages for the user about rows that were left out or cut


Rendered = tuple[list[Example], float]


class RowReader(ConversationReader):
    """Convert rows to sequences of tokens, and count those that are left out or cut."""

    def __init__(self, recipe: SupervisedRecipe, tokenizer: PreTrainedTokenizerBase, context_tokens: int | None) -> None:
        super().__init__(recipe, tokenizer)
        self.context_tokens = context_tokens
        self.notes: tuple[str, ...] = ()  # messages about the data sets, for those about rows to follow
        self.noted = RowNotes()
        self.reward_tokens: list[int] = []
        further = int(self.task in WITH_NEXT)  # token of a sequence, which data.max_tokens counts and OpenRLHF's limit does not
        self.limit = self.data.max_tokens - (further if self.data.contract == "own" else 0)
        if context_tokens is not None:
            self.limit = min(self.limit, context_tokens - further)
        if context_tokens is not None and self.data.max_tokens > context_tokens:
            self.data = self.data.model_copy(update={"max_tokens": context_tokens})
        if tokenizer.eos_token_id is None:
            raise UserError("policy.path: its tokenizer has no end-of-sequence token, so responses would have no end; set eos_token")
        if self.task == "prm":
            self.placeholder = self._single(self.data.placeholder_token, "data.placeholder_token")
            self.reward_tokens = [self._single(token, "data.reward_tokens") for token in self.data.reward_tokens or []]

    def read(self, rows: Sequence[NamedRow], where: str) -> list[Rendered]:
        noted = self.noted
        examples, same_before, cut_before = [], len(noted.same), len(noted.cut)
        self.repeats = self._texts_repeat(rows, where)
        for name, row in rows:
            self.name, self.row, cut = f"{where}, {name}", name, len(noted.cut)
            self.lost, self.said, self.head = None, [], ""
            try:
                examples.append(self._row(row))
                self._count(name, row)
                noted.cut[cut + 1 :] = []  # both sides of a pair, which is one row
            except LeftOut:
                noted.cut[cut:] = []
                noted.left_out.append(name)
        if rows and not examples:
            raise UserError(f"{where}: all {len(rows)} rows are too long or empty and are left out; raise data.max_tokens")
        if rows and len(noted.same) - same_before == len(rows):
            columns = f"`{self.data.chosen_column}` and `{self.data.rejected_column}`"
            if len(noted.cut) > cut_before:
                raise UserError(
                    f"{where}: {columns} are the same in all {len(rows)} rows once they are cut at {self.limit} tokens; raise "
                    "data.max_tokens"
                )
            raise UserError(f"{where}: {columns} are the same in all {len(rows)} rows, so there is nothing to prefer; name other columns")
        return examples

    def collect(self, train: list[Rendered], heldout: list[Rendered]) -> SupervisedRows:
        return SupervisedRows(self._examples(train), self._examples(heldout), self.reward_tokens or None, self.notes + self.row_notes())

    def _examples(self, rows: list[Rendered]) -> Examples:
        if self.task == "kto":  # each response with the prompt of another row, to estimate the KL divergence
            others = [[row[0][0], self._mismatched(row, rows[number - 1])] for number, row in enumerate(rows)]
            rows = [(pair, extra) for pair, (_, extra) in zip(others, rows, strict=True)]
        return Examples.of([row for row, _ in rows], [extra for _, extra in rows])

    def _mismatched(self, row: Rendered, other: Rendered) -> Example:
        (own_example,), (theirs,) = row[0], other[0]
        tokens = [*own_example.tokens[: own_example.context_tokens], *theirs.tokens[theirs.context_tokens :]][: self.data.max_tokens]
        return Example(tokens, own_example.context_tokens)

    def row_notes(self) -> tuple[str, ...]:
        """Return messages for the user about all rows that were read."""
        rendered = self.renderer.notes if self.renderer else ()
        return self.noted.of_rows(self.data, self.limit, self.sliced) + rendered + self.noted.counted()

    def _count(self, name: str, row: JsonObject) -> None:
        """Count what a row says and how it was taken, and what nobody reads of it."""
        if self.renderer and self.lost:
            self.renderer.count(self.lost, name)
        self.noted.count([*self.said, *unread_columns(self.data, self.task, row)], name)

    def _texts_repeat(self, rows: Sequence[NamedRow], where: str) -> bool:
        """Return whether the responses of this data set are texts that repeat their prompts."""
        data = self.data
        columns = [data.chosen_column, data.rejected_column] if self.task in PAIRED else [data.response_column]
        if data.task or self.task == "prm" or not data.prompt_column or not all(columns):
            return False
        texts = []
        for name, row in rows:
            prompt, sides = row.get(data.prompt_column), [row.get(column) for column in columns]
            if isinstance(prompt, str) and all(isinstance(side, str) for side in sides):
                texts.append((name, self.first.cut(prompt), [self.first.cut(str(side)) for side in sides]))
        try:
            repeat, first, count = repeated_prompts.decide(texts)
        except ValueError as error:
            raise UserError(f"{where}, {error}") from None
        if count:
            taken = "which is trained once" if repeat else "and are taken as responses that quote it"
            self.notes += (f"responses of {count} of {len(rows)} rows begin with the prompt's text, {taken} (first {first})",)
        return repeat

    # ---- texts and tokens of a row --------------------------------------------------------------------------------------

    def prompt_text(self, name: str, row: JsonObject) -> str:
        """Return the prompt as a model sees it, and count what was taken otherwise than it says."""
        self.name, self.said = name, []
        text = self._prompt_text(row)
        self.noted.count(self.said, name)
        return text

    def _prompt_text(self, row: JsonObject) -> str:
        prompt = self._cell(row, self.data.prompt_column, "prompt_column")
        if self.data.template == "chat":
            assert self.renderer is not None
            turns = self._split(prompt, None, self.data.prompt_column)[0]
            text = self._template(turns, prompts=True)
            self.renderer.count(self.renderer.lost(turns, text, None, prompts=True), self.name)
            return text
        return prompt if self.data.input_template is None else self.data.input_template.format(self._without_first(prompt))

    def texts(self, name: str, row: JsonObject) -> tuple[str, str]:
        """Return prompt and response as a model sees them."""
        self.name = name
        prompt, response = (
            self._cell(row, column, key)
            for column, key in ((self.data.prompt_column, "prompt_column"), (self.data.response_column, "response_column"))
        )
        return self._texts(prompt, response, self.data.response_column)

    def tokens_as_openrlhf(self, prompt: str, response: str) -> Sequence[int] | None:
        """Return the sequence that OpenRLHF makes of these texts, or None if it leaves the row out."""
        try:
            return self._as_openrlhf(prompt, response).tokens
        except LeftOut:
            return None

    # ---- one row ------------------------------------------------------------------------------------------------------

    def _row(self, row: JsonObject) -> Rendered:
        data = self.data
        if data.template == "chat":
            try:
                self.tools = tools_of(row, data.tools_column, str(self.tokenizer.chat_template))
            except ValueError as error:
                raise UserError(f"{self.name}: {error}; fix or remove the row, or set data.tools_column to nothing") from None
        if self.task in PAIRED:
            self._check_prompts(row)
            chosen, chosen_head = self._pair_side(row, data.chosen_column), self.head
            rejected = self._pair_side(row, data.rejected_column)
            if self.task == "dpo" and data.contract == "own" and data.prompt_column and self.head != chosen_head:
                raise UserError(
                    f"{self.name}: `{data.chosen_column}` and `{data.rejected_column}` have different turns before the response, so they "
                    "are no responses to one prompt; fix or remove the row"
                )
            if list(chosen.tokens) == list(rejected.tokens):
                if data.contract == "own":
                    raise UserError(
                        f"{self.name}: `{data.chosen_column}` and `{data.rejected_column}` are the same, so there is nothing to prefer; "
                        "remove the row"
                    )
                self.noted.same.append(self.row)
            margin = row.get(data.margin_column) or 0.0 if self.task == "rm" else 0.0
            if not isinstance(margin, (int, float)) or isinstance(margin, bool) or not math.isfinite(margin):
                raise UserError(f"{self.name}: the margin in column `{data.margin_column}` is {margin!r}, not a number; fix the row")
            return [chosen, rejected], float(margin)
        if self.task == "prm":
            return [self._steps(row)], 0.0
        extra = 0.0
        if self.task == "kto":
            label = self._cell(row, data.label_column, "label_column")
            if label not in (True, False):
                raise UserError(f"{self.name}: the label in column `{data.label_column}` is {label!r}, neither true nor false; fix the row")
            extra = float(label)
        if data.train_on == "assistant":
            return [self._every_turn(self._turns(row))], extra
        prompt = self._cell(row, data.prompt_column, "prompt_column") if data.prompt_column else None
        response = self._cell(row, data.response_column, "response_column") if data.response_column else None
        return [self._sequence(prompt, response, data.response_column or data.prompt_column)], extra

    def _check_prompts(self, row: JsonObject) -> None:
        """Raise UserError for two whole conversations that are no responses to one prompt, whose log-probabilities tell no preference."""
        data = self.data
        if self.task != "dpo" or data.contract != "own" or data.prompt_column:
            return
        chosen, rejected = (
            self._cell(row, column, f"{side}_column")
            for side, column in (("chosen", data.chosen_column), ("rejected", data.rejected_column))
        )
        template = str(getattr(self.tokenizer, "chat_template", ""))
        histories = [repeated_prompts.comparable(side[:-1], template) for side in (chosen, rejected) if isinstance(side, list)]
        if len(histories) == 2 and histories[0] != histories[1]:
            raise UserError(
                f"{self.name}: the conversations in `{data.chosen_column}` and `{data.rejected_column}` differ before their last turn; "
                "put the turns that they share into a column and name it in data.prompt_column, or remove the row"
            )

    def _pair_side(self, row: JsonObject, column: str) -> Example:
        prompt = self._cell(row, self.data.prompt_column, "prompt_column") if self.data.prompt_column else None
        response = self._cell(row, column, "chosen_column" if column == self.data.chosen_column else "rejected_column")
        return self._sequence(prompt, response, column)

    def _sequence(self, prompt: object, response: object, column: str) -> Example:
        """Return one sequence. Without a prompt or without a response the other is the whole text or conversation."""
        if self.data.template == "chat":
            turns, first = self._split(prompt, response, column)
            before, after = self._chat_texts(turns, first, column, is_one=prompt is None or response is None)
            if self.data.contract == "openrlhf":
                if not self._says_untrained(turns if self.data.train_on == "all" else turns[first:]):
                    self._name_flags(turns, range(first))
                    return self._as_openrlhf(before, after)
                whole = before + after if self.data.train_on == "all" else self._ended(before + after)
                return self._marked(whole, self._spans(turns, first, before, after))
            if self.task == "rm":
                after = self._until_end(after)
            return self._marked(before + after, self._spans(turns, first, before, after))
        before, after = self._texts(prompt, response, column)
        if self.data.contract == "openrlhf":
            return self._as_openrlhf(before, after)
        if not after:
            if self.data.overlong == "leave_out":
                raise LeftOut
            raise UserError(f"{self.name}: column `{column}` is empty; fix or remove the row")
        if not before:
            tokens = self.first.put(self.ids(self.first.ready(after)))
            return self._limited([*tokens, *self._end(tokens)], int(tokens[:1] == [self.first.id]))
        head, tail = self.first.put(self.ids(self.first.ready(before))), self.ids(after)
        return self._limited([*head, *tail, *self._end(tail)], len(head))

    def _end(self, tail: list[int]) -> list[int]:
        """Return the end-of-sequence token, or nothing if the text ends with it or is trained as part of a longer text."""
        eos = self.tokenizer.eos_token_id
        return [] if self.data.train_on == "all" or tail[-1:] == [eos] else [eos]

    def _limited(self, tokens: list[int], context: int, mask: np.ndarray | None = None) -> Example:
        """Apply the token limit. `mask` (tokens,) bool: the trained tokens; None: all after `context`."""
        limit = self.limit
        if len(tokens) > limit:
            if self.data.overlong == "stop":
                raise UserError(
                    f"{self.name}: {len(tokens)} tokens are more than {limit} (data.max_tokens, or what the model takes); raise the limit, "
                    "shorten or remove the row, or set data.overlong to leave_out"
                )
            if self.data.overlong == "leave_out":
                raise LeftOut
            self.noted.cut.append(self.row)
            tokens = tokens[:limit]
            mask = None if mask is None else mask[:limit]
        context = max(1, context)
        if self.task == "rm":  # one token more, because values are read before the token that counts as trained
            return Example([*tokens, self.tokenizer.eos_token_id], min(context, len(tokens)), _only_last(tokens, context))
        if self.task == "prm" and mask is not None:
            return Example([*tokens, self.tokenizer.eos_token_id], 1, mask)
        trained = None if mask is None else mask[context:]
        if len(tokens) <= context or (trained is not None and not trained.any()):
            if self.data.overlong == "stop":
                raise UserError(f"{self.name}: nothing is left to train on; fix or remove the row")
            raise LeftOut
        return Example(tokens, context, trained)

    def _as_openrlhf(self, before: str, after: str) -> Example:
        """Tokenize as OpenRLHF's data sets do: one text, cut at the limit, with the end-of-sequence token as its last."""
        if self.data.train_on == "all":
            return self._limited(self.ids(after)[: self.data.max_tokens], 0)
        context = len(self.ids(before)) if before else 0
        if self.task in ("sft", "kd") and not (before and after):
            raise LeftOut
        if self.task != "rm" and context >= self.data.max_tokens - 2:
            raise LeftOut
        return self._limited(self._cut(self.ids(self._ended(before + after))), context)

    def _ended(self, text: str) -> str:
        """Return a text as OpenRLHF ends it: without newlines, and with the end-of-sequence token."""
        text, eos = text.rstrip("\n"), self.tokenizer.eos_token
        return text if text.endswith(eos) else f"{text} {eos}"

    def _cut(self, tokens: list[int]) -> list[int]:
        """Cut tokens at the limit as OpenRLHF does. The last one is the end-of-sequence token in any case."""
        if len(tokens) > self.limit:
            self.noted.cut.append(self.row)
        return [*tokens[: self.limit][:-1], self.tokenizer.eos_token_id]

    def _steps(self, row: JsonObject) -> Example:
        """Return a text whose steps end with placeholders. The token after a placeholder counts as trained."""
        data = self.data
        text, labels = self._cell(row, data.prompt_column, "prompt_column"), self._cell(row, data.label_column, "label_column")
        tokens = self.first.put(self.ids(self.first.ready(text)))
        steps = tokens.count(self.placeholder)
        if not steps:
            raise UserError(
                f"{self.name}: column `{data.prompt_column}` has no placeholder token `{data.placeholder_token}`, so it has no steps; "
                "fix or remove the row, or set data.placeholder_token"
            )
        if not isinstance(labels, list) or len(labels) != steps:
            labelled = f"{len(labels)} labels" if isinstance(labels, list) else "no list"
            raise UserError(f"{self.name}: column `{data.label_column}` has {labelled} for {steps} steps; give each step a label")
        values = [self._label(label) for label in labels]
        if data.contract == "openrlhf" and len(tokens) > self.limit:
            self.noted.cut.append(self.row)
            tokens = tokens[: self.limit]
        example = self._limited(tokens, 1, np.array(tokens) == self.placeholder)
        assert example.mask is not None
        if not example.mask.any():
            raise LeftOut
        return replace(example, labels=values[: int(example.mask.sum())])

    def _label(self, label: object) -> float:
        """Return a step's label as `step_loss` takes it; without reward tokens: the token."""
        named = f"{self.name}: the label {label!r} in column `{self.data.label_column}`"
        known = self.data.reward_tokens
        if isinstance(label, str):
            if known is None:
                return float(self._single(label, named))
            if label not in known:
                raise UserError(f"{named} is none of data.reward_tokens {', '.join(known)}; fix the row")
            place = known.index(label)
            return float(1 - place if len(known) == 2 else place)
        if isinstance(label, bool) or not isinstance(label, (int, float)) or not 0 <= label <= 1:
            raise UserError(f"{named} is neither a reward token nor a probability from 0 to 1; fix the row")
        if len(known or []) != 2:
            raise UserError(f"{named} is a probability; set data.reward_tokens to two tokens, whose first it is the probability of")
        return float(label)

    def _single(self, token: str, what: str) -> int:
        """Return the id of a text that is one token."""
        ids = self.ids(token)
        if len(ids) != 1:
            raise UserError(f"{what}: `{token}` is {len(ids)} tokens of policy.path's tokenizer, not one; choose another, or add it there")
        return ids[0]

    # ---- turns --------------------------------------------------------------------------------------------------------

    def _every_turn(self, turns: list[Turn]) -> Example:
        whole = self._whole(turns)
        if not any(turn.get("role") == "assistant" for turn in turns):
            raise UserError(f"{self.name}: the conversation has no turn of the assistant; fix or remove the row")
        spans = self._spans_of_turns(turns, 0, whole)
        if self.data.contract == "openrlhf":
            if len(turns) > 1 and len(self.ids(self._template(turns[:-1], prompts=True))) >= self.data.max_tokens - 2:
                raise LeftOut
            return self._marked(self._ended(whole), spans)
        return self._marked(whole, spans)

    def _marked(self, text: str, spans: list[tuple[int, int]]) -> Example:
        """Tokenize a rendered conversation; the tokens that begin within `spans` of characters are trained."""
        if not getattr(self.tokenizer, "is_fast", False):
            raise UserError("policy.path: its tokenizer is a slow one, which cannot map tokens to text positions; save a fast tokenizer")
        encoded = self._encoded(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.array([start for start, _ in encoded["offset_mapping"]])
        mask = np.zeros(len(starts), bool)
        for start, end in spans:
            mask |= (starts >= start) & (starts < end)
        tokens = encoded["input_ids"]
        if self.data.contract == "openrlhf":
            tokens = self._cut(tokens)
            mask = mask[: len(tokens)]
        context = int(np.argmax(mask)) if mask.any() else len(mask)
        return self._limited(tokens, context, mask)

    def ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._encoded(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def _encoded(self, text: str, **options: object) -> Any:
        check_characters(text, self.name)
        return self.tokenizer(text, **options)


def _only_last(tokens: list[int], context: int) -> np.ndarray:
    """Return the mask (tokens after the context, and one more) that keeps the last."""
    mask = np.zeros(len(tokens) + 1 - min(context, len(tokens)), bool)
    mask[-1] = True
    return mask
