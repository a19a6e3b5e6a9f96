"""Simulated: plans of a PPO step in ReaL's settings, beside symmetric ones: `python -m benchmarks.execution_plans_simulated`.

ReaL (arXiv 2406.14088) trains LLaMA-2 with PPO on 16 to 128 H100s: a policy of 7B to 70B, with a critic and a reward model of 7B, or all
of the policy's size. A symmetric plan has every call on all devices with the same tensor parallelism, one call after the other. `in turn`
has every call on all devices too, each in its fastest layout.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from rich.table import Table

from benchmarks.common.results import make_console, save
from benchmarks.common.run_metadata import ROOT
from placement.call_schedule import Problem
from placement.calls import Features, ModelRole, StepGraph, step_graph
from placement.catalog import catalog
from placement.execution_plan import plan_step
from placement.layouts import Devices, Fitting
from placement.peak_memory import CUDA_BYTES
from placement.planning.objective import Objective
from placement.speed.call_seconds import CallSeconds, CallWork
from placement.step_problem import CallModel, allowed_layouts, seconds_of, step_problem

PAGE = ROOT / "docs" / "execution-plans.md"
NODE = 8
WIDTHS = (1, 2, 4, 8)  # of tensor parallelism
POLICIES = {"llama-2-7b": 16, "llama-2-13b": 32, "codellama-34b": 64, "llama-2-70b": 128}  # and how many devices
CONTEXTS = {2048: 512, 8192: 128}  # tokens of a sequence, half of them (2048) or all but 1024 generated, and sequences
PROMPT = 1024
UPDATES = 4  # the default of ReaL's `ppo_n_minibatches`
PUBLISHED_S = {("llama-2-70b", True, 2048): 38.25}  # ReaL's documentation: 17.0 h for 4 x 400 steps of 4 x 70B
USABLE = 0.85  # share of a device's memory


@dataclass(frozen=True)
class PlanRow:
    """One setting. Seconds of a step by the symmetric plan, in turn and by the plan found.

    published_s: what ReaL takes by its documentation.
    """

    policy: str
    others: str
    devices: int
    context: int
    symmetric_s: float
    in_turn_s: float
    planned_s: float
    published_s: float | None
    reason: str

    @property
    def speedup(self) -> float:
        return self.symmetric_s / self.planned_s


def call_model(name: str) -> CallModel:
    config = json.loads((catalog.DATA / "models" / f"{name}.json").read_text())
    return CallModel.of(name, config)


@dataclass(frozen=True)
class PaperSetting:
    """A PPO step in one of ReaL's settings, on H100s. `same`: critic and reward model have the policy's size."""

    policy: str
    same: bool
    context: int
    phases: Mapping[str, float]

    @cached_property
    def graph(self) -> StepGraph:
        return step_graph(Features(values=True, reference=True, reward_model=True, kl_in_reward=True))

    @cached_property
    def models(self) -> dict[ModelRole, CallModel]:
        own, other = call_model(self.policy), call_model(self.policy if self.same else "llama-2-7b")
        return {ModelRole.POLICY: own, ModelRole.REFERENCE: own, ModelRole.CRITIC: other, ModelRole.REWARD: other}

    @cached_property
    def work(self) -> CallWork:
        return CallWork(CONTEXTS[self.context], PROMPT, self.context - PROMPT, self.context, UPDATES)

    @cached_property
    def seconds(self) -> CallSeconds:
        return CallSeconds(catalog.device("H100"), NODE, self.phases)

    @cached_property
    def cluster(self) -> Devices:
        room = USABLE * self.seconds.device.memory_bytes - len(self.models) * CUDA_BYTES
        return Devices(POLICIES[self.policy] // NODE, NODE, room)

    def layouts(self, widths: Sequence[int] = WIDTHS) -> dict[str, list[Fitting]]:
        """Return the layouts that fit, with such tensor parallelism, by call."""
        fitting = {call.name: allowed_layouts(call, self.models[call.model], self.work, self.cluster) for call in self.graph.calls}
        return {name: [one for one in some if one.layout.tensor in widths] for name, some in fitting.items()}

    def problem(self) -> Problem:
        return step_problem(self.graph, self.models, self.work, self.cluster, self.seconds, self.layouts())

    def in_turn_s(self, widths: Sequence[int]) -> float:
        """Return the seconds of all calls on all devices, one after the other, in the fastest layouts with such tensor parallelism."""
        layouts, total = self.layouts(widths), 0.0
        for call in self.graph.calls:
            whole = [one for one in layouts[call.name] if one.layout.slots == self.cluster.slots]
            sizes = self.models[call.model].sizes
            total += min((seconds_of(call, sizes, self.work, self.seconds, one) for one in whole), default=math.inf)
        return total


def rows(phases: Mapping[str, float] | None = None) -> list[PlanRow]:
    """Return all settings. `phases`: the device model's figures, else the catalog's."""
    found = []
    for context in CONTEXTS:
        for same in (False, True):
            for policy, devices in POLICIES.items():
                if same and policy == "llama-2-7b":
                    continue  # is the setting above
                setting = PaperSetting(policy, same, context, phases or catalog.values(catalog.read("phases")))
                symmetric, in_turn = min(setting.in_turn_s([width]) for width in WIDTHS), setting.in_turn_s(WIDTHS)
                best, _ = plan_step(setting.problem(), Objective(prefer=1.0))
                published = PUBLISHED_S.get((policy, same, context))
                others = policy if same else "llama-2-7b"
                found.append(PlanRow(policy, others, devices, context, symmetric, in_turn, best.seconds, published, best.reason))
    return found


def mean_speedup(found: Sequence[PlanRow]) -> float:
    """Return the geometric mean of the speed-ups over the symmetric plan."""
    return math.exp(sum(math.log(row.speedup) for row in found) / len(found))


def lines(found: Sequence[PlanRow]) -> list[list[str]]:
    """Return the table's rows, the heads first, means last."""
    heads = ["policy", "critic and reward model", "H100s", "context", "symmetric", "in turn", "planned", "symmetric / planned"]
    cells = [
        [row.policy, row.others, str(row.devices), str(row.context)]
        + [f"{seconds:.1f} s" for seconds in (row.symmetric_s, row.in_turn_s, row.planned_s)]
        + [f"{row.speedup:.2f}×"]
        for row in found
    ]
    for context in CONTEXTS:
        mean = mean_speedup([row for row in found if row.context == context])
        cells.append(["mean", "", "", str(context), "", "", "", f"{mean:.2f}×"])
    return [heads, *cells]


def filled(page: str, found: Sequence[PlanRow]) -> str:
    """Return the page with the table between its marks."""
    heads, *cells = lines(found)
    table = "\n".join("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *cells))
    before, begin, rest = page.partition("<!-- plans -->\n")
    _, end, after = rest.partition("\n<!-- end -->")
    if not (begin and end):
        raise ValueError("docs/execution-plans.md: one place for <!-- plans --> … <!-- end --> is needed")
    return f"{before}{begin}{table}{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reasons", action="store_true", help="print every plan")
    options = parser.parse_args()
    console, found = make_console(), rows()
    heads, *cells = lines(found)
    table = Table(*heads)
    for line in cells:
        table.add_row(*line)
    console.print(table)
    for row in found:
        if row.published_s is not None:
            console.print(
                f"{row.policy} with {row.others}, {row.context}: {row.planned_s:.1f} s planned, {row.published_s:.1f} s published by ReaL"
            )
        if options.reasons:
            console.print(f"{row.policy} with {row.others}, {row.context}: {row.reason}")
    PAGE.write_text(filled(PAGE.read_text(), found))
    save("execution_plans_simulated", {"rows": [asdict(row) | {"speedup": row.speedup} for row in found]}, console=console)


if __name__ == "__main__":
    main()
