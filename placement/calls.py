"""A training step as a graph of model function calls (ReaLHF, arXiv 2406.14088).

A call is one model's work on the whole batch: generate, infer or train. The graph says which calls need which. Where a call runs, and on
how many slots, is decided by `execution_plan.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class Kind(StrEnum):
    GENERATE = "generate"
    INFER = "infer"
    TRAIN = "train"


class ModelRole(StrEnum):
    """Whose weights a call uses. Calls of one model never run at the same time."""

    POLICY = "policy"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward"
    ENGINES = "engines"
    """The policy of an earlier step, which engines have while the learner works, see `lagged`."""


@dataclass(frozen=True)
class Call:
    """One call of a step. `needs`: names of the calls of the same step that must have ended before."""

    name: str
    model: ModelRole
    kind: Kind
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Features:
    """What decides which calls a step has. `values`: a critic's. `pass_before`: log-probabilities of the policy before its update."""

    values: bool = False
    reference: bool = False
    reward_model: bool = False
    pass_before: bool = False
    kl_in_reward: bool = False


@dataclass(frozen=True)
class StepGraph:
    """The calls of a step, each after those that it needs."""

    calls: tuple[Call, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for call in self.calls:
            if missing := set(call.needs) - seen:
                raise ValueError(f"call {call.name} needs {', '.join(sorted(missing))}, which no call before it has the name of")
            if call.name in seen:
                raise ValueError(f"two calls have the name {call.name}")
            seen.add(call.name)

    def __getitem__(self, name: str) -> Call:
        return next(call for call in self.calls if call.name == name)

    def ready(self, ended: Iterable[str], begun: Iterable[str]) -> list[Call]:
        """Return the calls that may begin now, in order of the graph. `ended`, `begun`: names of calls; what has ended has begun."""
        done, away = set(ended), set(begun)
        busy = {self[name].model for name in away - done}
        found: list[Call] = []
        for call in self.calls:
            if call.name not in away and call.model not in busy and done.issuperset(call.needs):
                found.append(call)
                busy.add(call.model)
        return found


GENERATE, REWARD, REFERENCE, OLD, VALUES = "generate", "reward", "reference log-probabilities", "old log-probabilities", "values"
TRAIN_CRITIC, TRAIN_POLICY = "critic update", "policy update"


def step_graph(features: Features) -> StepGraph:
    """Return the calls of one step.

    Advantages are computed on the driver once rewards, values and, with the KL as part of the reward, both log-probabilities are there.
    A critic learns from the returns, and the policy from the advantages, so neither update needs the other.
    """
    calls = [Call(GENERATE, ModelRole.POLICY, Kind.GENERATE)]
    of_rewards = [GENERATE]
    if features.reward_model:
        calls.append(Call(REWARD, ModelRole.REWARD, Kind.INFER, (GENERATE,)))
        of_rewards = [REWARD]
    if features.reference:
        calls.append(Call(REFERENCE, ModelRole.REFERENCE, Kind.INFER, (GENERATE,)))
    if features.pass_before:
        calls.append(Call(OLD, ModelRole.POLICY, Kind.INFER, (GENERATE,)))
    if features.values:
        calls.append(Call(VALUES, ModelRole.CRITIC, Kind.INFER, (GENERATE,)))
    passes = [call.name for call in calls if call.name in (REFERENCE, OLD)]
    for_advantages = [*of_rewards, *([VALUES] if features.values else []), *(passes if features.kl_in_reward else [])]
    if features.values:
        calls.append(Call(TRAIN_CRITIC, ModelRole.CRITIC, Kind.TRAIN, tuple(for_advantages)))
    calls.append(Call(TRAIN_POLICY, ModelRole.POLICY, Kind.TRAIN, tuple(dict.fromkeys([*for_advantages, *passes]))))
    return StepGraph(tuple(calls))


def lagged(graph: StepGraph) -> StepGraph:
    """Return what a step does with a lag of one: the next step's rollout beside the other calls, which have their responses already."""
    wanted = part(graph, (call.name for call in graph.calls if call.kind is not Kind.GENERATE))
    ahead = (Call(call.name, ModelRole.ENGINES, call.kind) for call in graph.calls if call.kind is Kind.GENERATE)
    return StepGraph((*ahead, *wanted.calls))


def with_passes_first(graph: StepGraph) -> StepGraph:
    """Return the graph in which updates need all passes, as in a run: its driver computes advantages once it has all values."""
    passes = tuple(call.name for call in graph.calls if call.kind is Kind.INFER)
    return with_needs(graph, {call.name: passes for call in graph.calls if call.kind is Kind.TRAIN})


def in_turn(graph: StepGraph) -> StepGraph:
    """Return the graph in which each call also needs the one before it."""
    return with_needs(graph, {after.name: (before.name,) for before, after in itertools.pairwise(graph.calls)})


def with_needs(graph: StepGraph, needs: Mapping[str, Iterable[str]]) -> StepGraph:
    """Return the graph with further needs of some calls. Raises ValueError if one of them comes later in the graph."""
    more = (tuple(dict.fromkeys([*call.needs, *needs.get(call.name, ())])) for call in graph.calls)
    return StepGraph(tuple(replace(call, needs=own) for call, own in zip(graph.calls, more, strict=True)))


def part(graph: StepGraph, names: Iterable[str]) -> StepGraph:
    """Return the graph of these calls alone, as if all others had ended."""
    wanted = set(names)
    return StepGraph(tuple(replace(call, needs=tuple(n for n in call.needs if n in wanted)) for call in graph.calls if call.name in wanted))
