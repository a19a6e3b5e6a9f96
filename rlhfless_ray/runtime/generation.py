"""Generate responses to a set of prompts without a learner, with a run's rollout pool, planner and ledger. Every response is resumable."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.prompts.load_prompts import PromptSet, load_prompts
from rlhfless_ray.recipe import EvaluateConfig, Recipe
from rlhfless_ray.recipe.generation import GenerationRecipe
from rlhfless_ray.recipe.local_path import given_path
from rlhfless_ray.recipe.without_effect import sentences
from rlhfless_ray.report.formatting import finite
from rlhfless_ray.report.metrics import read_jsonl
from rlhfless_ray.reward.reward_functions import RewardSource
from rlhfless_ray.run.folder import RunFolder, check_file, folders_of, status_written_s
from rlhfless_ray.run.responses import RECORD, RESPONSES, SCORED_BY, ResponseRecord, recorded_settings
from rlhfless_ray.runtime.runtime import Runtime
from rlhfless_ray.runtime.start_run import Checkpoint
from rlhfless_ray.runtime.worker_pools import ActorClasses
from rlhfless_ray.session.groups_in_flight import GroupsInFlight
from rlhfless_ray.session.prompt_source import PromptSource
from rlhfless_ray.step.requests import GENERATION
from rlhfless_ray.step.rollout_batch import RolloutBatch
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import Group, Prompt
from rlhfless_ray.weights.channel import stored_version
from rlhfless_ray.weights.load_policy import context_tokens
from rlhfless_ray.weights.model_folder import WEIGHTS, stored_weights
from rlhfless_ray.weights.tensor_file import Files, as_numpy, checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def generate(recipe: GenerationRecipe, *, out: Path | None = None, resume: bool = False) -> Path:
    """Generate `rollout.samples_per_prompt` responses to each prompt, score them if the recipe has a reward, and return the file.

    The file has one JSON object per line, in the order of the prompts: `prompt_index`, `sample`, `prompt`, `response`, `finish`,
    `token_ids` and `logprobs` (of the sampling distribution), with a reward also `reward` and `error`. `best_responses` and
    `preference_pairs` read it.

    Args:
        recipe: The recipe.
        out: Where to write a second copy. The first is the run folder's `responses.jsonl`.
        resume: Continue the newest run of this name. Existing responses are not generated again.

    Raises:
        UserError: For mistakes in the recipe, the data or the files it names.
        RunError: If generation fails.

    Examples:
        >>> from rlhfless_ray import GenerationRecipe, generate
        >>> tree = {"prompts": {"task": "chain", "rows": 4}, "rollout": {"max_tokens": 8}, "watch": {"progress": "off", "wandb": "off"}}
        >>> len(generate(GenerationRecipe.of(tree)).read_text().splitlines())
        32
    """
    if out is not None:
        out = given_path(out, "--out")
        check_file(out, "--out")
    with Generation(recipe, resume=resume) as run:
        for _ in run:
            pass
    if out is not None:
        run.write_responses(out)
    return run.folder.path / RESPONSES


class MissingResponses(GroupsInFlight):
    """The prompts that lack responses, with the responses that exist."""

    def __init__(self, recipe: Recipe, prompts: list[Prompt], record: ResponseRecord) -> None:
        super().__init__(recipe)
        self.prompts, self.record = prompts, record

    def begin(self, step: int, steps_left: int, source: PromptSource, *, refills: bool = False) -> RolloutBatch:
        prompts, self.prompts = self.prompts[: self.quota], self.prompts[self.quota :]
        count = self.rollout.samples_per_prompt
        groups = [Group(prompt, GENERATION, samples=self.record.samples(prompt, count)) for prompt in prompts]
        return RolloutBatch(groups, step, len(groups), 0, count, cuts=False)


class Generation(Runtime):
    """A run that only generates. Its steps are batches of prompts; iterating yields one `Step` at a time."""

    recipe: GenerationRecipe

    def __init__(
        self, recipe: GenerationRecipe, *, prompts: list[Prompt] | None = None, notes: tuple[str, ...] = (), resume: bool = False
    ) -> None:
        """`prompts`: used instead of the recipe's prompts, with indices from 0. `notes`: messages for the user about them."""
        GenerationRecipe.check_type(recipe)
        self._continued: RunFolder | None = None
        self._given = None if prompts is None else PromptSet(prompts, [], notes)
        super().__init__(recipe, resume=resume)
        if self.inputs.owes_warm_start:
            raise UserError("policy.path: the policy made from scratch has not had its warm start; name a model folder, or train it first")

    # ---- setup ------------------------------------------------------------------------------------------------

    def _load_prompts(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, files: Files) -> PromptSet:
        if self._given is not None:
            return self._given
        recipe = recipe.with_settings({"evaluate.prompts": 0, "evaluate.path": ""})
        return load_prompts(recipe, tokenizer, context_tokens(files), files)

    def settings_without_effect(self, resource: str) -> list[str]:
        messages = [*super().settings_without_effect(resource), *filter(None, [self.recipe.left_out_note])]
        if self._given is None:
            of_evaluation = (f"evaluate.{key}" for key in EvaluateConfig.model_fields if key != "split")
            messages += sentences(self.given, of_evaluation, "`rlhfless generate` evaluates nothing")
        return messages

    def actor_classes(self) -> ActorClasses:
        # there is no learner to compare log-probabilities with, and the policy stays the same
        return replace(ActorClasses.real(self.given.rollout.engine), drafter=None, computes=False)

    def continue_unwritten(self, output: Path) -> bool:
        """Continue the newest run of the recipe's name that draws the same responses, if `output` is not newer. Returns whether one is.

        A run that another process continues is left alone.
        """
        written_s = output.stat().st_mtime if output.is_file() else 0.0
        paths = [path for path in folders_of(self.recipe) if self._can_resume(path) and status_written_s(path) > written_s]
        settings = json.loads(json.dumps(self._settings(), default=str)) if paths else {}
        for path in sorted(paths, key=status_written_s, reverse=True):
            folder = RunFolder(path)
            if recorded_settings(path) == settings and not folder.is_locked:
                self.resume, self._continued = True, folder
                return True
        return False

    def _folder_to_resume(self) -> RunFolder:
        if self._continued is not None:
            return self._continued
        resumable = [path for path in folders_of(self.recipe) if self._can_resume(path)]
        if not resumable:
            where = Path(self.recipe.run.root) / self.recipe.run.name
            raise UserError(f"--resume: no run with responses in {where}; start it without --resume")
        return RunFolder(max(resumable, key=lambda path: (path / RECORD).stat().st_mtime))

    def _can_resume(self, folder: Path) -> bool:
        return (folder / RECORD).is_file()

    def _open_folder(self) -> Checkpoint | None:
        self.responses = ResponseRecord(self.folder.path, self._settings(), self.recipe.answer_column)
        self.pending = self.responses.missing(self.inputs.prompts.train, self.recipe.rollout.samples_per_prompt, scored=self.recipe.scores)
        metrics = self.folder.path / "metrics.jsonl"
        self.steps_done = max((int(finite(row.get("step")) or 0) for row in read_jsonl(metrics)[0]), default=0) if metrics.is_file() else 0
        steps = self.steps_done + math.ceil(len(self.pending) / self.recipe.prompts.batch_prompts)
        self.recipe = self.recipe.with_settings({"run.steps": steps})
        return None

    def _settings(self) -> JsonObject:
        """Return the settings that determine a response's tokens, besides the number of the sample, and its reward."""
        rollout, prompts = self.recipe.rollout, hashlib.blake2b(digest_size=16)
        for prompt in self.inputs.prompts.train:
            prompts.update(np.array([prompt.index, *prompt.token_ids], np.int64).tobytes())
        model = [checksum(content) for name, content in sorted(self.inputs.files.items()) if name.endswith(WEIGHTS)]
        keys = ("temperature", "top_p", "top_k", "stop", "max_tokens", "min_tokens", "max_total_tokens", "quantization")
        of_rollout = {f"rollout.{key}": getattr(rollout, key) for key in keys}
        rest = {"policy.dtype": self.recipe.policy.dtype, "run.seed": self.recipe.run.seed}
        reward = {f"reward.{key}": getattr(self.recipe.reward, key) for key in ("function", "url", "model_path")}
        reward[SCORED_BY] = self._digest_of_scoring()
        return {"model": model, "prompts": prompts.hexdigest(), **of_rollout, **rest, **(reward if self.recipe.scores else {})}

    def _digest_of_scoring(self) -> str:
        """Return a digest of the reward function's file, of what it reads of the rows, and of settings that change scores.

        Each of them may be corrected before a resume.
        """
        digest, file = hashlib.blake2b(digest_size=16), getattr(self.inputs.reward_source, "file", None)
        digest.update(b"" if file is None else file.text.encode())
        changed = self.recipe.reward.model_dump(include={"contract", "normalize", "value_head"}, exclude_defaults=True)
        digest.update(repr(changed).encode() if changed else b"")
        reads_row = isinstance(self.inputs.reward_source, RewardSource)
        for prompt in self.inputs.prompts.train:
            read = prompt.row if reads_row else prompt.row.get(self.recipe.answer_column)
            digest.update(repr(read).encode(errors="surrogatepass"))
        return digest.hexdigest()

    def _make_groups(self) -> GroupsInFlight:
        return MissingResponses(self.recipe, self.pending, self.responses)

    def _start(self, checkpoint: Checkpoint | None) -> None:
        """Publish the model's weights. Engines start with the first plan."""
        session = self.parts.session
        session.on_samples = self.responses.add
        self.parts.stages.learn.worker_group.slots = 0  # no update follows a rollout
        session.weights = stored_version(0, {name: as_numpy(tensor) for name, tensor in stored_weights(self.inputs.files)})

    # ---- steps ------------------------------------------------------------------------------------------------

    def _loop(self) -> Iterator[Step]:
        session, records = self.parts.session, self.parts.records
        records.leave_out_start()
        step = session.admit()
        while step is not None:
            session.take(step)
            if self.recipe.scores:
                self.responses.add_scores(self.parts.updates.score(step))
            step.answers = step.samples
            records.observe(step)
            upcoming = session.admit()
            records.close(step)
            yield step
            step = upcoming
        records.finish()

    def _write_result(self) -> None:
        self.write_responses(self.folder.path / RESPONSES)

    def write_responses(self, path: Path) -> None:
        self.responses.write(path, self.inputs.prompts.train, self.recipe.rollout.samples_per_prompt)
