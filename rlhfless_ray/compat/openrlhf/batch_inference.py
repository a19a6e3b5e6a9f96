"""Run batch_inference: responses to a data set's prompts, or rewards of a data set's responses, as JSONL."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlhfless_ray.common.disk_space import DiskFull, append
from rlhfless_ray.common.errors import RunError, Stopped, UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf.inference import InferenceTranslation
from rlhfless_ray.compat.openrlhf.post_processors import processed
from rlhfless_ray.prompts.sources import read_sources
from rlhfless_ray.recipe.local_path import given_path
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.run.folder import check_file
from rlhfless_ray.run.responses import write_rows
from rlhfless_ray.supervise.row_reader import RowReader
from rlhfless_ray.types import Prompt
from rlhfless_ray.weights.load_policy import context_tokens, load_tokenizer, model_folder, read_model

if TYPE_CHECKING:
    from rlhfless_ray.reward.reward_server import TextScorer

REWARDS_AT_ONCE = 128  # sequences whose rewards are written together
ROW_KEYS = {
    "data.prompt_column": "--input_key",
    "data.response_column": "--output_key",
    "data.max_tokens": "--max_len",
    "data.template": "--apply_chat_template",
    "reward.value_head": "--value_head_prefix",
}
"""Keys that the reader of rows and the reward model name in errors → the flag that decides each."""


def run_batch(translation: InferenceTranslation) -> Path:
    """Generate responses or rewards, and return the output file that the command line names.

    The same command line again continues what was stopped or killed: responses and rewards that are on disk are kept.
    """
    output = given_path(translation.settings["batch_inference.output"], "--output_path")
    check_file(output, "--output_path")
    translation.owners |= ROW_KEYS
    part = output.with_name(f"{output.name}.part")
    try:
        with translation.flags_in_errors():
            rows = list(_generated(translation, output)) if translation.generates else _rewarded(translation, part)
        count = write_rows(output, rows)
    except (Stopped, DiskFull) as stop:
        stop.continue_with = "the same command"
        raise
    part.unlink(missing_ok=True)
    print(f"{count} rows: {output}")
    return output


def _reader(translation: InferenceTranslation) -> RowReader:
    """Return a reader that renders and tokenizes rows as OpenRLHF's data sets do."""
    settings = translation.settings
    recipe = SupervisedRecipe.parse(
        {
            "task": "sft",
            "policy": {"path": settings["policy.path"]},
            "data": {
                "path": "read here",
                "contract": "openrlhf",
                "overlong": "leave_out",
                "prompt_column": settings["prompts.prompt_column"],
                "response_column": settings.get("batch_inference.response_column", ""),
                "template": settings.get("prompts.template", "none"),
                "input_template": settings.get("prompts.input_template"),
                "max_tokens": settings.get("batch_inference.max_tokens", 2048),
                "add_bos": settings["batch_inference.task"] == "generate_vllm",
                "tools_column": "",
            },
        }
    )
    files = read_model(model_folder(settings["policy.path"], "policy.path"))
    return RowReader(recipe, load_tokenizer(files, True), context_tokens(files))


def _rows(translation: InferenceTranslation) -> list[tuple[str, JsonObject]]:
    settings = translation.settings
    sources = settings.get("prompts.paths") or [settings["prompts.path"]]
    options = {"probabilities": settings.get("prompts.probabilities"), "max_rows": settings.get("prompts.max_rows")}
    rows = read_sources(sources, "train", "prompts", seed=settings["run.seed"], **options)
    start, end = settings.get("batch_inference.rows", [0, len(rows)])
    if start >= len(rows):
        raise UserError(f"--iter: it begins at row {start + 1}, but --dataset has {len(rows)} rows")
    where = f"prompts.path {sources[0]}" if len(sources) == 1 else "prompts.paths"
    return [(f"{where}, {name}", row) for name, row in rows[start:end]]


# ---------------------------------------------------------------- responses


def _generated(translation: InferenceTranslation, output: Path) -> Iterable[JsonObject]:
    """Generate, and yield all first responses in the order of the data set, then all second ones, and so on."""
    from rlhfless_ray.run.responses import RESPONSES, read_groups
    from rlhfless_ray.runtime.generation import Generation

    recipe = translation.recipe()
    assert recipe is not None
    reader = _reader(translation)
    prompts = _prompts(translation, reader)
    rollout, longest = recipe.rollout, reader.context_tokens
    if longest is not None and max(len(prompt.token_ids) for prompt in prompts) + rollout.max_tokens > longest:
        print(f"responses end where the model's context of {longest} tokens does")
        recipe = recipe.with_settings({"rollout.max_total_tokens": longest})
    generation = Generation(recipe, prompts=prompts)
    if generation.continue_unwritten(output):
        print("[rlhfless] this command continues its earlier run and keeps that run's responses", flush=True)
    with generation as run:
        for _ in run:
            pass
    groups = list(read_groups(run.folder.path / RESPONSES))
    keeps_special = translation.settings["batch_inference.task"] == "generate_vllm"
    for sample in range(recipe.rollout.samples_per_prompt):
        for group in groups:
            text = reader.tokenizer.decode(group[sample]["token_ids"], skip_special_tokens=not keeps_special)
            yield {"input": group[sample]["prompt"], "output": text}


def _prompts(translation: InferenceTranslation, reader: RowReader) -> list[Prompt]:
    settings = translation.settings
    limit, suffix = settings["prompts.max_prompt_tokens"], settings.get("batch_inference.prompt_suffix", "")
    prompts = []
    for index, (name, row) in enumerate(_rows(translation)):
        text = reader.prompt_text(name, row) + suffix
        tokens = reader.ids(reader.first.ready(text), add_special_tokens=settings["batch_inference.task"] == "generate_vllm")
        tokens = reader.first.once(tokens)
        if not tokens:
            raise UserError(f"{name}: the prompt is empty; fix or remove the row")
        if reader.context_tokens is not None and len(tokens[-limit:]) >= reader.context_tokens:
            raise UserError(
                f"{name}: {len(tokens)} tokens leave no room for a response in the context of --pretrain; lower --prompt_max_len"
            )
        prompts.append(Prompt(index, text, tuple(tokens[-limit:]), row, max(0, len(tokens) - limit)))
    for note in reader.row_notes():
        print(note)
    return prompts


# ---------------------------------------------------------------- rewards


def _rewarded(translation: InferenceTranslation, part: Path) -> list[JsonObject]:
    """Score the data set's responses, and apply the processor. `part`: file with the rewards of the same command before."""
    import torch

    from rlhfless_ray.reward.reward_server import TextScorer

    settings, reader = translation.settings, _reader(translation)
    texts = [(name, *reader.texts(name, row)) for name, row in _rows(translation)]
    tokens = [reader.tokens_as_openrlhf(prompt, response) for _, prompt, response in texts]
    kept = [number for number, found_tokens in enumerate(tokens) if found_tokens is not None]
    why = "without a prompt or a response, or whose prompt is too long (--max_len)"
    if not kept:
        raise UserError(f"--dataset: all {len(tokens)} rows are {why}; give others, or raise --max_len")
    if len(kept) < len(tokens):
        print(f"{len(tokens) - len(kept)} rows {why}, are left out")
    model = model_folder(settings["policy.path"], "--pretrain")
    scorer = TextScorer(
        model,
        settings["batch_inference.value_head"],
        settings["policy.dtype"],
        "cuda" if torch.cuda.is_available() else "cpu",
        normalize=True,
        trust_remote_code=True,
        setting="--pretrain",
    )
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(model.iterdir()) if file.is_file()]
    decides = repr([settings["batch_inference.value_head"], settings["policy.dtype"], files])
    rewards = _rewards(scorer, [np.asarray(tokens[i]) for i in kept], part, decides)
    if not np.isfinite(rewards).all():
        number = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise RunError(f"{texts[kept[number]][0]}: the reward model gave {rewards[number]}, not a finite number")
    rows = [{"input": texts[i][1], "output": texts[i][2], "reward": reward} for i, reward in zip(kept, rewards, strict=True)]
    print(f"reward mean: {np.mean(rewards):.4f}, std: {np.std(rewards, ddof=1) if len(rewards) > 1 else 0.0:.4f}")
    return processed(
        rows,
        settings.get("batch_inference.processor", ""),
        reward_template=settings.get("batch_inference.reward_template"),
        normalize=settings["batch_inference.normalize"],
    )


def _rewards(scorer: TextScorer, tokens: list[np.ndarray], part: Path, decides: str) -> list[float]:
    """Return the rewards of sequences. Those in `part` are kept, and new ones appended.

    `decides`: what the rewards depend on besides the tokens.
    """
    keys = [hashlib.blake2b(decides.encode() + ids.astype(np.int64).tobytes(), digest_size=16).hexdigest() for ids in tokens]
    known = dict[str, float]()
    with suppress(FileNotFoundError):
        whole = part.read_bytes().rpartition(b"\n")[0]  # a kill may have cut off the last line
        os.truncate(part, len(whole) + 1 if whole else 0)
        known = dict(json.loads(line) for line in whole.splitlines())
    first = {key: i for i, key in reversed(list(enumerate(keys)))}  # equal sequences are scored once
    batches = [
        [i for i in range(at, min(at + REWARDS_AT_ONCE, len(keys))) if first[keys[i]] == i] for at in range(0, len(keys), REWARDS_AT_ONCE)
    ]
    # rounding depends on the batch, so one of which a kill has left a part is computed again
    missing = [batch for batch in batches if any(keys[i] not in known for i in batch)]
    if found := len(first) - sum(map(len, missing)):
        print(f"[rlhfless] {found} of {len(first)} rewards were computed before and are kept: {part}", flush=True)
    for batch in missing:
        rewards = scorer.rewards_of([tokens[i] for i in batch])
        known |= {keys[i]: reward for i, reward in zip(batch, rewards, strict=True)}
        if batch is not missing[-1]:
            append(part, "".join(f"{json.dumps([keys[i], known[keys[i]]])}\n" for i in batch).encode())
    return [known[key] for key in keys]
