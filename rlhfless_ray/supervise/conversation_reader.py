"""Render the conversations of supervised rows, and find the parts of their texts that are trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.errors import UserError, one_line
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.prompts.conversations import BadTurns, ChatRenderer, Lost, Turn, cell_of, is_conversation, reads
from rlhfless_ray.prompts.first_token import FirstToken
from rlhfless_ray.prompts.read_rows import missing_column
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise import repeated_prompts
from rlhfless_ray.supervise.trained_turns import is_flag, trained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOT_THE_MODEL = ("user", "system", "developer", "tool", "function")  # roles of turns that the model does not write
CUT_TEXTS = "texts inside a longer one that begin with the beginning-of-text token, which is left out of them"
CUT_TURNS = (
    "turns that begin with the beginning-of-text token, which is left out of them because the chat template writes it (set data.template "
    "to none if they are whole texts already)"
)


class LeftOut(Exception):
    """A row that the recipe says to leave out."""


class ConversationReader:
    """Render one row's conversations at a time. Attributes that are not set here describe that row."""

    def __init__(self, recipe: SupervisedRecipe, tokenizer: PreTrainedTokenizerBase) -> None:
        self.data, self.task, self.tokenizer = recipe.data, recipe.task, tokenizer
        self.name = self.row = ""  # with and without the data set's
        self.tools: list[JsonObject] | None = None
        self.lost: Lost | None = None  # what the chat template leaves out
        self.said: list[tuple[str, str]] = []  # how something is taken → what the row says
        self.head = ""  # text before the response that was rendered last
        self.repeats = False  # whether the texts of its data set repeat their prompts
        self.sliced: list[str] = []  # rows whose response is what lies beyond the length of the prompt's text
        self.first = FirstToken(tokenizer, self.data.template == "none" and self.data.add_bos)
        self.has_flags = self.task in ("sft", "kd", "dpo", "kto")  # others train no tokens of turns
        self.renderer: ChatRenderer | None = None
        self.cuts_first = self.first.is_added or self.first.begins(self.data.input_template or "")
        if self.data.template == "chat":
            if not getattr(tokenizer, "chat_template", None):
                raise UserError("data.template: the tokenizer of policy.path has no chat template; set data.template to none")
            self.renderer = ChatRenderer(tokenizer, is_own=is_flag if self.has_flags else None, refuse_calls=self.data.contract == "own")
            self.cuts_first = self.first.template_writes_it(tokenizer)

    def _cell(self, row: JsonObject, column: str, key: str) -> Any:
        if column not in row:
            raise UserError(f"{self.name}: {missing_column(row, column, f'data.{key}')}")
        try:
            value = cell_of(row, column) if key != "label_column" else row[column]
        except ValueError as error:
            raise UserError(f"{self.name}: {error}; fix or remove the row") from None
        if isinstance(value, list) and not value and isinstance(row[column], str):
            value = row[column]
        turns = is_conversation(value)
        if key != "label_column" and not (isinstance(value, str) or (turns and self.data.template == "chat")):
            kind = (
                "null" if value is None else "a list of turns" if turns else "empty" if value == [] else f"of type {type(value).__name__}"
            )
            need = "a string or a list of turns" if self.data.template == "chat" else "a string"
            hint = "; set data.template to chat" if turns else "; fix the row or the column's name"
            raise UserError(f"{self.name}: column `{column}` is {kind}, not {need}{hint}")
        return value

    def _turns(self, row: JsonObject) -> list[Turn]:
        """Return the whole conversation of a row."""
        data = self.data
        prompt = self._cell(row, data.prompt_column, "prompt_column") if data.prompt_column else None
        has_response = bool(data.response_column) and data.response_column in row
        response = self._cell(row, data.response_column, "response_column") if has_response else None
        return self._split(prompt, response, data.response_column if has_response else data.prompt_column)[0]

    def _texts(self, prompt: Any, response: Any, column: str) -> tuple[str, str]:
        """Return the text before the trained text, and the trained text."""
        if self.data.template == "chat":
            turns, first = self._split(prompt, response, column)
            return self._chat_texts(turns, first, column, is_one=prompt is None or response is None)
        own_texts = self.task == "rm" or (self.task == "dpo" and self.data.contract == "openrlhf")
        whole = self.data.train_on == "all" or (own_texts and prompt is None)
        if prompt is not None and response is not None:
            response = self._without_prompt(prompt, response)
            if self.first.begins(response) and (self.cuts_first or self.first.begins(prompt)):
                response = self._without_first(response, always=True)
        if prompt is not None and self.data.input_template is not None:
            prompt = self.data.input_template.format(self._without_first(prompt))
        if prompt is None or response is None:
            if not whole:
                missing = "prompt" if prompt is None else "response"
                other = ", or data.train_on to all" if self.task in ("sft", "kd") else ""
                raise UserError(f"{self.name}: there is no {missing} beside column `{column}`; set data.{missing}_column{other}")
            return "", prompt or response
        return ("", prompt + response) if whole else (prompt, response)

    def _until_end(self, text: str) -> str:
        """Return a rendered conversation without blanks after its end-of-sequence token, with which a rollout ends."""
        head, end, rest = text.rpartition(self.tokenizer.eos_token)
        return head + end if end and not rest.strip() else text

    def _split(self, prompt: object, response: object, column: str) -> tuple[list[Turn], int]:
        """Return the turns of a conversation, and the number of those before the response."""
        if isinstance(prompt, str) and isinstance(response, str):
            left = self._without_prompt(prompt, response)
            response = left if left == response else left.lstrip()
        before = prompt if isinstance(prompt, list) else [] if prompt is None else [{"role": "user", "content": prompt}]
        after = response if isinstance(response, list) else [] if response is None else [{"role": "assistant", "content": response}]
        if prompt is not None and isinstance(response, list):
            shown, template = before, str(self.tokenizer.chat_template)
            try:
                before, after = repeated_prompts.split(before, after, template)
            except ValueError as error:
                raise UserError(f"{self.name}: column `{column}` {error} (data.prompt_column); fix the row or the columns' names") from None
            if len(after) < len(response):
                self.said.append(("conversations that repeat the prompt, which is trained once", column))
            if before is not shown:
                self.said.append(
                    ("conversations with a system turn that the prompt's column lacks, which is put before the prompt", column)
                )
        turns = [*before, *after]
        if not turns:
            raise UserError(f"{self.name}: column `{column}` is empty; fix or remove the row")
        if self.cuts_first and (cut := self.first.cut_turns(turns)) != turns:
            self.said.append((CUT_TURNS, self.first.text))
            turns = cut
        return turns, len(turns) - 1 if prompt is None or response is None else len(before)

    def _chat_texts(self, turns: list[Turn], first: int, column: str, *, is_one: bool) -> tuple[str, str]:
        """Return the text before the response, and the rest of the conversation's text.

        `first`: number of turns before the response. `is_one`: whether one column has them all.
        """
        before = turns[:first]
        whole = self._whole(turns)
        # A reward model also reads what an agent did until its last tool call, and OpenRLHF trains on any last turn.
        refused = NOT_THE_MODEL if self.data.contract == "own" and self.task != "rm" else ("user",)
        if (role := turns[-1].get("role")) in refused and self.data.train_on != "all":
            raise UserError(f"{self.name}: the last turn of column `{column}` is of role `{role}`, not a response; fix or remove the row")
        if self.data.train_on == "all" or (self.task == "rm" and is_one):
            return "", whole  # which is read as one text
        if not before:
            head = self._opening(whole)
        else:
            head = self._template(before, prompts=True)
            if not whole.startswith(head) and self.data.contract == "openrlhf":  # it takes what lies beyond the length of the beginning
                self.sliced = list(dict.fromkeys([*self.sliced, self.row]))
            elif not whole.startswith(head):
                raise UserError(
                    f"{self.name}: the chat template of policy.path does not render a conversation as its beginning and a response, so the "
                    "response's tokens cannot be told apart; use another template, or data.template none"
                )
        self.head = head
        return ("", whole) if self.task == "rm" else (head, whole[len(head) :])

    def _spans(self, turns: list[Turn], first: int, before: str, after: str) -> list[tuple[int, int]]:
        """Return the spans of characters that are trained. `first`: number of turns before the response."""
        whole, end = before + after, len(before + after)
        if self.task == "rm":
            return [(len(before), end)]
        if self.data.train_on == "all":
            untrained = self._spans_of_turns(turns, 0, whole, untrained=True)
            bounds = [0, *(place for span in untrained for place in span), end]
            return list(zip(bounds[::2], bounds[1::2], strict=True))
        if len(turns) - first == 1:
            says, words = self._says(len(turns), turns[-1])
            if says is False:
                raise UserError(
                    f"{self.name}: the response says `{words}`, so nothing is left to train on; remove the row, or change what it says"
                )
            self._check_trained(len(turns), turns[-1])
            self._name_flags(turns, range(first))
            return [(len(before), end)]
        return self._spans_of_turns(turns, first, whole)

    def _spans_of_turns(self, turns: list[Turn], first: int, whole: str, *, untrained: bool = False) -> list[tuple[int, int]]:
        """Return the spans of characters of the model's turns from `first` on that are trained, or of all turns that say they are not."""
        spans, skipped = [], []
        for number, turn in enumerate(turns):
            says = self._says(number + 1, turn)[0]
            is_model = turn.get("role") == "assistant" or (first > 0 and turn.get("role") not in NOT_THE_MODEL)
            is_trained = says is not False and (untrained or (number >= first and is_model))
            if not is_trained:
                skipped.append(number)
            if is_trained == untrained:
                continue
            tail = self._template(turns[: number + 1])
            head = self._template(turns[:number], prompts=is_model) if number else self._opening(tail) if is_model else ""
            if not whole.startswith(tail) or not tail.startswith(head):
                instead = "set data.train_on to response, or " if self.data.train_on == "assistant" else ""
                raise UserError(
                    f"{self.name}: the chat template of policy.path renders turn {number + 1} differently when others follow it, so its "
                    f"tokens cannot be told apart; {instead}use another template"
                )
            if not untrained:
                self._check_trained(number + 1, turn)
            spans.append((len(head), len(tail)))
        self._name_flags(turns, skipped)
        return spans

    def _says(self, number: int, turn: Turn) -> tuple[bool | None, str]:
        """Return whether turn `number` (from 1) says that it is trained, see `trained`."""
        try:
            return trained(turn) if self.has_flags else (None, "")
        except ValueError as error:
            raise UserError(f"{self.name}: turn {number} {error}") from None

    def _says_untrained(self, turns: list[Turn]) -> bool:
        return any(self._says(number, turn)[0] is False for number, turn in enumerate(turns, 1))

    def _name_flags(self, turns: list[Turn], untrained: Iterable[int]) -> None:
        """Note what the turns that are not trained say about it."""
        for number in untrained:
            says, words = self._says(number + 1, turns[number])
            if says:
                self.said.append(("turns that say they are trained, which are not because of data.train_on or their role", words))
            elif says is False and turns[number].get("role") == "assistant":
                self.said.append(("turns that are not trained because they say so", words))

    def _check_trained(self, number: int, turn: Turn) -> None:
        """Refuse a turn of the model that is empty, which would teach to end at once. OpenRLHF trains on it."""
        assert self.renderer is not None
        content = turn.get("content")
        is_empty = not (content.strip() if isinstance(content, str) else content)
        others = (key for key, value in turn.items() if value and key not in ("role", "content") and not is_flag(key))
        if is_empty and self.data.contract == "own" and not any(reads(key, self.renderer.template) for key in others):
            if self.data.overlong == "leave_out":
                raise LeftOut
            raise UserError(f"{self.name}: turn {number} is empty, and it would be trained; fix or remove the row")

    def _opening(self, text: str) -> str:
        """Return what the chat template puts before a response without a prompt, if it renders that and `text` begins with it."""
        try:
            head = str(self.tokenizer.apply_chat_template([], tokenize=False, add_generation_prompt=True))
        except Exception:  # a template may raise anything
            return ""
        return head if text.startswith(head) else ""

    def _whole(self, turns: list[Turn]) -> str:
        """Render a row's whole conversation, and note what the chat template leaves out of it."""
        assert self.renderer is not None
        text = self._template(turns)
        lost = self.renderer.lost(turns, text, self.tools, prompts=False)
        self.lost = lost if self.lost is None else Lost(*(a | b for a, b in zip(self.lost, lost, strict=True)))
        return text

    def _template(self, turns: list[Turn], prompts: bool = False) -> str:
        assert self.renderer is not None
        try:
            return self.renderer.render(turns, self.tools, prompts=prompts)
        except BadTurns as error:
            raise UserError(f"{self.name}: {error}") from None
        except Exception as error:  # a template may raise anything
            whose = "data.chat_template" if self.data.chat_template else "the chat template of policy.path"
            raise UserError(f"{self.name}: {whose} refuses the conversation: {one_line(error, 200)}") from None

    def _without_prompt(self, prompt: str, response: str) -> str:
        """Return a response without the prompt, if the responses of this data set repeat it."""
        asked, said = self.first.cut(prompt), self.first.cut(response)
        return said[len(asked) :] if self.repeats and repeated_prompts.repeats(asked, said) else response

    def _without_first(self, text: str, always: bool = False) -> str:
        """Return a text that is put behind the beginning-of-text token without one of its own."""
        if not self.first.begins(text) or not (always or self.cuts_first):
            return text
        self.said.append((CUT_TEXTS, self.first.text))
        return self.first.cut(text)
