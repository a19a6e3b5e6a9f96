"""Read, check and tokenize the recipe's prompts before anything is started."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import xxhash

from rlhfless_ray.common.errors import UserError, one_line, one_line_with_type
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.prompts.read_rows import (
    LostParts,
    NamedRow,
    cell_of,
    check_characters,
    lost_parts,
    missing_column,
    rendering_problem,
    tools_of,
    turn_problem,
    without_nulls,
)
from rlhfless_ray.prompts.sources import read_sources, rows_notes, split_paths
from rlhfless_ray.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhfless_ray.recipe import Recipe


@dataclass(frozen=True)
class PromptSet:
    """Prompts of a run. `train[i].index == i`; held-out prompts continue the numbering, so an index is unique in the run."""

    train: list[Prompt]
    heldout: list[Prompt]
    notes: tuple[str, ...] = ()  # messages for the user about rows that were left out or cut

    def checksum(self, column: str) -> str:
        """Return a checksum of the training rows' prompts, in their order and without a template. `column`: where rows have them."""
        digest = xxhash.xxh3_64()
        for prompt in self.train:
            digest.update(repr(prompt.row.get(column)).encode(errors="surrogatepass"))
        return digest.hexdigest()


def load_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, context_tokens: int | None = None) -> PromptSet:
    """Read or generate the rows, apply the template and tokenize.

    `context_tokens`: longest sequence that the policy takes. With template `chat` the text is rendered by the chat template,
    and no token is added to it. With template `none` a beginning-of-sequence token comes first if the tokenizer itself adds
    one and the recipe allows it. Nothing is added at the end. Rows that are too long raise a UserError, which names the row,
    unless the recipe says to leave them out or to cut them.
    """
    section, held = recipe.prompts, recipe.evaluate.prompts
    check_episodes(recipe, context_tokens)
    if section.task:
        source = task(section.task)
        # Held-out rows come from a stream of their own, and tasks keep their prompts out of the training split.
        rows = [*source.rows(section.rows, recipe.run.seed, "train"), *source.rows(held, recipe.run.seed, "heldout")]
        named_rows: list[NamedRow] = [(f"row {number}", row) for number, row in enumerate(rows, 1)]
        prompts, overlong = _make_prompts(named_rows, f"prompts.task {section.task}", "prompt", recipe, tokenizer, context_tokens)
        return PromptSet(*_split_heldout(prompts, held, len(overlong), recipe), _overlong_notes(overlong, recipe))
    seed = recipe.run.seed
    named_rows = read_sources(
        section.sources, section.split, "prompts", probabilities=section.probabilities, max_rows=section.max_rows, seed=seed
    )
    where = _setting_name("prompts", section.sources)
    unlimited = rows_notes("prompts", section.rows, type(section).model_fields["rows"].default, len(named_rows))
    prompts, overlong = _make_prompts(named_rows, where, section.prompt_column, recipe, tokenizer, context_tokens)
    if not recipe.evaluate.path or not held:
        train, heldout = _split_heldout(prompts, held, len(overlong), recipe)
        notes = unlimited + _overlong_notes(overlong, recipe) + _turn_notes(prompts, recipe, tokenizer)
        if len(heldout) > len(train):
            notes += (f"{held} of {len(prompts)} rows are held out of training (evaluate.prompts); lower it, or name evaluate.path",)
        return _without_repeats(train, heldout, recipe, notes)
    train, _ = _split_heldout(prompts, 0, len(overlong), recipe)
    sources = split_paths(recipe.evaluate.path)
    named_rows = read_sources(sources, recipe.evaluate.split, "evaluate", max_rows=section.max_rows)
    heldout, overlong_heldout = _make_prompts(
        named_rows, _setting_name("evaluate", sources), section.prompt_column, recipe, tokenizer, context_tokens
    )
    notes = unlimited + _overlong_notes(overlong + overlong_heldout, recipe) + _turn_notes([*train, *heldout], recipe, tokenizer)
    return PromptSet(train, [replace(p, index=len(train) + p.index) for p in heldout], notes)


def check_episodes(recipe: Recipe, context_tokens: int | None) -> None:
    """Raise UserError if an agent's episodes may be longer than the policy's context."""
    tokens = recipe.agent.max_tokens or 0
    if context_tokens is not None and tokens > context_tokens:
        raise UserError(f"agent.max_tokens: {tokens} exceeds the policy's context of {context_tokens} tokens; lower it")


def check_vocabulary(prompts: PromptSet, tokenizer: PreTrainedTokenizerBase, size: int | None) -> None:
    """Raise UserError for a prompt with a token that the policy has no embedding for, because only its tokenizer got it.

    `size`: number of the policy's embeddings; None: unknown.
    """
    if size is None or max(tokenizer.get_vocab().values()) < size:
        return
    for prompt in (*prompts.train, *prompts.heldout):
        if (token := max(prompt.token_ids)) >= size:
            raise without_embedding(f"prompt {prompt.text[:80]!r}", token, tokenizer, size)


def without_embedding(where: str, token: int, tokenizer: PreTrainedTokenizerBase, size: int) -> UserError:
    """Return the error for a text with a token that the model has no embedding for. `where`: the text, as the message names it."""
    return UserError(
        f"policy.path: {where} has the token {tokenizer.decode([token])!r} ({token}), and the model has embeddings for {size} tokens; "
        "resize them, or remove the token from the tokenizer"
    )


def _setting_name(section: str, sources: list[str]) -> str:
    return f"{section}.path {sources[0]}" if len(sources) == 1 else f"{section}.path{'s' if section == 'prompts' else ''}"


def _split_heldout(prompts: list[Prompt], held: int, left_out: int, recipe: Recipe) -> tuple[list[Prompt], list[Prompt]]:
    """Split into training and held-out prompts. Raises UserError if there are too few."""
    n_train = len(prompts) - held
    batch = recipe.prompts.batch_prompts
    if n_train < (1 if recipe.run.episodes else batch):
        section = recipe.prompts
        where = f"prompts.task {section.task}" if section.task else _setting_name("prompts", section.sources)
        setting = "prompts.rows" if section.task else "the file"
        without = f" ({left_out} are too long and left out)" if left_out and section.overlong == "leave_out" else ""
        raise UserError(
            f"{where}: {len(prompts)} rows{without} are too few for {batch} prompts per step (prompts.batch_prompts) "
            f"and {held} held-out ones (evaluate.prompts); lower one of them, or add rows to {setting}"
        )
    return prompts[:n_train], prompts[n_train:]


def _without_repeats(train: list[Prompt], heldout: list[Prompt], recipe: Recipe, notes: tuple[str, ...]) -> PromptSet:
    """Leave rows out of training that are also held out: a mix repeats the rows of smaller data sets."""
    held = {id(prompt.row) for prompt in heldout}  # a repeated row is the same object
    kept = [prompt for prompt in train if id(prompt.row) not in held]
    if len(kept) == len(train):
        return PromptSet(train, heldout, notes)
    kept, heldout = _split_heldout([*kept, *heldout], len(heldout), 0, recipe)
    numbered = [replace(prompt, index=i) for i, prompt in enumerate([*kept, *heldout])]
    note = f"{len(train) - len(kept)} repetitions of held-out rows (evaluate.prompts) in the mix are left out of training"
    return PromptSet(numbered[: len(kept)], numbered[len(kept) :], (*notes, note))


def _make_prompts(
    named_rows: list[NamedRow], where: str, column: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, context_tokens: int | None
) -> tuple[list[Prompt], list[str]]:
    """Return prompts counted from 0, and the names of rows that are too long, which are left out or cut."""
    if not recipe.prompts.task:
        _check_columns(named_rows, where, column, recipe)
    texts = _render(named_rows, where, column, recipe, tokenizer)
    for (name, _), text in zip(named_rows, texts, strict=True):
        check_characters(text, f"{where}, {name}")
    ids = _token_ids(texts, where, recipe, tokenizer)
    limit, cuts = recipe.prompts.max_prompt_tokens, recipe.prompts.overlong == "cut_left"
    excess = [max(0, len(tokens) - limit) for tokens in ids]
    if cuts:
        ids = [tokens[cut:] for tokens, cut in zip(ids, excess, strict=True)]
    _check_lengths(named_rows, ids, where, recipe, context_tokens)
    rows = [found for found in zip(named_rows, texts, ids, excess, strict=True) if cuts or not found[-1]]
    prompts = [
        Prompt(index=i, text=text, token_ids=tuple(tokens), row=row, cut_tokens=cut) for i, ((_, row), text, tokens, cut) in enumerate(rows)
    ]
    return prompts, [name for (name, _), cut in zip(named_rows, excess, strict=True) if cut]


def _overlong_notes(names: list[str], recipe: Recipe) -> tuple[str, ...]:
    if not names:
        return ()
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    limit = recipe.prompts.max_prompt_tokens
    done = "are cut from the left" if recipe.prompts.overlong == "cut_left" else "are left out"
    return (f"{len(names)} prompts of more than {limit} tokens (prompts.max_prompt_tokens) {done}: {shown}",)


def _turn_notes(prompts: list[Prompt], recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Say what of the turns the chat template leaves out, and that conversations end with the assistant's turn.

    That turn may be the answer: then the policy reads it before it writes its own.
    """
    if recipe.prompts.template != "chat" or recipe.prompts.task:
        return ()
    lost, count, template = LostParts(), 0, str(tokenizer.chat_template)
    for prompt in prompts:
        turns = _turns_of(prompt.row, recipe.prompts.prompt_column, recipe)
        lost.count(lost_parts(turns, prompt.text, template))
        count += turns[-1].get("role") == "assistant"
    text = "end with a turn of the assistant, and the policy writes another one after it; remove that turn if it is the answer"
    return lost.notes + ((f"{count} of {len(prompts)} prompts {text}",) if count else ())


def _turns_of(row: dict[str, Any], column: str, recipe: Recipe) -> list[dict[str, Any]]:
    """Return the turns that the chat template gets for a row."""
    cell, system = cell_of(row, column), recipe.prompts.system
    turns = [{"role": "user", "content": cell}] if isinstance(cell, str) else cell
    return [{"role": "system", "content": system}, *turns] if system else turns


def _check_columns(named_rows: list[NamedRow], where: str, prompt_column: str, recipe: Recipe) -> None:
    """Check that the columns exist and hold text. A label may be null if the reward gets it unchanged, as in OpenRLHF."""
    answer_column, turns = recipe.prompts.answer_column, recipe.prompts.template == "chat"
    passes_labels_on = not recipe.reward.function or recipe.reward.contract == "openrlhf"
    for name, row in named_rows:
        for key, column in (("prompt_column", prompt_column), ("answer_column", answer_column)):
            if not column:
                continue
            if column not in row:
                unneeded = ", or leave it empty if there are no answers" if key == "answer_column" else ""
                raise UserError(f"{where}, {name}: {missing_column(row, column, f'prompts.{key}')}{unneeded}")
        cell = row[prompt_column]
        is_conversation = turns and isinstance(cell, list) and cell and all(isinstance(turn, dict) for turn in cell)
        if not is_conversation and not isinstance(cell, str):
            kind = "null" if cell is None else f"of type {type(cell).__name__}"
            raise UserError(
                f"{where}, {name}: the prompt in column `{prompt_column}` is {kind}, not a string; fix the row or set prompts.prompt_column"
            )
        if not cell:
            raise UserError(f"{where}, {name}: the prompt in column `{prompt_column}` is empty; fix or remove the row")
        answer = row[answer_column] if answer_column else ""
        is_nan = isinstance(answer, float) and math.isnan(answer)  # where a table of numbers lacks one
        if (answer is None or is_nan) and not passes_labels_on:
            raise UserError(
                f"{where}, {name}: the answer in column `{answer_column}` is {'NaN' if is_nan else 'null'}; fix or remove the row, or set "
                "prompts.answer_column to nothing"
            )


def _render(named_rows: list[NamedRow], where: str, column: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    section = recipe.prompts
    if section.template == "none":
        if section.system:
            raise UserError("prompts.system: a system turn needs prompts.template=chat; set it, or remove prompts.system")
        template = section.input_template
        return [row[column] if template is None else template.format(row[column]) for _, row in named_rows]
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"prompts.template: the tokenizer of {recipe.policy.path or 'the built-in policy'} has no chat template; set "
            "prompts.template=none or use a chat model"
        )
    texts = []
    for name, row in named_rows:
        turns = _turns_of(row, column, recipe)
        if section.system and turns[1].get("role") == "system":
            raise UserError(f"{where}, {name}: the row has a system turn of its own; remove prompts.system, or the turn")
        if wrong := turn_problem(turns, str(tokenizer.chat_template)):
            raise UserError(f"{where}, {name}: {wrong}; fix or remove the row")
        try:
            tools = tools_of(row, section.tools_column, str(tokenizer.chat_template))
        except ValueError as error:
            raise UserError(f"{where}, {name}: {error}; fix or remove the row, or set prompts.tools_column to nothing") from None
        try:
            texts.append(str(tokenizer.apply_chat_template(without_nulls(turns), tools=tools, tokenize=False, add_generation_prompt=True)))
        except Exception as error:  # a template may raise anything; its message says what it rejects
            raise UserError(
                f"{where}, {name}: the chat template failed ({one_line_with_type(error)}); change prompts.system or use "
                "prompts.template=none"
            ) from None
        if wrong := rendering_problem(turns, texts[-1], str(tokenizer.chat_template)):
            raise UserError(f"{where}, {name}: {wrong}")
    return texts


def _token_ids(texts: list[str], where: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    try:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    except Exception as error:
        raise UserError(f"{where}: the policy's tokenizer cannot encode the prompts ({one_line(error)}); use another policy") from None
    if recipe.prompts.task and not recipe.policy.path:
        for text, tokens in zip(texts, ids, strict=True):
            if tokenizer.decode(tokens) != text:
                raise UserError(
                    f"prompts.input_template: the built-in policy reads the symbols of {where} only, not all of {text[:80]!r}; leave "
                    "it out, or set policy.path"
                )
    if recipe.prompts.template == "none" and recipe.prompts.add_bos and tokenizer.bos_token_id is not None:
        added = tokenizer("")["input_ids"]
        if added[:1] == [tokenizer.bos_token_id]:
            ids = [[tokenizer.bos_token_id, *tokens] for tokens in ids]
    return ids


def _check_lengths(named_rows: list[NamedRow], ids: list[list[int]], where: str, recipe: Recipe, context_tokens: int | None) -> None:
    """Raise UserError for a row that is too long, unless such rows are to be left out."""
    limit, rollout = recipe.prompts.max_prompt_tokens, recipe.rollout
    for (name, _), tokens in zip(named_rows, ids, strict=True):
        use = len(tokens) <= limit
        if not tokens:
            raise UserError(f"{where}, {name}: the policy's tokenizer encodes the prompt as no tokens; check its vocabulary")
        if not use and recipe.prompts.overlong == "stop":
            raise UserError(
                f"{where}, {name}: the prompt has {len(tokens)} tokens, more than prompts.max_prompt_tokens = {limit}; "
                "raise the limit, shorten or remove the row, or set prompts.overlong=leave_out"
            )
        room = rollout.response_tokens(len(tokens))
        if use and room < 1:
            raise UserError(
                f"{where}, {name}: {len(tokens)} prompt tokens leave no room for a response within "
                f"rollout.max_total_tokens = {rollout.max_total_tokens}; raise it, or lower prompts.max_prompt_tokens"
            )
        if use and context_tokens is not None and len(tokens) + room > context_tokens:
            key = "max_tokens" if room == rollout.max_tokens else "max_total_tokens"
            raise UserError(
                f"{where}, {name}: {len(tokens)} prompt tokens and rollout.{key} = {getattr(rollout, key)} exceed "
                f"the policy's context of {context_tokens} tokens; lower rollout.{key}, or shorten or remove the row"
            )
