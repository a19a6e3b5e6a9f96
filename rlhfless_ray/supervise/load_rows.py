"""Read, check and tokenize the rows of a supervised stage before anything is started."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.prompts.builtin_tasks import task as builtin_task
from rlhfless_ray.prompts.load_prompts import without_embedding
from rlhfless_ray.prompts.read_rows import NamedRow
from rlhfless_ray.prompts.sources import read_sources, rows_notes, split_paths
from rlhfless_ray.recipe.supervised_sections import WITH_NEXT, SupervisedRecipe
from rlhfless_ray.supervise.row_reader import Rendered, RowReader, SupervisedRows
from rlhfless_ray.weights.model_folder import stop_tokens
from rlhfless_ray.weights.tensor_file import Files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK = 1 << 16  # tokens that are searched at once: mostly the first response has what is searched
DRAWS = 8  # responses of a built-in task that are drawn to find a right and a wrong one


def load_rows(recipe: SupervisedRecipe, tokenizer: PreTrainedTokenizerBase, context_tokens: int | None = None) -> SupervisedRows:
    """Read or generate the rows and tokenize them.

    `context_tokens`: longest sequence that the model takes.

    Raises:
        UserError: For a row without the columns, of the wrong type, too long, or with two equal responses. The message names the row.
    """
    data, evaluate = recipe.data, recipe.evaluate
    reader = RowReader(recipe, tokenizer, context_tokens)
    if data.task:
        train = reader.read(_builtin_rows(recipe, data.rows, "train"), f"data.task {data.task}")
        heldout = reader.read(_builtin_rows(recipe, evaluate.rows, "heldout"), f"data.task {data.task}")
        return reader.collect(train, heldout or _first(train, evaluate.train_share))
    rows = read_sources(data.sources, data.split, "data", probabilities=data.probabilities, max_rows=data.max_rows, seed=recipe.run.seed)
    reader.notes = rows_notes("data", data.rows, type(data).model_fields["rows"].default, len(rows))
    where = f"data.path {data.sources[0]}" if len(data.sources) == 1 else "data.paths"
    train = reader.read(rows, where)
    if evaluate.path:
        heldout_rows = read_sources(split_paths(evaluate.path), evaluate.split, "evaluate", max_rows=evaluate.rows or None)
        heldout = reader.read(heldout_rows, f"evaluate.path {evaluate.path}")
        return reader.collect(train, heldout)
    if len(train) <= evaluate.rows:
        raise UserError(f"evaluate.rows: {evaluate.rows} held-out rows leave none of the {len(train)} of {where} to train on; lower it")
    split = len(train) - evaluate.rows
    kept, heldout = train[:split], train[split:]
    if data.probabilities is None or not heldout:
        return reader.collect(kept, heldout or _first(train, evaluate.train_share))
    others = _without_repeats(kept, heldout)
    if not others:
        raise UserError(f"evaluate.rows: the mix of {where} repeats the held-out rows only, so none is left to train on; lower it")
    collected = reader.collect(others, heldout)
    if len(others) == len(kept):
        return collected
    note = f"{len(kept) - len(others)} repetitions of held-out rows (evaluate.rows) in the mix are left out of training"
    return replace(collected, notes=(*collected.notes, note))


def check_vocabulary(rows: SupervisedRows, tokenizer: PreTrainedTokenizerBase, size: int | None) -> None:
    """Raise UserError for a row with a token that the model has no embedding for, because only its tokenizer got it.

    `size`: number of the model's embeddings; None: unknown.
    """
    for examples in (rows.train, rows.heldout):
        if size is None or not len(examples.tokens) or (token := int(examples.tokens.max())) < size:
            continue
        sequence = int(np.searchsorted(examples.starts, examples.tokens.argmax(), side="right")) - 1
        start = int(examples.starts[sequence])
        text = tokenizer.decode(examples.tokens[start : start + int(examples.lengths[sequence])].tolist())
        raise without_embedding(f"the row {text[:80]!r}", token, tokenizer, size)


def end_note(recipe: SupervisedRecipe, rows: SupervisedRows, files: Files, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return a note if no trained response ends, because the chat template ends turns with another token than the model's rollouts.

    `files`: the model's.
    """
    if recipe.task in WITH_NEXT or recipe.data.template != "chat" or recipe.data.train_on == "all":
        return ()
    ends = stop_tokens(files, tokenizer.eos_token_id)
    tokens, mask = rows.train.tokens, rows.train.mask
    for part in (slice(start, start + BLOCK) for start in range(0, len(tokens), BLOCK)):
        if np.isin(tokens[part][mask[part]], ends).any():
            return ()
    named = ", ".join(repr(tokenizer.decode([token])) for token in ends)
    return (
        f"no trained response has an end-of-sequence token ({named}), because the chat template writes none, so rollouts of the model will "
        "end at their limit only; make the token that ends its turns the eos_token of the tokenizer",
    )


def _without_repeats(train: list[Rendered], heldout: list[Rendered]) -> list[Rendered]:
    """Leave out rows that are also held out: a mix repeats the rows of smaller data sets."""

    def tokens(row: Rendered) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(example.tokens) for example in row[0])

    held = set(map(tokens, heldout))
    return [row for row in train if tokens(row) not in held]


def _first(rows: list[Rendered], share: float) -> list[Rendered]:
    return rows[: int(share * len(rows))]


def _builtin_rows(recipe: SupervisedRecipe, count: int, split: Any) -> list[NamedRow]:
    """Return rows of a built-in task with the recipe's columns."""
    task, rng = builtin_task(recipe.data.task), np.random.default_rng([recipe.run.seed % 2**63, 4, split == "train"])
    data, tried, wanted = recipe.data, 0, count
    rows: list[JsonObject] = []
    while len(rows) < count:
        for row in task.rows(wanted, recipe.run.seed, split)[tried:]:
            if recipe.task in ("sft", "kd"):
                rows.append({data.prompt_column: row["prompt"], data.response_column: task.example(row, rng)})
                continue
            drawn = {task.verify(text, row): text for text in (task.example(row, rng) for _ in range(DRAWS))}
            if len(drawn) < 2:
                continue  # all right, or all wrong
            if recipe.task == "kto":
                label = bool(rng.integers(2))
                rows.append({data.prompt_column: row["prompt"], data.response_column: drawn[float(label)], data.label_column: label})
            else:
                rows.append({data.prompt_column: row["prompt"], data.chosen_column: drawn[1.0], data.rejected_column: drawn[0.0]})
        tried, wanted = wanted, 2 * wanted
    return [(f"row {number}", row) for number, row in enumerate(rows[:count], 1)]
