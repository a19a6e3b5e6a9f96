"""The recipe's prompts, checked and tokenized before anything is started."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhfless_ray.errors import UserError
from rlhfless_ray.prompts.read import Named, read_rows
from rlhfless_ray.prompts.tasks import task
from rlhfless_ray.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhfless_ray.recipe import Recipe


@dataclass(frozen=True)
class PromptSet:
    """`train[i].index == i`; held-out prompts go on counting from there, so an index names one prompt of the run."""

    train: list[Prompt]
    heldout: list[Prompt]


def load_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, context_tokens: int | None = None) -> PromptSet:
    """Read or generate the rows, apply the template and tokenize; `context_tokens` is the longest sequence the policy takes.

    With template `chat` the text is what the chat template renders, and its token ids are that text's, nothing added. With
    template `none` the beginning-of-sequence token comes first exactly where the tokenizer itself would put one, and
    nothing is ever added at the end. Prompts are never truncated and rows never dropped: what does not fit raises a
    UserError that names the row.
    """
    section = recipe.prompts
    held = recipe.evaluate.prompts
    if section.task:
        source = task(section.task)
        where = f"prompts.task {section.task}"
        # Held-out rows come from their own stream, and a task keeps their prompts out of the training split.
        train_rows = source.rows(section.rows, recipe.run.seed, "train")
        rows = [*train_rows, *source.rows(held, recipe.run.seed, "heldout")]
        named: list[Named] = [(f"row {number}", row) for number, row in enumerate(rows, 1)]
        prompt_column = "prompt"
    else:
        where = f"prompts.path {section.path}"
        named = read_rows(section.path)
        prompt_column = section.prompt_column
        _check_columns(named, where, prompt_column, section.answer_column)
    n_train = len(named) - held
    if n_train < section.batch_prompts:
        setting = "prompts.rows" if section.task else "the file"
        raise UserError(
            f"{where}: {len(named)} rows are too few for {section.batch_prompts} prompts per step (prompts.batch_prompts) "
            f"and {held} held-out ones (evaluate.prompts); lower one of them, or add rows to {setting}"
        )
    texts = _texts(named, where, prompt_column, recipe, tokenizer)
    ids = _token_ids(texts, where, recipe, tokenizer)
    _check_lengths(named, ids, where, recipe, context_tokens)
    prompts = [
        Prompt(index=i, text=text, token_ids=tuple(tokens), row=row)
        for i, ((_, row), text, tokens) in enumerate(zip(named, texts, ids, strict=True))
    ]
    return PromptSet(train=prompts[:n_train], heldout=prompts[n_train:])


def _check_columns(named: list[Named], where: str, prompt_column: str, answer_column: str) -> None:
    for name, row in named:
        for key, column in (("prompt_column", prompt_column), ("answer_column", answer_column)):
            if not column:
                continue
            if column not in row:
                close = difflib.get_close_matches(column, [str(c) for c in row], n=1, cutoff=0.5)
                hint = f"did you mean `{close[0]}`? Set" if close else "set"
                raise UserError(
                    f"{where}, {name}: no column `{column}`, only {', '.join(f'`{c}`' for c in row) or 'an empty row'}; "
                    f"{hint} prompts.{key}"
                )
        cell = row[prompt_column]
        if not isinstance(cell, str):
            raise UserError(
                f"{where}, {name}: the prompt in column `{prompt_column}` is {_kind(cell)}, not a string; fix the row or "
                "set prompts.prompt_column"
            )
        if not cell:
            raise UserError(f"{where}, {name}: the prompt in column `{prompt_column}` is empty; fix or remove the row")
        if answer_column and row[answer_column] is None:
            raise UserError(
                f"{where}, {name}: the answer in column `{answer_column}` is null; fix or remove the row, or set "
                "prompts.answer_column to nothing"
            )


def _texts(named: list[Named], where: str, column: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    section = recipe.prompts
    if section.template == "none":
        if section.system:
            raise UserError("prompts.system: a system turn needs prompts.template=chat; set it, or remove prompts.system")
        return [row[column] for _, row in named]
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"prompts.template: the tokenizer of {recipe.policy.path or 'the built-in policy'} has no chat template; set "
            "prompts.template=none or use a chat model"
        )
    system = [{"role": "system", "content": section.system}] if section.system else []
    texts = []
    for name, row in named:
        turns = [*system, {"role": "user", "content": row[column]}]
        try:
            texts.append(str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)))
        except Exception as error:  # a template may raise anything; its own words say what it refuses
            words = " ".join(str(error).split())
            raise UserError(
                f"{where}, {name}: the chat template failed ({type(error).__name__}: {words}); change prompts.system or use "
                "prompts.template=none"
            ) from None
    return texts


def _token_ids(texts: list[str], where: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    try:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    except Exception as error:
        words = " ".join(str(error).split())
        raise UserError(f"{where}: the policy's tokenizer cannot encode the prompts ({words}); use another policy") from None
    if recipe.prompts.template == "none" and tokenizer.bos_token_id is not None:
        added = tokenizer("")["input_ids"]
        if added[:1] == [tokenizer.bos_token_id]:
            ids = [[tokenizer.bos_token_id, *tokens] for tokens in ids]
    return ids


def _check_lengths(
    named: list[Named], ids: list[list[int]], where: str, recipe: Recipe, context_tokens: int | None
) -> None:
    limit = recipe.prompts.max_prompt_tokens
    for (name, _), tokens in zip(named, ids, strict=True):
        if len(tokens) > limit:
            raise UserError(
                f"{where}, {name}: the prompt has {len(tokens)} tokens, more than prompts.max_prompt_tokens = {limit}; "
                "raise the limit, or shorten or remove the row"
            )
        if context_tokens is not None and len(tokens) + recipe.rollout.max_tokens > context_tokens:
            raise UserError(
                f"{where}, {name}: {len(tokens)} prompt tokens and rollout.max_tokens = {recipe.rollout.max_tokens} exceed "
                f"the policy's context of {context_tokens} tokens; lower rollout.max_tokens, or shorten or remove the row"
            )


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
