"""Writes down what a run does: metrics, ledger, samples, timeline, progress, report."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.run_folder import RunFolder
from rlhfless_ray.types import Sample, Step
from rlhfless_ray.watch.metrics import Metrics
from rlhfless_ray.watch.openrlhf_names import Shown
from rlhfless_ray.watch.progress import Progress

REPORT_EVERY_S = 60.0  # while the run works
REPORT_SHARE = 0.05  # of the time, at most, in which one is being written: what there is to tell grows with the run


class Record:
    def __init__(self, recipe: Recipe, folder: RunFolder, ledger: Ledger, steps_done: int) -> None:
        self.recipe, self.folder, self.ledger = recipe, folder, ledger
        self.progress = Progress(recipe.watch.progress, recipe.run.steps, title=folder.path.name)
        after = steps_done if steps_done or (folder.path / "metrics.jsonl").exists() else None
        self.metrics = Metrics(
            folder.path, recipe.watch, folder.path.name, resume_after_step=after, say=self.progress.message
        )
        self.step_times: deque[float] = deque(maxlen=21)  # the newest
        self.reporter: subprocess.Popen[bytes] | None = None
        self.reported_s = time.monotonic()
        self.report_took_s = 0.0
        self.replaced_before = 0
        self.counted = 0  # rows of the ledger that are in the metrics
        self.later: list[Callable[[], None]] = []

    def put_off(self, work: Callable[[], None]) -> None:
        """Nobody waits for this: it is done when engines work, or before the run's state is saved."""
        self.later.append(work)

    def catch_up(self) -> None:
        """Do what was put off."""
        while self.later:
            self.later.pop(0)()

    def evaluation(self, step: int, found: dict[str, float]) -> None:
        """The evaluation before training (step 0), or one that a stop cut short: it joins its step's row."""
        if found:
            row = {"step": step, "time_s": time.time() - self.ledger.started_s, **found}
            self.progress.step(self.metrics.amend(row))

    def costs(self, own: dict[str, float], first_row: int) -> dict[str, Any]:
        """For the step's row. `own`: the totals of its rows in the ledger, which are those from `first_row` to now."""
        total, self.counted = self.ledger.totals(), self.ledger.count
        return {
            "cost/busy_slot_s": own["busy_slot_s"], "cost/full_slot_s": own["full_slot_s"],
            "cost/idle_share": own["idle_share"], "cost/money": own["money"],
            "cost/total_busy_slot_s": total["busy_slot_s"], "cost/total_full_slot_s": total["full_slot_s"],
            "cost/total_money": total["money"], "cost/rollout_slot_s": self.ledger.held_slot_s("rollout", first_row),
            **({"cost/agent_core_s": self.ledger.unleased_core_s("agent", first_row)} if self.recipe.agent.path else {}),
        }

    def step(
        self, step: Step, seconds: dict[str, float], wall_s: float, known: dict[str, Any], replaced: int, leases: Any,
    ) -> None:
        """The step's row; its ledger lines and what goes elsewhere are put off. `seconds`: per phase; `known`: its costs, and of
        samples, forecast and plan, now that the lengths are known."""
        self.step_times.append(wall_s)
        recent = float(np.median([*self.step_times][1:] or [*self.step_times]))  # the first had starts in it
        row = {
            "step": step.number, "time_s": time.time() - self.ledger.started_s, "step_s": wall_s,
            "version": step.number,
            **step.plan.metrics(), **known, **step.metrics,
            **self._of_phases(seconds, wall_s, leases),
            "faults/replaced": replaced - self.replaced_before,
            "time_left_s": recent * (self.recipe.run.steps - step.number), **step.evaluation,
        }
        self.replaced_before = replaced
        if step.stats is not None:
            stats = asdict(step.stats)
            row["tokens/trained"] = stats.pop("trained_tokens")
            del stats["reason"], stats["skipped_last"]
            row |= {f"learn/{name}": value for name, value in stats.items()}
        row["tokens/per_s"] = row["tokens/generated"] / wall_s if wall_s else 0.0
        step.metrics = row
        told = self.metrics.keep(row, _shown(step.samples))
        counted = self.counted
        self.put_off(lambda: self._elsewhere(told, step.number, counted))
        self.progress.step(row)

    def _elsewhere(self, told: dict[str, Any], number: int, counted: int) -> None:
        self.metrics.copy(told)
        self.ledger.append_to(self.folder.path / "ledger.csv")
        self.ledger.forget(counted)
        self.folder.write_status(steps_done=number)

    def samples(self, step: int, samples: list[Sample], name: str = "step") -> None:
        """The first of them, as many as the recipe says, and all that could not be scored."""
        shown = self.recipe.watch.samples_per_step or len(samples)
        kept = [*samples[:shown], *(s for s in samples[shown:] if s.error is not None)]
        self.folder.write_samples(step, kept, self.recipe.answer_column, name)

    def of_samples(self, samples: list[Sample]) -> dict[str, Any]:
        """Rewards and lengths, for the step's row."""
        rewards = np.array([s.reward for s in samples if s.reward is not None])
        lengths = np.array([s.written_tokens for s in samples])
        quantiles = np.quantile(lengths, [0.5, 0.9, 0.99])
        scored = [s for s in samples if s.reward is not None]
        logs = {name for s in scored for name in s.extra_logs}
        return {
            "reward/mean": float(rewards.mean()) if len(rewards) else None,
            "reward/std": _deviation(rewards) if len(rewards) else None,
            "reward/failed": sum(s.error is not None for s in samples),
            "length/mean": float(lengths.mean()), "length/p50": float(quantiles[0]), "length/p90": float(quantiles[1]),
            "length/p99": float(quantiles[2]), "length/max": int(lengths.max()),
            "length/truncated_share": float(np.mean([s.completion.finish_reason == "length" for s in samples])),
            "length/total_mean": float(np.mean([len(s.prompt.token_ids) + len(s.completion.token_ids) for s in samples])),
            "tokens/generated": int(lengths.sum()), "tokens/samples": len(samples),
            **({"reward/return_mean": float(np.mean(earned))} if (earned := [s.earned for s in scored if s.earned is not None]) else {}),
            **({"reward/group_std": _group_std(scored)} if self.recipe.rollout.samples_per_prompt > 1 and scored else {}),
            **({"reward/score_mean": float(np.mean(scores))} if (scores := [s.score for s in scored if s.score is not None]) else {}),
            **{
                f"reward/logs/{name}": float(np.mean([s.extra_logs[name] for s in scored if name in s.extra_logs]))
                for name in sorted(logs)
            },
        }

    def _of_phases(self, seconds: dict[str, float], wall_s: float, leases: Any) -> dict[str, float]:
        """`learn` without the publishing inside it; `driver` is what no phase covers; `lease`, the waiting for slots, lies
        inside rollout, learn and eval."""
        publish = seconds.get("publish", 0.0)
        phases = {
            **({"prefill": seconds["prefill"]} if "prefill" in seconds else {}),
            "rollout": seconds.get("rollout", 0.0), "score": seconds.get("score", 0.0),
            "learn": seconds.get("learn", 0.0) - publish, "publish": publish, "eval": seconds.get("eval", 0.0),
        }
        driver = max(0.0, wall_s - sum(phases.values()))
        return {f"phase/{name}_s": value for name, value in {**phases, "lease": leases.waited_s, "driver": driver}.items()}

    def checkpointed(self) -> None:
        """Timeline and report of the run so far, for whoever looks on and in case the run is killed: at a checkpoint, once a
        minute at most, and in a long run as rarely as REPORT_SHARE says, by a process that lets everything else go first. Starting it
        takes the run some 5 ms."""
        since_s = time.monotonic() - self.reported_s
        if self.reporter is not None and self.reporter.poll() is None:
            self.report_took_s = since_s
            return
        if since_s < max(REPORT_EVERY_S, self._report_took() / REPORT_SHARE):
            return
        self.reported_s, self.report_took_s = time.monotonic(), 0.0
        packages = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            self.reporter = subprocess.Popen(
                ["nice", "-n", "19", sys.executable, "-m", "rlhfless_ray", "report", str(self.folder.path.resolve())],
                env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )
        except OSError as error:  # the run is worth more than a look at it
            self.progress.message(f"no report of the run so far: {error}")

    def _report_took(self) -> float:
        """Seconds that the newest one took: until it was there, or was last seen to be under way."""
        try:
            age_s = time.time() - (self.folder.path / "report.html").stat().st_mtime
        except OSError:
            return self.report_took_s
        return max(self.report_took_s, time.monotonic() - self.reported_s - age_s) if self.reporter is not None else 0.0

    def close(self, status: str, reason: str) -> None:
        """The last lines, the timeline and the report; called however the run ended."""
        from rlhfless_ray.watch.report import write_report
        from rlhfless_ray.watch.timeline import write_timeline

        if self.reporter is not None:
            self.reporter.kill()  # or it may write what was after what is
            self.reporter.wait()
        self.catch_up()
        self.ledger.close()
        self.ledger.append_to(self.folder.path / "ledger.csv")
        self.metrics.close()
        self.folder.end(status, reason)
        self.progress.close()
        write_timeline(self.folder.path)
        write_report(self.folder.path)


def _shown(samples: list[Sample]) -> Shown | None:
    """The first one that has a reward."""
    return next((Shown(s.prompt.text + s.text, s.reward) for s in samples if s.reward is not None), None)


def _group_std(samples: list[Sample]) -> float:
    """Mean over prompts of the sample deviation of their responses' rewards."""
    groups: dict[int, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.index, []).append(sample.reward or 0.0)
    return float(np.mean([_deviation(np.array(group)) for group in groups.values()]))


def _deviation(rewards: np.ndarray) -> float:
    """Of a sample, n - 1 in the denominator."""
    return float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0
