"""Record a run: metrics, ledger, samples, timeline, progress and report."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import numpy as np

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.local.isolated_call import environment_with_packages
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.report.metrics import Metrics
from rlhfless_ray.report.openrlhf_names import Shown
from rlhfless_ray.report.progress_display import ProgressDisplay
from rlhfless_ray.run.closing import close_folder
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.step.rollout_batch import RolloutBatch
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import UNFINISHED, Sample, SampleId, Scored, Trained

REPORT_EVERY_S = 60.0  # interval of reports during a run
REPORT_SHARE = 0.05  # largest share of the time for writing reports, which grow with the run


class RunRecorder:
    def __init__(self, recipe: Recipe, folder: RunFolder, ledger: Ledger, steps_done: int) -> None:
        self.recipe, self.folder, self.ledger = recipe, folder, ledger
        self.progress = ProgressDisplay(recipe.watch.progress, recipe.run.steps, title=folder.path.name)
        after = steps_done if steps_done or (folder.path / "metrics.jsonl").exists() else None
        self.metrics = Metrics(folder.path, recipe.watch, resume_after_step=after, say=self.progress.message)
        self.step_times: deque[float] = deque(maxlen=21)  # the newest
        self.reporter: subprocess.Popen[bytes] | None = None
        self.reported_s = time.monotonic()
        self.report_took_s = 0.0
        self.replaced_before = 0
        self.counted = ledger.count  # number of rows of the ledger that are in a step's costs, or in none
        self.later: list[Callable[[], None]] = []

    def put_off(self, work: Callable[[], None]) -> None:
        """Defer work until engines are busy, or until the run's state is saved."""
        self.later.append(work)

    def catch_up(self) -> None:
        """Do the deferred work."""
        while self.later:
            self.later.pop(0)()

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Record the evaluation before training (step 0) or of an interrupted step, whose row it joins. No step's costs include it."""
        self.ledger.begin_step(self.ledger.step)
        self.counted = self.ledger.count
        if metrics:
            row = {"step": step, "time_s": time.time() - self.ledger.started_s, **metrics}
            self.progress.step(self.metrics.amend(row))

    def costs(self) -> tuple[dict[str, float], JsonObject]:
        """Return the totals of a step's ledger rows, which are those since the step before, and the step's cost metrics."""
        totals, total = self.ledger.totals_since(self.counted), self.ledger.totals()
        first_row, self.counted = self.counted, self.ledger.count
        return totals, {
            **{f"cost/{name}": value for name, value in totals.items()},
            "cost/total_busy_slot_s": total["busy_slot_s"],
            "cost/total_full_slot_s": total["full_slot_s"],
            "cost/total_money": total["money"],
            "cost/rollout_slot_s": self.ledger.held_slot_s("rollout", first_row),
            **self._of_pools(first_row),
            **({"cost/agent_core_s": self.ledger.unleased_core_s("agent", first_row)} if self.recipe.agent.is_used else {}),
        }

    def _of_pools(self, first_row: int) -> JsonObject:
        """Return the costs of each pool in the rows from number `first_row` on, if the recipe names pools."""
        if not (self.recipe.rollout.pools or self.recipe.rollout.nodes):
            return {}
        costs = self.ledger.pools_since(first_row)
        return {f"cost/pools/{name}/{key}": value for name, cost in sorted(costs.items()) for key, value in asdict(cost).items()}

    def step(self, step: Step, last_step: int, replaced: int, lease_s: float) -> None:
        """Record a finished step: complete its metrics, and write them. Ledger lines and copies of the metrics are deferred.

        `last_step`: number of the run's last step, as far as it is known. `replaced`: number of processes replaced so far. `lease_s`:
        seconds that the step waited for slots.
        """
        wall_s = step.wall_s
        self.step_times.append(wall_s)
        recent = float(np.median([*self.step_times][1:] or [*self.step_times]))  # the first included starts
        row = {
            "step": step.number,
            "time_s": time.time() - self.ledger.started_s,
            "step_s": wall_s,
            "version": step.number,
            **step.plan.metrics(),
            **step.metrics,
            **self._of_phases(step.phase_s, wall_s, lease_s),
            "faults/replaced": replaced - self.replaced_before,
            "time_left_s": recent * (last_step - step.number),
            **step.evaluation,
        }
        self.replaced_before = replaced
        if step.stats is not None:
            stats = asdict(step.stats)
            row["tokens/trained"] = stats.pop("trained_tokens")
            del stats["reason"], stats["skipped_last"]
            if not self.recipe.rollout.max_lag_steps:
                del stats["effective_share"]
            row |= {f"lag/kl_{lag}": kl for lag, kl in stats.pop("kl_by_lag").items()}
            row |= {f"learn/{name}": value for name, value in stats.items()}
        row["tokens/per_s"] = row["tokens/generated"] / wall_s if wall_s else 0.0
        step.metrics = row
        kept = self.metrics.keep(row, _shown(step.samples))
        counted = self.counted
        self.put_off(lambda: self._write_copies(kept, step.number, counted))
        self.progress.step(row)

    def _write_copies(self, kept: JsonObject, number: int, counted: int) -> None:
        self.metrics.copy(kept)
        self.ledger.append_to(self.folder.path / "ledger.csv")
        self.ledger.forget(counted)
        self.folder.write_status(steps_done=number)

    def samples(self, step: int, samples: Sequence[Sample], name: str = "step") -> None:
        """Write the number of samples that the recipe asks for, and all that could not be scored."""
        shown = self.recipe.watch.samples_per_step or len(samples)
        kept = [*samples[:shown], *(s for s in samples[shown:] if isinstance(s, Scored) and s.error is not None)]
        self.folder.write_samples(step, kept, self.recipe.answer_column, name)

    def completion_order(self, rollout: str, batch: RolloutBatch, samples: list[Sample]) -> None:
        """Record which groups are trained, and where the other responses were cut. With the seed, this determines the run."""
        cut = [[s.id.row, s.id.number, len(s.completion.token_ids)] for s in samples if s.completion.finish_reason == UNFINISHED]
        groups = [[group.prompt.index, group.begun] for group in batch.groups]
        self.folder.write_order(rollout, {"groups": groups, "trained": batch.chosen, "cut": cut})

    def summarize_samples(self, samples: Sequence[Sample]) -> JsonObject:
        """Return metrics of rewards and lengths for the step's row."""
        scored = _scored(samples)
        rewards = np.array([s.reward for s in scored])
        earned = [s.earned for s in scored if isinstance(s, Trained) and s.earned is not None]
        lengths = np.array([s.written_tokens for s in samples])
        totals = np.array([s.total_tokens for s in samples])
        quantiles = np.quantile(lengths, [0.5, 0.9, 0.99])
        logs = {name for s in scored for name in s.extra_logs}
        return {
            "reward/mean": float(rewards.mean()) if len(rewards) else None,
            "reward/std": _deviation(rewards) if len(rewards) else None,
            "reward/failed": sum(isinstance(s, Scored) and s.error is not None for s in samples),
            "length/mean": float(lengths.mean()),
            "length/p50": float(quantiles[0]),
            "length/p90": float(quantiles[1]),
            "length/p99": float(quantiles[2]),
            "length/max": int(lengths.max()),
            "length/truncated_share": float(np.mean([s.completion.finish_reason == "length" for s in samples])),
            "length/total_mean": float(totals.mean()),
            "length/full_share": float(np.mean(totals >= self._longest_total())),
            "tokens/generated": int(lengths.sum()),
            "tokens/samples": len(samples),
            **({"reward/return_mean": float(np.mean(earned))} if earned else {}),
            **self._penalized(scored),
            **({"reward/score_mean": float(np.mean(scores))} if (scores := [s.score for s in scored if s.score is not None]) else {}),
            **{
                f"reward/logs/{name}": float(np.mean([s.extra_logs[name] for s in scored if name in s.extra_logs])) for name in sorted(logs)
            },
        }

    def _penalized(self, scored: list[Scored]) -> dict[str, float]:
        """Return statistics of the rewards after length penalties, from which advantages are computed."""
        if not scored:
            return {}
        rewards = np.array([_learned_reward(s) for s in scored])
        metrics = {"reward/penalized_mean": float(rewards.mean()), "reward/penalized_std": _deviation(rewards)}
        count = self.recipe.rollout.samples_per_prompt
        return metrics | ({"reward/group_std": _group_std(scored, count)} if count > 1 else {})

    def _longest_total(self) -> int:
        """Return the maximum number of tokens of prompt and response together."""
        rollout, agent = self.recipe.rollout, self.recipe.agent
        if agent.is_used and agent.max_tokens is not None:
            return agent.max_tokens
        return rollout.max_total_tokens or self.recipe.prompts.max_prompt_tokens + rollout.max_tokens

    def _of_phases(self, seconds: dict[str, float], wall_s: float, lease_s: float) -> dict[str, float]:
        """Return the seconds of each phase. `learn` excludes publishing. `driver` is the time outside of phases.

        `lease`, waiting for slots, is part of rollout, learn and eval. `passes`, before the update, and `rollout_ahead`,
        of the next step, are part of learn.
        """
        publish = seconds.get("publish", 0.0)
        phases = {
            **({"prefill": seconds["prefill"]} if "prefill" in seconds else {}),
            "rollout": seconds.get("rollout", 0.0),
            "score": seconds.get("score", 0.0),
            "learn": seconds.get("learn", 0.0) - publish,
            "publish": publish,
            "eval": seconds.get("eval", 0.0),
        }
        driver = max(0.0, wall_s - sum(phases.values()))
        inside = {"lease": lease_s, **{name: seconds[name] for name in ("passes", "rollout_ahead") if seconds.get(name)}}
        return {f"phase/{name}_s": value for name, value in {**phases, **inside, "driver": driver}.items()}

    def checkpointed(self) -> None:
        """Write timeline and report of the run so far in a low-priority process.

        Called at checkpoints. Written at most once a minute, and more rarely in long runs, see REPORT_SHARE. Starting the process
        takes about 5 ms.
        """
        since_s = time.monotonic() - self.reported_s
        if self.reporter is not None and self.reporter.poll() is None:
            self.report_took_s = since_s
            return
        if since_s < max(REPORT_EVERY_S, self._report_took() / REPORT_SHARE):
            return
        self.reported_s, self.report_took_s = time.monotonic(), 0.0
        try:
            self.reporter = subprocess.Popen(
                ["nice", "-n", "19", sys.executable, "-m", "rlhfless_ray", "report", str(self.folder.path.resolve())],
                env=environment_with_packages(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:  # a missing report must not end the run
            self.progress.message(f"no report of the run so far: {error}")

    def _report_took(self) -> float:
        """Return the seconds that the last report took until it was written, or until it was last seen running."""
        try:
            age_s = time.time() - (self.folder.path / "report.html").stat().st_mtime
        except OSError:
            return self.report_took_s
        return max(self.report_took_s, time.monotonic() - self.reported_s - age_s) if self.reporter is not None else 0.0

    def close(self, status: str, reason: str) -> None:
        """Write the last rows, the status, the timeline and the report, however the run ended.

        On a full disk everything that has space is written. Raises DiskFull if that is the only reason for the run to fail.
        """
        if self.reporter is not None:
            self.reporter.kill()  # otherwise it could replace the final report with an older one
            self.reporter.wait()
        close_folder(self.folder, self.progress, self._last_works(), status, reason)

    def _last_works(self) -> Iterator[Callable[[], object]]:
        while self.later:
            yield self.catch_up
        self.ledger.close()
        yield lambda: self.ledger.append_to(self.folder.path / "ledger.csv")
        yield self.metrics.close


def _scored(samples: Sequence[Sample]) -> list[Scored]:
    """Return the samples that have a reward."""
    return [sample for sample in samples if isinstance(sample, Scored) and sample.reward is not None]


def _shown(samples: Sequence[Sample]) -> Shown | None:
    """Return the first sample that has a reward."""
    return next((Shown(s.prompt.text + s.text, _learned_reward(s)) for s in _scored(samples)), None)


def _learned_reward(sample: Scored) -> float:
    """Return a scored sample's reward, after length penalties if advantages have been computed."""
    reward = sample.penalized if isinstance(sample, Trained) else sample.reward
    assert reward is not None
    return reward


def _group_std(samples: list[Scored], count: int) -> float:
    """Return the mean over groups of `count` responses of the deviation of their rewards after length penalties. All are scored.

    A prompt that is twice in a step, at the border of two epochs, has two groups.
    """
    groups: dict[SampleId, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.id.group(count), []).append(_learned_reward(sample))
    return float(np.mean([_deviation(np.array(group)) for group in groups.values()]))


def _deviation(rewards: np.ndarray) -> float:
    """Return the sample standard deviation (n - 1 in the denominator)."""
    return float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0
