"""Read, check and tokenize the recipe's prompts before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import xxhash

from rlhfless_ray.common.errors import UserError, one_line
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.prompts.prompt_texts import PromptTexts, check_columns
from rlhfless_ray.prompts.read_rows import NamedRow
from rlhfless_ray.prompts.row_images import RowImages
from rlhfless_ray.prompts.sources import read_sources, rows_notes, split_paths
from rlhfless_ray.types import Prompt, PromptImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhfless_ray.recipe import Recipe


NO_FILES: Mapping[str, Any] = MappingProxyType({})


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
            digest.update("".join(picture.digest for picture in prompt.pictures).encode())
        return digest.hexdigest()


def load_prompts(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, context_tokens: int | None = None, files: Mapping[str, Any] = NO_FILES
) -> PromptSet:
    """Read or generate the rows, apply the template and tokenize.

    `context_tokens`: longest sequence that the policy takes. `files`: the policy's, which say how it sees images.

    With template `chat` the text is rendered by the chat template,
    and no token is added to it. With template `none` a beginning-of-sequence token comes first if the tokenizer itself adds
    one, the text does not begin with it, and the recipe allows it. Nothing is added at the end. Rows that are too long raise a UserError,
    which names the row,
    unless the recipe says to leave them out or to cut them.
    """
    section, held = recipe.prompts, recipe.evaluate.prompts
    check_episodes(recipe, context_tokens)
    images = RowImages(section.image_column, files, section.max_pixels)
    if section.task:
        source = task(section.task)
        # Held-out rows come from a stream of their own, and tasks keep their prompts out of the training split.
        rows = [*source.rows(section.rows, recipe.run.seed, "train"), *source.rows(held, recipe.run.seed, "heldout")]
        named_rows: list[NamedRow] = [(f"row {number}", row) for number, row in enumerate(rows, 1)]
        prompt_texts = PromptTexts(recipe, "prompt", tokenizer, images)
        prompts, overlong = _make_prompts(named_rows, f"prompts.task {section.task}", prompt_texts, recipe, context_tokens)
        return PromptSet(*_split_heldout(prompts, held, len(overlong), recipe), _overlong_notes(overlong, recipe))
    seed = recipe.run.seed
    named_rows = read_sources(
        section.sources, section.split, "prompts", probabilities=section.probabilities, max_rows=section.max_rows, seed=seed
    )
    where = _setting_name("prompts", section.sources)
    unlimited = rows_notes("prompts", section.rows, type(section).model_fields["rows"].default, len(named_rows))
    prompt_texts = PromptTexts(recipe, section.prompt_column, tokenizer, images)
    prompts, overlong = _make_prompts(named_rows, where, prompt_texts, recipe, context_tokens)
    if not recipe.evaluate.path or not held:
        train, heldout = _split_heldout(prompts, held, len(overlong), recipe)
        notes = unlimited + _overlong_notes(overlong, recipe) + prompt_texts.notes
        if len(heldout) > len(train):
            notes += (f"{held} of {len(prompts)} rows are held out of training (evaluate.prompts); lower it, or name evaluate.path",)
        return _without_repeats(train, heldout, recipe, notes)
    train, _ = _split_heldout(prompts, 0, len(overlong), recipe)
    sources = split_paths(recipe.evaluate.path)
    named_rows = read_sources(sources, recipe.evaluate.split, "evaluate", max_rows=section.max_rows)
    heldout, overlong_heldout = _make_prompts(named_rows, _setting_name("evaluate", sources), prompt_texts, recipe, context_tokens)
    notes = unlimited + _overlong_notes(overlong + overlong_heldout, recipe) + prompt_texts.notes
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
    named_rows: list[NamedRow], where: str, prompt_texts: PromptTexts, recipe: Recipe, context_tokens: int | None
) -> tuple[list[Prompt], list[str]]:
    """Return prompts counted from 0, and the names of rows that are too long, which are left out or cut."""
    if not recipe.prompts.task:
        check_columns(named_rows, where, prompt_texts.column, recipe)
    texts, of_rows = zip(*prompt_texts.texts(named_rows, where), strict=True)
    ids, pictures = _with_images(_token_ids(list(texts), where, recipe, prompt_texts), of_rows, named_rows, where, prompt_texts.images)
    limit, cuts = recipe.prompts.max_prompt_tokens, recipe.prompts.overlong == "cut_left"
    excess = [max(0, len(tokens) - limit) for tokens in ids]
    if cuts:
        if (i := next((i for i, cut in enumerate(excess) if cut and pictures[i]), None)) is not None:
            name = named_rows[i][0]
            raise UserError(f"{where}, {name}: a prompt with images is not cut (prompts.overlong); raise prompts.max_prompt_tokens")
        ids = [tokens[cut:] for tokens, cut in zip(ids, excess, strict=True)]
    _check_lengths(named_rows, ids, where, recipe, context_tokens)
    rows = [found for found in zip(named_rows, texts, ids, pictures, excess, strict=True) if cuts or not found[-1]]
    prompts = [
        Prompt(i, text, tuple(tokens), prompt_texts.images.without_bytes(row, seen), cut, seen)
        for i, ((_, row), text, tokens, seen, cut) in enumerate(rows)
    ]
    return prompts, [name for (name, _), cut in zip(named_rows, excess, strict=True) if cut]


def _with_images(
    ids: list[list[int]], pictures: Sequence[tuple[PromptImage, ...]], named_rows: list[NamedRow], where: str, images: RowImages
) -> tuple[list[list[int]], list[tuple[PromptImage, ...]]]:
    """Return the prompts' tokens with room for their images, and these with their places. Raises UserError, which names the row."""
    expanded = []
    for (name, _), tokens, seen in zip(named_rows, ids, pictures, strict=True):
        try:
            expanded.append(images.expand(tokens, seen))
        except ValueError as error:
            raise UserError(f"{where}, {name}: {error}; fix or remove the row") from None
    return [tokens for tokens, _ in expanded], [placed for _, placed in expanded]


def _overlong_notes(names: list[str], recipe: Recipe) -> tuple[str, ...]:
    if not names:
        return ()
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    limit = recipe.prompts.max_prompt_tokens
    done = "are cut from the left" if recipe.prompts.overlong == "cut_left" else "are left out"
    return (f"{len(names)} prompts of more than {limit} tokens (prompts.max_prompt_tokens) {done}: {shown}",)


def _token_ids(texts: list[str], where: str, recipe: Recipe, prompt_texts: PromptTexts) -> list[list[int]]:
    tokenizer, first = prompt_texts.tokenizer, prompt_texts.first
    try:
        ids: list[list[int]] = tokenizer([first.ready(text) for text in texts], add_special_tokens=False)["input_ids"]
    except Exception as error:
        raise UserError(f"{where}: the policy's tokenizer cannot encode the prompts ({one_line(error)}); use another policy") from None
    if recipe.prompts.task and not recipe.policy.path:
        for text, tokens in zip(texts, ids, strict=True):
            if tokenizer.decode(tokens) != text:
                raise UserError(
                    f"prompts.input_template: the built-in policy reads the symbols of {where} only, not all of {text[:80]!r}; leave "
                    "it out, or set policy.path"
                )
    return [first.put(tokens) for tokens in ids]


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
