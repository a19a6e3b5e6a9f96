"""The result of a rollout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.rollout.inflight_migrations import MigrationStats
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import Completion, EngineStep

DRAFT_BANDS = (1, 2, 5, 17)  # lower ends of the bands of sequences in an engine step, by which drafted tokens are counted


@dataclass
class RolloutResult:
    """The completions of a rollout so far, and its measurements."""

    completions: dict[int, Completion] = field(default_factory=dict)
    unfinished: list[Completion] = field(default_factory=list)  # of a rollout that ended early
    steps: EngineSteps = field(default_factory=EngineSteps)
    step_nodes: list[tuple[str, int]] = field(default_factory=list)  # node and number of the steps of each report, in their order
    decode_s: dict[str, float] = field(default_factory=dict)  # by instance: seconds in its engine's steps
    loads: list[tuple[str, float]] = field(default_factory=list)  # (node, seconds) of each load of weights
    moved: list[MigrationStats] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)  # about moves, each with its reason
    exchanged: Counter[str] = field(default_factory=Counter)  # slots taken from other runs and given to them, by metric
    replaced: int = 0
    orphans: int = 0  # requests whose engine died
    drafts_saved_s: float = 0.0  # engine seconds saved against decoding without drafts, by the fitted step times
    silent_s: float = 0.0  # sum over dead engines of the seconds since their last report, whose work is repeated

    def steps_by(self, group: Callable[[str], str]) -> dict[str, EngineSteps]:
        """Return the engine steps by a group of nodes. `group`: node id → name of the group."""
        names = [group(node) for node, _ in self.step_nodes]
        of_step = np.repeat(np.array(names, object), [count for _, count in self.step_nodes])
        found = {name: EngineSteps() for name in dict.fromkeys(names)}
        for name, steps in found.items():
            steps.table = self.steps.table[of_step == name]
        return found

    def metrics(self, before: Mapping[str, Any] | None = None) -> JsonObject:
        """Return metrics of moves and lost engines for the step's row. `before`: metrics of the step's earlier rollout."""

        def total(column: str) -> int:
            return int(self.steps.column(column).sum())

        seconds = [move.seconds for move in self.moved]
        sums = {
            "rollout/moved": len(seconds),
            "rollout/moved_context_tokens": sum(move.context_tokens for move in self.moved),
            "rollout/moved_by_pages": sum(move.how == "pages" for move in self.moved),
            "rollout/move_fallbacks": sum(move.fell_back for move in self.moved),
            "rollout/move_decisions": len(self.decisions),
            "rollout/drafted": total("drafted"),
            "rollout/drafts_accepted": total("accepted"),
            "rollout/model_drafted": total("model_drafted"),
            "rollout/model_drafts_accepted": total("model_accepted"),
            "rollout/drafts_saved_s": self.drafts_saved_s,
            "rollout/engine_steps": len(self.steps),
            "rollout/orphans": self.orphans,
            "rollout/lost_s": self.silent_s,
            **self.exchanged,
        }
        if sums["rollout/drafted"] or f"rollout/drafts_from_{DRAFT_BANDS[0]}_steps" in (before or {}):
            sums |= drafts_by_band(self.steps.newest(len(self.steps)))
        return {
            **{name: value + (before or {}).get(name, 0) for name, value in sums.items()},
            "rollout/move_p50_s": float(np.median(seconds)) if seconds else None,
            "rollout/move_pause_p50_s": float(np.median([move.pause_s for move in self.moved])) if seconds else None,
            "rollout/move_reason": self.decisions[-1] if self.decisions else "",
        }


def drafts_by_band(steps: Sequence[EngineStep]) -> dict[str, int]:
    """Return metrics of engine steps and their drafted tokens by the sequences of a step, which become fewer during a rollout."""
    counts: dict[str, int] = {}
    for low, high in zip(DRAFT_BANDS, [*DRAFT_BANDS[1:], math.inf], strict=True):
        band = [step for step in steps if low <= step.running < high]
        accepted, by_model = sum(step.accepted for step in band), sum(step.by_model[1] for step in band)
        counts |= {
            f"rollout/drafts_from_{low}_steps": len(band),
            f"rollout/drafts_from_{low}_text": accepted - by_model,
            f"rollout/drafts_from_{low}_model": by_model,
            f"rollout/drafts_from_{low}_vain": sum(step.drafted for step in band) - accepted,
        }
    return counts
