"""What plugins hear of a rollout, on engines that are generators in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError, RayError

from placement.scaling.resize_policy import Hold
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.engine.control_queue import EngineCommand
from rlhfless_ray.engine.token_deltas import CUT, GOES_ON, STOP, TokenDeltas
from rlhfless_ray.rollout import driver as module
from rlhfless_ray.rollout.driver import RolloutDriver
from rlhfless_ray.rollout.engine_calls import Attached
from rlhfless_ray.rollout.events import Event, RolloutEnded, RolloutProgress, SamplesMade, TokensArrived
from rlhfless_ray.rollout.live_rollout import DriverSettings, Ending, LiveRollout, Plugin
from rlhfless_ray.rollout.lost_engines import LostEngines
from rlhfless_ray.rollout.request_source import PlainRequests, WantedResponses
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import Prompt, Request, SampleId, WeightVersion

pytestmark = pytest.mark.pure

TOKENS = 6  # of each response


class Engine:
    """Reports a token of each of its requests at a time. A request that it is told to cut ends with the next report."""

    def __init__(self, number: int, dies_at: int = 99) -> None:
        self.id, self.slot, self.leases, self.loading = f"e{number}", SimpleNamespace(node="a"), list[Any](), None
        self.started, self.version, self.state = True, 1, None
        self.dies_at, self.commands, self.attached = dies_at, list[EngineCommand](), dict[str, Any]()
        self.actor = SimpleNamespace(rollout=self, enqueue=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.command)))

    def options(self, **_: Any) -> Any:
        return SimpleNamespace(remote=self.generate)

    def command(self, epoch: int, command: EngineCommand) -> None:
        self.commands.append(command)

    def failure(self) -> str:
        return ""

    def generate(self, epoch: int, requests: list[Request], *_: Any, **attached: Any) -> Iterator[Any]:
        self.attached |= attached
        live = {request.key for request in requests}
        for at in range(TOKENS):
            if at == self.dies_at:
                raise RunError("the engine ends the run")
            cut = {key for command in self.commands for key in command.cut} & live
            ends = {key: CUT if key in cut else STOP if at == TOKENS - 1 else GOES_ON for key in sorted(live)}
            yield (
                TokenDeltas.of(1, [(key, at, 1, end) for key, end in ends.items()], [at] * len(live), np.zeros(len(live))),
                EngineSteps(),
                [],
            )
            live -= cut


class Notes(Plugin):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def begin(self, rollout: LiveRollout) -> None:
        super().begin(rollout)
        self.heard.append("begin")

    def on_event(self, event: Event) -> None:
        self.heard.append(type(event).__name__)

    def attach(self, number: int, requests: list[Request]) -> Attached:
        return {"pages": (f"pages of {[request.key for request in requests]}",)}

    def metrics(self, before: Mapping[str, Any]) -> dict[str, Any]:
        return {"notes": len(self.heard) + before.get("notes", 0)}

    def close(self) -> None:
        self.heard.append("close")


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda value: value)
    monkeypatch.setattr(module, "wait_any", lambda refs, *_, **how: refs)


def rollout_of(engines: list[Any], plugins: list[Plugin], ending: Ending | None = None) -> RolloutDriver:
    """Two requests to each engine."""
    count = 2 * len(engines)
    requests = [Request(key, (7,), key, 99, 1.0, id=SampleId(key, 1, 0)) for key in range(count)]
    tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids))
    prompts = [Prompt(key, "", (7,)) for key in range(count)]
    source = PlainRequests(tokenizer, WantedResponses(requests, prompts, np.full(count, float(TOKENS)), 1))
    nodes = SimpleNamespace(draining=set, confirm_lost=lambda node: False)
    pool: Any = SimpleNamespace(
        working=engines, width=1, leases=SimpleNamespace(nodes=nodes, deadline_s=9.0), ledger=SimpleNamespace(spans=lambda *_: None)
    )
    settings = DriverSettings(0.1, 9.0, 1, lambda tail_s, needed: Hold(1, ""), lambda *_: None)
    return RolloutDriver(pool, source, WeightVersion(1, ()), settings, ending or Ending(), plugins)


def shares(engines: int) -> list[np.ndarray]:
    return np.array_split(np.arange(2 * engines), engines)


def test_plugins_hear_of_everything_in_order_and_attach_to_requests() -> None:
    first, second, engine = Notes(), Notes(), Engine(0)
    rollout = rollout_of([engine], [first, second])
    result = rollout.run(shares(1), 9.0)
    report, look = TokensArrived.__name__, RolloutProgress.__name__
    reports = [*[report, look] * (TOKENS - 1), report, SamplesMade.__name__, look]
    assert first.heard == second.heard == ["begin", *reports, look, "close", RolloutEnded.__name__]
    assert engine.attached["pages"] == ("pages of [0, 1]",) and len(result.completions) == 2
    assert rollout.rollout.metrics({"notes": 100})["notes"] == 100 + len(second.heard), "the last one's word counts"
    assert [sample.completion.key for sample in rollout.source.samples.all()] == [0, 1]


def test_plugins_are_closed_after_an_error_and_hear_of_no_end() -> None:
    notes = Notes()
    with pytest.raises(RunError, match="the engine ends the run"):
        rollout_of([Engine(0, dies_at=3)], [notes]).run(shares(1), 9.0)
    assert notes.heard[-1] == "close" and RolloutEnded.__name__ not in notes.heard


def test_a_rollout_that_may_end_before_it_begins_has_no_plugins() -> None:
    notes = Notes()
    result = rollout_of([Engine(0)], [notes], Ending(lambda rollout: True)).run(shares(1), 9.0)
    assert not notes.heard and [done.key for done in result.unfinished] == [0, 1]


def test_an_ending_cuts_what_is_left_under_its_tickets() -> None:
    engines = [Engine(0), Engine(1)]
    ending = Ending(lambda rollout: rollout.token_log.length.min() >= 2, cuts=lambda engine, keys: {7 + engine: keys.tolist(), 0: []})
    result = rollout_of(engines, [], ending).run(shares(2), 9.0)
    assert [(command.cut, command.ticket) for engine in engines for command in engine.commands[:1]] == [((0, 1), 7), ((2, 3), 8)]
    assert sorted(done.key for done in result.unfinished) == [0, 1, 2, 3] and not result.completions
    assert all(2 <= len(done.token_ids) < TOKENS for done in result.unfinished)


def test_a_report_does_not_make_the_driver_visit_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "wait_any", lambda refs, *_, **how: refs[:1])
    visits, clock = list[int](), iter(np.arange(0.0, 1e3, 1e-3))
    monkeypatch.setattr("rlhfless_ray.rollout.lost_engines.time.monotonic", lambda: float(next(clock)))  # a look takes milliseconds
    monkeypatch.setattr(LostEngines, "remove_silent", lambda lost: visits.append(1) or setattr(lost, "looked_s", float(next(clock))))
    engines = [Engine(number) for number in range(40)]
    rollout_of(engines, []).run(shares(40), 900.0)
    assert len(visits) < 40 * TOKENS / 5


def test_reports_that_have_arrived_are_fetched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    monkeypatch.setattr(ray, "get", lambda refs: fetched.append(len(refs)) or refs)
    result = rollout_of([Engine(number) for number in range(5)], []).run(shares(5), 9.0)
    assert fetched == [5] * TOKENS + [0] and len(result.completions) == 10


def test_of_reports_that_are_fetched_together_only_the_failed_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[int] = []

    def get(refs: Any) -> Any:
        if any(isinstance(ref, RayError) for ref in (refs if isinstance(refs, list) else [refs])):
            raise ActorDiedError
        return refs

    class Dying(Engine):
        def generate(self, *call: Any, **attached: Any) -> Iterator[Any]:
            yield next(super().generate(*call, **attached))
            yield ActorDiedError()

    monkeypatch.setattr(ray, "get", get)
    rollout = rollout_of([Engine(0), Dying(1), Engine(2)], [])
    monkeypatch.setattr(rollout.lost, "handle_death", lambda call, error: lost.append(call.number))
    with pytest.raises(RunError, match="2 of 6 responses are missing"):
        rollout.run(shares(3), 9.0)
    assert lost == [1] and sorted(rollout.token_log.completions) == [0, 1, 4, 5]
