"""What a stop saves and when: with recording stand-ins for Ray's parts, so that every moment can be chosen."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.cli import main as cli
from rlhfless_ray.common import deadlines as waits
from rlhfless_ray.common.deadlines import StopSignal
from rlhfless_ray.common.errors import RunError, Stopped, UserError
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.failure_budget import FailureBudget
from rlhfless_ray.learn.learn_stage import LearnStage
from rlhfless_ray.learn.recovery import Recovery
from rlhfless_ray.local.cluster import RayCluster
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.report.metrics import Metrics
from rlhfless_ray.reward.score_stage import ScoreStage
from rlhfless_ray.run.checkpoints import Best
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.runtime.evaluation import Evaluations
from rlhfless_ray.runtime.run_parts import RunParts
from rlhfless_ray.runtime.runtime import Runtime
from rlhfless_ray.runtime.saved_state import SavedState, StepsDone
from rlhfless_ray.runtime.stages import Stages
from rlhfless_ray.runtime.step_records import StepRecords
from rlhfless_ray.runtime.updates import Updates
from rlhfless_ray.session.dynamic_sampling import DynamicSampling
from rlhfless_ray.session.groups_in_flight import GroupsInFlight
from rlhfless_ray.session.prompt_source import PromptSource
from rlhfless_ray.session.rollout_session import RolloutSession
from rlhfless_ray.step.requests import make_request
from rlhfless_ray.step.step import Step, StepProgress
from rlhfless_ray.types import SampleId, WeightVersion
from rlhfless_ray.weights.remote_folder import writer
from tests.conftest import small_recipe
from tests.run.test_run_folder import store
from tests.run_files import rows, step_requests

# ---- the signal ---------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that a stop signal goes by, as the test sets them."""
    now = [100.0]
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_ctrl_c_waits_for_a_critical_section_however_long_and_says_so_once(clock: list[float]) -> None:
    stop, said = StopSignal(), []
    with stop.listening():
        with stop.deferred(0.01, said.append):
            signal.raise_signal(signal.SIGINT)
            for _ in range(3):
                stop.check()
                clock[0] += 1000.0
        assert len(said) == 1 and "Ctrl-C again" in said[0]
        with pytest.raises(Stopped, match="signal 2"):
            stop.check()


def test_sigterm_waits_for_a_critical_section_only_for_its_grace(clock: list[float]) -> None:
    stop = StopSignal()
    with stop.listening(), stop.deferred(1.5):
        signal.raise_signal(signal.SIGTERM)
        clock[0] += 1.4
        stop.check()
        signal.raise_signal(signal.SIGTERM)  # a second one does not begin the grace anew
        clock[0] += 0.2
        with pytest.raises(Stopped, match="signal 15"):
            stop.check()


def test_sigterm_shortens_the_wait_of_a_ctrl_c_and_a_second_ctrl_c_waits_for_nothing() -> None:
    stop = StopSignal()
    with stop.listening():
        with stop.deferred(0.0):
            signal.raise_signal(signal.SIGINT)
            stop.check()
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Stopped, match="signal 15"):
                stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_acknowledged_signal_does_not_stop_the_saving_but_a_new_one_does() -> None:
    stop = StopSignal()
    with stop.listening():
        signal.raise_signal(signal.SIGINT)
        assert stop.acknowledge() == signal.SIGINT
        stop.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Stopped):
            stop.check()


def test_a_wait_that_was_in_vain_tells_its_whole_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what was left of it when the last of several was looked at."""
    now = [0.0]

    def wait(refs: list[str], timeout: float, **_: Any) -> tuple[list[str], list[str]]:
        now[0] += max(timeout, 0.1)
        ready = [ref for ref in refs if ref == "early" and now[0] > 50]
        return ready, [ref for ref in refs if ref not in ready]

    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(waits, "ray", SimpleNamespace(wait=wait, get=lambda ref, timeout: ref))
    with pytest.raises(RunError, match="timed out after 60 s waiting for two answers"):
        waits.get(["early", "never"], 60.0, "two answers")
    assert 60 <= now[0] < 61
    with pytest.raises(RunError, match="timed out after 1800 s waiting for the rest"):
        waits.wait_any(["never"], 0.3, "the rest", within_s=1.0, of_s=1800.0)


# ---- the end of a run ---------------------------------------------------------------------------------------------


class Ended:
    """A runtime in its fourth step, whose parts only write down what is asked of them."""

    def __init__(self, folder: Path, **overrides: Any) -> None:
        self.did: list[str] = []
        self.messages: list[str] = []
        self.run = run = Runtime.__new__(Runtime)
        run.recipe = recipe = Recipe.parse(small_recipe(folder, run__steps=9, **overrides))
        run.folder = RunFolder.create(recipe)
        run.folder.begin(recipe, "machine", 3)
        ledger = SimpleNamespace(step=3, begin_step=lambda step: None, saved_rows=0)
        node_times = SimpleNamespace(take=lambda now: {})
        run.leases = SimpleNamespace(release_all=lambda: None, waited_s=0.0, ledger=ledger, node_times=node_times)
        run.autoscaler = SimpleNamespace(
            state=lambda: {},
            predictor=SimpleNamespace(
                observe_update=lambda *_: None,
                observe_samples=lambda *_: None,
                observe_step=lambda *_: None,
                settle=lambda: None,
                expected_update_s=0.0,
            ),
            steps=SimpleNamespace(observe_plan=lambda *_: None, accuracy=dict, far_off=lambda row: []),
            criteria=SimpleNamespace(bids=None),
            quality=lambda *_: {},
            troubles=[],
            engines=SimpleNamespace(width=1),
        )
        pool = SimpleNamespace(close=lambda: self.did.append(f"close as {self.status()}"), replacements=0)
        storage = SimpleNamespace(save=self.save, ask_save=lambda *_: [])
        self.worker_group = SimpleNamespace(storage=storage, skipped_in_a_row=0, pool=pool, ranks=1)
        self.worker_group.by_rank = [SimpleNamespace(leases=[None])]
        self.worker_group.slots, self.worker_group.working, self.worker_group.call_s = 1, True, 0.1
        self.worker_group.recovery, self.worker_group.forget, self.worker_group.start_snapshot = Recovery(1), lambda: None, lambda: None
        run.record = SimpleNamespace(
            progress=SimpleNamespace(message=self.messages.append),
            step=lambda step, *_: self.did.append(f"record {step.number}"),
            samples=lambda *_: None,
            summarize_samples=lambda samples: {},
            costs=lambda: ({"full_slot_s": 0.0}, {}),
            close=lambda *_: None,
            checkpointed=lambda: None,
            put_off=lambda _: None,
            catch_up=lambda: None,
            later=[],
        )
        phases: Any = SimpleNamespace(take=lambda: ({}, 1.0), phase=lambda *_: nullcontext())
        limits: Any = lambda: SimpleNamespace(fewest=lambda width: 1, engines=lambda width: 1)  # noqa: E731
        context = RunContext(recipe, SlotBroker(run.leases), phases, run.record, run.autoscaler, limits)
        learn = LearnStage(context, self.worker_group)  # type: ignore[arg-type]
        learn.plan = SimpleNamespace(reason="")  # type: ignore[assignment]
        rollout: Any = SimpleNamespace(pool=pool, state=dict, restore=lambda state: None, drafts=None, drafter=None, files=dict)
        context.broker.check = lambda *_: None  # type: ignore[method-assign]
        stages = Stages(context, FailureBudget(3), None, rollout, rollout, learn, None, None)
        session = RolloutSession.__new__(RolloutSession)
        session.context, session.groups, session.mode, session.step = context, GroupsInFlight(recipe), recipe.rollout.mode, Step(4)
        cursor: Any = SimpleNamespace(restore=lambda _, check: None, state=lambda: [4], epoch=0)
        session.source = PromptSource([], cursor, DynamicSampling(recipe, cursor), None)
        session.weights, session.last_step = WeightVersion(3, ("weights",)), 9
        run.inputs = SimpleNamespace(files={"config.json": b"{}"}, prompts=SimpleNamespace(train=[], heldout=[]), contents={})  # type: ignore[assignment]
        state = SavedState(stages, session, run.folder, run.inputs, 3)
        state.checkpoints, state.best, state.done, state.saved = store(run.folder), Best("none"), StepsDone([3]), 2  # type: ignore[arg-type]
        records = StepRecords(stages, session, state, lambda engines: {}, lambda: None, False)
        records.cursor_after = [4]  # type: ignore[assignment]
        updates, evaluations = Updates(stages, session, records), Evaluations(stages, records)
        run.parts = RunParts(stages, session, updates, evaluations, records, state)

    def save(self, folder: Path, deadline_s: float | None = None, prefix: str = "", refs: Any = None) -> dict[str, str]:
        self.did.append(f"snapshot within {deadline_s}")
        return writer({"model.safetensors": b""})(folder)

    def status(self) -> str:
        return json.loads((self.run.folder.path / "status.json").read_text())["status"]

    def by(self, error: BaseException | None) -> list[str]:
        self.run._shut_down(type(error), error, None)
        self.run._close_record(type(error), error, None)
        self.run._raise_reported_error(type(error), error, None)
        return [what for what in self.did if not what.startswith("close")]

    def driver(self) -> dict[str, Any]:
        return store(self.run.folder).load()[2]

    def restore(self, driver: dict[str, Any], restore: Callable[[Any], None] = lambda _: None) -> Runtime:
        """Take over what a checkpoint of step 3 holds. `restore`: of the planner."""
        self.run.autoscaler.restore = restore  # type: ignore[method-assign]
        self.run.parts.state.restore(driver)
        return self.run


def test_ctrl_c_gives_the_snapshot_the_learners_deadline_and_sigterm_two_seconds_or_what_the_recipe_says(tmp_path: Path) -> None:
    assert Ended(tmp_path).by(Stopped(signal.SIGINT)) == ["snapshot within None"]
    assert Ended(tmp_path).by(Stopped(signal.SIGTERM)) == ["snapshot within 2.0"]
    assert Ended(tmp_path, run__sigterm_s=30).by(Stopped(signal.SIGTERM)) == ["snapshot within 20.0"]


def test_a_step_whose_update_is_done_is_saved_and_its_evaluation_made_up_for(tmp_path: Path) -> None:
    ended = Ended(tmp_path, evaluate__every_steps=2)
    ended.run.parts.session.step.progress = StepProgress.UPDATED
    assert ended.by(Stopped(signal.SIGINT)) == ["record 4", "snapshot within None"]
    driver = ended.driver()
    assert (driver["step"], driver["cursor"], driver["owes_evaluation"]) == (4, [4], True)
    assert Ended(tmp_path).restore(driver).parts.state.owes_evaluation


def test_a_resumed_run_knows_what_old_tokens_cost(tmp_path: Path) -> None:
    ended = Ended(tmp_path)
    ended.run.parts.session.groups.stale_cost.observe(2.0, 0.5)
    ended.by(Stopped(signal.SIGINT))
    resumed = Ended(tmp_path).restore(ended.driver())
    assert resumed.parts.session.groups.stale_cost.per_version == ended.run.parts.session.groups.stale_cost.per_version > 0


def test_a_stop_before_the_first_step_of_a_resumed_run_leaves_its_checkpoint_as_it_is(tmp_path: Path) -> None:
    """Its metric, by which it may stay, is that of a step that is not there any more."""
    for owes, did in ((False, []), (True, ["snapshot within None"])):
        ended = Ended(tmp_path)
        ended.run.parts.state.owes_evaluation = owes
        assert ended.by(Stopped(signal.SIGINT)) == ["snapshot within None"]
        resumed = Ended(tmp_path)
        resumed.restore(ended.driver())
        assert resumed.by(Stopped(signal.SIGINT)) == did, "what it evaluated since is worth a checkpoint"


@pytest.mark.parametrize(
    ("step", "value", "saved"), [(3, 0.5, ["best_step_3", "step_3"]), (3, 0.3, []), (4, 0.3, ["step_4"]), (0, 0.5, [])]
)
def test_an_evaluation_that_a_stop_interrupted_counts_for_checkpoints(tmp_path: Path, step: int, value: float, saved: list[str]) -> None:
    """One is due at step 4. The evaluation before step 1 needs none: its policy is in the first checkpoint."""
    run = Ended(tmp_path, checkpoint__every_steps=4).run
    state = run.parts.state
    state.best, state.steps_done = Best("accuracy_sampled"), step
    state.best.value = 0.4
    run.record.evaluation = lambda *_: None  # type: ignore[method-assign]
    run.parts.evaluations.record({"eval/accuracy_sampled": value})
    found = {path.parent.name: json.loads(path.read_text())["metric_value"] for path in state.checkpoints.folder.glob("*/metric.json")}
    assert found == dict.fromkeys(saved, value)
    assert not saved or state.checkpoints.load()[2]["best_value"] == max(value, 0.4)


@pytest.mark.parametrize("error", [KeyError("history"), TypeError("unexpected keyword"), ValueError("older")])
def test_a_planner_of_another_version_is_named(tmp_path: Path, error: Exception) -> None:
    ended = Ended(tmp_path)
    ended.by(Stopped(signal.SIGINT))

    def fail(_: Any) -> None:
        raise error

    with pytest.raises(UserError, match="of another version of this program"):
        Ended(tmp_path).restore(ended.driver(), fail)


def test_an_update_clears_its_mark_when_it_ends_so_that_a_later_stop_saves_it(tmp_path: Path) -> None:
    ended = Ended(tmp_path)
    ended.worker_group.start_update = lambda batch, publishes: Pending(lambda: SimpleNamespace(skipped=0, applied=0))
    session, updates = ended.run.parts.session, ended.run.parts.updates
    session.step.progress = StepProgress.LEARNING
    update = updates.start(None)  # type: ignore[arg-type]
    assert session.update is update and not session.step.is_unrecorded
    update.result()
    assert session.update is None and session.step.is_unrecorded
    ended.worker_group.start_update = lambda batch, publishes: Pending(lambda: exec("raise KeyError"))
    with pytest.raises(KeyError):
        session.step.progress = StepProgress.LEARNING
        updates.start(None).result()  # type: ignore[arg-type]
    assert session.update is not None


def test_a_failure_saves_the_last_step_where_its_state_lies_outside_of_the_learner(tmp_path: Path) -> None:
    ended = Ended(tmp_path)
    assert ended.by(RunError("no")) == [], "nothing is asked of a learner that may be what failed"
    for whole, did in (("state", ["snapshot within 30.0"]), (None, [])):
        ended = Ended(tmp_path)
        ended.worker_group.recovery.complete = whole
        assert ended.by(RunError("no")) == did
    ended = Ended(tmp_path)
    ended.worker_group.recovery.complete = "state"
    ended.by(RunError("no"))
    assert ended.driver()["step"] == 3 and ended.messages == ["step 3 is saved: --resume continues from there"]
    ended = Ended(tmp_path)
    ended.worker_group.recovery.complete = "state"
    ended.worker_group.recovery.record(None)
    assert ended.by(RunError("no")) == [], "the learner has gone on since"


def test_inside_an_update_the_checkpoint_before_stands(tmp_path: Path) -> None:
    ended = Ended(tmp_path)
    ended.run.parts.session.update = Pending(lambda: None)
    assert ended.by(Stopped(signal.SIGTERM)) == []
    assert "inside an update" in ended.messages[0]


def test_before_the_learner_is_built_there_is_nothing_to_save_and_nothing_to_resume(tmp_path: Path) -> None:
    ended, stop = Ended(tmp_path), Stopped(signal.SIGINT)
    ended.run.parts.session.weights = None
    assert ended.by(stop) == [] and ended.messages == []
    assert not stop.resumable
    stop = Stopped(signal.SIGINT)
    Ended(tmp_path).by(stop)
    assert stop.resumable


def test_the_status_is_written_before_ray_is_asked_for_anything(tmp_path: Path) -> None:
    for error, status in ((Stopped(signal.SIGTERM), "stopped"), (UserError("no"), "failed")):
        ended = Ended(tmp_path)
        ended.by(error)
        assert [what for what in ended.did if what.startswith("close")] == [f"close as {status}"] * 3


def test_leaving_the_loop_early_is_a_stop_that_saves(tmp_path: Path) -> None:
    ended = Ended(tmp_path)
    assert ended.by(None) == ["snapshot within None"]
    assert ended.driver()["step"] == 3
    assert json.loads((ended.run.folder.path / "status.json").read_text())["reason"] == "the loop was left after step 3 of 9"
    done = Ended(tmp_path)
    done.run.parts.records.finished = True
    assert done.by(None) == [] and done.status() == "done"


@pytest.mark.parametrize(("resumable", "said"), [(True, "continue with --resume"), (False, "nothing to resume from yet")])
def test_the_hint_knows_whether_there_is_something_to_resume(monkeypatch, capsys, resumable: bool, said: str) -> None:
    stop = Stopped(signal.SIGTERM)
    stop.resumable = resumable
    codes: list[int] = []

    def app(**_: Any) -> None:
        raise stop

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(os, "_exit", codes.append)
    cli.main()
    assert codes == [143] and said in capsys.readouterr().err


def test_a_sigterm_while_ray_starts_is_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own handler, in place while it starts, ends the process by SystemExit(15)."""
    run = Runtime.__new__(Runtime)
    run.inputs = SimpleNamespace(files={}, cursor=SimpleNamespace(check=lambda _: None), contents={})  # type: ignore[assignment]
    run.recipe, run.resume = Recipe.parse(small_recipe(tmp_path)), False
    left: list[bool] = []
    run.cluster = RayCluster(run.recipe)
    monkeypatch.setattr(run.cluster, "_start", lambda: exec("raise SystemExit(15)"))
    monkeypatch.setattr(run.cluster, "stop", lambda: left.append(True))
    with pytest.raises(Stopped) as caught:
        run.__enter__()
    assert caught.value.signal_number == signal.SIGTERM and left == [True] and not caught.value.resumable
    folder = RunFolder.create(run.recipe)
    store(folder, 1).save(2, writer({}), {"cursor": {"taken": 4}, "step": 2})
    run.resume, run.previous, run.resume_changed = True, False, False
    with pytest.raises(Stopped) as caught:
        run.__enter__()
    assert caught.value.resumable, "what was there before this start is there still"


# ---- the evaluation made up for -----------------------------------------------------------------------------------


def test_a_late_evaluation_joins_the_row_of_its_step(tmp_path: Path) -> None:
    watch = Recipe.parse(small_recipe(tmp_path)).watch
    with Metrics(tmp_path, watch) as sink:
        for step in (3, 4):
            sink.write({"step": step, "time_s": 10.0 * step, "reward/mean": 0.5})
    with Metrics(tmp_path, watch, resume_after_step=4) as sink:
        sink.amend({"step": 4, "time_s": 99.0, "eval/accuracy_greedy": 0.7})
        sink.amend({"step": 5, "time_s": 100.0})
    assert rows(tmp_path) == [
        {"step": 3, "time_s": 30.0, "reward/mean": 0.5},
        {"step": 4, "time_s": 40.0, "eval/accuracy_greedy": 0.7, "reward/mean": 0.5},
        {"step": 5, "time_s": 100.0},
    ]


# ---- seeds --------------------------------------------------------------------------------------------------------


def test_a_row_twice_in_a_batch_gets_other_samples_and_all_others_keep_theirs(tmp_path: Path) -> None:
    from rlhfless_ray.types import Prompt, SampleId

    recipe = Recipe.parse(small_recipe(tmp_path, rollout__samples_per_prompt=3))
    rows = [Prompt(i, "p", (1,)) for i in (5, 7, 5, 9, 5)]
    requests = step_requests(recipe, 4, rows)
    assert [r.key for r in requests] == list(range(15))
    assert len({r.seed for r in requests}) == len({r.id for r in requests}) == 15
    ordinary = [make_request(recipe, 0, rows[i], 1.0, SampleId(rows[i].index, 4, j)).seed for i in (0, 1, 3) for j in range(3)]
    assert [requests[3 * i + j].seed for i in (0, 1, 3) for j in range(3)] == ordinary


# ---- nothing to learn from ----------------------------------------------------------------------------------------


def test_an_evaluation_without_any_reward_has_no_accuracy_and_no_warning(recwarn) -> None:
    from rlhfless_ray.runtime.evaluation import compute_accuracies
    from rlhfless_ray.types import Completion, Prompt, Scored

    done = Completion(0, np.zeros(3, np.int32), np.zeros(3, np.float32), "stop", 0)
    samples = [Scored(Prompt(i, "p", (1,)), SampleId(i, 1, 0), done, error="boom") for i in range(2)]
    asked = {"sampled": (1.0, 1), "greedy": (0.0, 1)}
    others = {"eval/length_mean": 3.0, "eval/truncated_share": 0.0, "eval/samples": 2.0}
    assert compute_accuracies(samples, asked) == {**others, "eval/failed": 2.0}
    samples[1] = replace(samples[1], reward=0.5, error=None)
    assert compute_accuracies(samples, asked) == {**others, "eval/failed": 1.0, "eval/accuracy_greedy": 0.5}
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


# ---- scoring that ends the run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step", "evaluation"])
def test_samples_are_on_disk_when_scoring_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from rlhfless_ray.common.errors import RunError
    from rlhfless_ray.reward import scoring as score
    from rlhfless_ray.reward.reward_functions import RewardSource
    from rlhfless_ray.run.recorder import RunRecorder
    from rlhfless_ray.types import Completion, Prompt, Scored

    run = Ended(tmp_path, watch__samples_per_step=1).run
    run.record.progress.phase = None
    run.record.recipe, run.record.folder = run.recipe, run.folder
    run.record.samples = lambda *a: RunRecorder.samples(run.record, *a)
    done = Completion(0, np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", 0)
    samples = [
        Scored(Prompt(i, "p", (1,)), SampleId(i, 1, 0), done, "r", reward=None if i else 1.0, error="boom" if i else None) for i in range(3)
    ]
    monkeypatch.setattr(score.Scoring, "finish", lambda self, announce: setattr(self, "failed", 2))
    source = RewardSource("task", "chain")
    with pytest.raises(RunError, match="2 of 3 samples could not be scored"):
        ScoreStage(run.parts.stages.context, SimpleNamespace(working=[]), source).score(samples, 4, name)  # type: ignore[arg-type]
    lines = (run.folder.path / "samples" / f"{name}_4.jsonl").read_text().splitlines()
    assert [json.loads(line)["error"] for line in lines] == [None, "boom", "boom"]


@pytest.mark.parametrize("seed", [-5, 2**63, 10**23])
def test_any_whole_number_is_a_seed(tmp_path: Path, seed: int) -> None:
    from rlhfless_ray.types import Prompt, SampleId

    recipe = Recipe.parse(small_recipe(tmp_path, run__seed=seed))
    assert 0 <= make_request(recipe, 0, Prompt(0, "p", (1,)), 1.0, SampleId(0, 4, 0)).seed < 2**64
