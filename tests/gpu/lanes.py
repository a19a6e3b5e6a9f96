"""Checks of model families on the device, each by an engine host and a learner host. Not collected by pytest.

Checks run in threads ahead of the tests that wait for them, so that several families are built side by side.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from rlhfless_ray.engine.engine_settings import EngineSettings, ServedAdapter
from rlhfless_ray.learn.batch import UNKNOWN_EXPERT
from rlhfless_ray.learn.model_checks import WITH_ROUTERS
from rlhfless_ray.types import Request
from rlhfless_ray.weights.adapter import ADAPTABLE
from rlhfless_ray.weights.checksum import digests
from rlhfless_ray.weights.model_folder import stored_weights
from rlhfless_ray.weights.tensor_file import as_numpy
from rlhfless_ray.weights.tensor_slice import whole_slices
from tests.gpu.hosts import MEMORY_SHARE, ON, OPEN_S, write_figures
from tests.learn.conftest import learner_settings
from tests.learn.tiny_policy import tiny_policy
from tests.rollout.families import EOS, batch_of, policy, replaying, requests

SETTINGS = EngineSettings(
    max_model_len=160, max_running=32, block_size=32, kv_cache_mb=32, gpu_memory_share=MEMORY_SHARE, device=ON, end_token_id=EOS
)
LANES = 4 if ON != "cpu" else 1
FLOAT32 = 1e-3  # nats, of any token. Products in TF32 anywhere give about 1e-2.
SAME = 1e-4  # nats, of one token computed in batches of other shapes in float32
EQUAL_SHARE = 0.9  # of responses: the others have a near tie
BFLOAT16 = 0.05  # nats, mean: what the product warns about, see `rlhfless_ray.runtime.agreement`


class Lanes:
    """Pairs of an engine host and a learner host, which take the given checks in order. A thread has one pair."""

    def __init__(self, hosts: Any) -> None:
        self.hosts, self.lane, self.count = hosts, threading.local(), itertools.count()
        self.pool = ThreadPoolExecutor(LANES)
        self.found: dict[Any, Future[dict[str, Any]]] = {}

    def begin(self, key: Any, check: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        self.found[key] = self.pool.submit(self._work, check, *arguments)

    def _work(self, check: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        if not hasattr(self.lane, "pair"):
            number = next(self.count)
            self.lane.pair = self.hosts.get("EngineTools", f"engines {number}"), self.hosts.get("LearnerTools", f"learners {number}")
        begin = time.perf_counter()
        found: dict[str, Any] = {}
        try:
            found = check(*self.lane.pair, *arguments)
        except RuntimeError as error:
            found = {"failed": str(error)[-600:]}
            raise
        finally:  # an interrupted session has the figures of checks whose tests it has not reached
            write_figures(check=list(arguments[:2]), s=round(time.perf_counter() - begin, 2), **found)
        return found

    def result(self, key: Any, within_s: float = 240.0) -> dict[str, Any]:
        return self.found[key].result(within_s)

    def end(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def check_family(
    engines: Any,
    learners: Any,
    name: str,
    family: str,
    dtype: str,
    files: dict[str, bytes] | None = None,
    *,
    lora: dict[str, Any] | None = None,
    parks: bool = False,
    eager: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    """Compare engine and learner under two weight versions, between which the learner makes an update.

    For families with routers the experts that the engine tells are replayed too. `lora`: the recipe's section, for an adapter that the
    engine serves. `parks`: compare the engine with itself after it was parked. `changes`: of the engine's settings. Returns differences
    of log-probabilities in nats.
    """
    begin, routes = time.perf_counter(), family in WITH_ROUTERS
    files = policy(family, 1, dtype) if files is None else files
    learner = {"micro_batch_tokens": 400, "zero_stage": int(dtype == "bfloat16"), "learning_rate": 1e-2 if lora else 1e-3}
    settings = learner_settings(learner=learner, dtype=dtype, lora=lora or {})
    served = ServedAdapter(lora["rank"], lora["alpha"], ADAPTABLE) if lora else None
    of_engine = replace(SETTINGS, dtype=dtype, records_experts=routes, adapter=served, **changes)
    building = engines.send("open", name, files, of_engine, eager, parks)
    opening = learners.send("open", name, files, replaying(settings) if routes else settings)
    build_s, weights = engines.take(building, OPEN_S), learners.take(opening, OPEN_S)
    found: dict[str, Any] = {"build_s": build_s, "kernels": engines.ask("kernels", name), "largest": [], "mean": []}
    base, before = files if lora else None, None
    for version in (1, 2):
        if before is not None:
            weights = learners.ask("weights", name)
            found["changed"] = sum(not np.array_equal(weights[key], before[key]) for key in weights)
        before = weights
        asked = requests(seed=version)
        engines.ask("load", name, version, weights, base)
        answers = engines.ask("answer", name, asked)
        batch = batch_of(asked, answers)
        apart = np.abs(learners.ask("logprobs", name, batch) - batch.logprobs)
        found["largest"].append(float(apart.max()))
        found["mean"].append(float(apart.mean()))
        if version == 2 and parks:
            found["after_parking"] = parked(engines, name, weights, base, asked, answers)
        if version == 2 and lora is None and of_engine.quantization == "off":
            published, model = digests(whole_slices(weights)), learners.ask("model", name)
            found["differing"] = engines.ask("call", name, "differing", 3 if parks else 2, published, model)
        stats = learners.ask("update", name, batch)
        found["applied"], found["mismatch_max"] = stats.applied, stats.mismatch_max
    if routes:
        found |= replay(engines, learners, name, [replace(one, token_ids=(*range(2, 40), *one.token_ids)) for one in requests(seed=5)])
    return {**found, "check_s": time.perf_counter() - begin}


def parked(engines: Any, name: str, weights: Any, base: Any, asked: Sequence[Any], answers: dict[int, Any]) -> dict[str, Any]:
    """Park an engine, load the same weights as another version, and compare its answers with those of before.

    The last step before and the first one after are of one token of one request: nothing may be kept because a step is like the last.
    """
    short = [Request(0, (5,), 3, 2, 1.0)]
    before = engines.ask("answer", name, short)
    report = engines.ask("park", name)
    engines.ask("load", name, 3, weights, base)
    found = compare(engines.ask("answer", name, short), before)
    every = compare(engines.ask("answer", name, asked), answers)
    return {**every, "one_token_apart": found["largest"], "parked_mb": report["memory_mb"]}


def replay(engines: Any, learners: Any, name: str, asked: Sequence[Any]) -> dict[str, Any]:
    """Compare the learner with its own, with the engine's and with other experts. Prompts share a block of KV."""
    weights = learners.ask("weights", name)
    engines.ask("load", name, 5, weights)
    answers = engines.ask("answer", name, asked)
    batch = batch_of(list(asked), answers, replays=True)
    assert batch.experts is not None
    unknown = (batch.experts == UNKNOWN_EXPERT).all((1, 2))
    other = replace(batch, experts=np.where(unknown[:, None, None], UNKNOWN_EXPERT, batch.experts ^ 1))
    apart = {
        kind: float(np.abs(learners.ask("logprobs", name, one) - batch.logprobs).max())
        for kind, one in (("own", batch_of(list(asked), answers)), ("replayed", batch), ("other", other))
    }
    return {
        **{f"{kind}_experts": value for kind, value in apart.items()},
        "all_told": bool(np.array_equal(np.flatnonzero(unknown), np.cumsum(batch.lengths) - 1)),
    }


@functools.cache
def spread_policy(seed: int = 0, dtype: str = "float32") -> dict[str, bytes]:
    """Return the files of a tiny policy that is less uniform than others, made when it is first needed."""
    return tiny_policy(seed, spread=0.15, dtype=dtype)


def weights_of(files: dict[str, bytes]) -> dict[str, np.ndarray]:
    return {name: as_numpy(tensor) for name, tensor in stored_weights(files)}


def compare(found: dict[int, Any], wanted: dict[int, Any]) -> dict[str, Any]:
    """Compare completions or pairs (tokens, log-probabilities), by key.

    Returns how many have equal tokens, and the largest difference of log-probabilities before the first token that differs, in nats.
    Kernels on a device round differently in batches of other shapes, and a near tie between two tokens may then fall otherwise.
    """
    assert found.keys() == wanted.keys()
    equal, largest, common, total = 0, 0.0, 0, 0
    for key in wanted:
        (a, p), (b, q) = (one if isinstance(one, tuple) else (one.token_ids, one.logprobs) for one in (found[key], wanted[key]))
        size = min(len(a), len(b))
        other = np.flatnonzero(a[:size] != b[:size])
        same = int(other[0]) if len(other) else size
        equal += len(a) == len(b) == same
        common, total = common + same, total + len(b)
        if same:
            largest = max(largest, float(np.abs(p[:same] - q[:same]).max()))
    return {"responses": len(wanted), "equal": equal, "common_tokens": common, "tokens": total, "largest": largest}


def assert_alike(found: dict[str, Any]) -> None:
    """`found`: from `compare`, of engines in float32."""
    assert found["largest"] < SAME and found["equal"] >= EQUAL_SHARE * found["responses"], found
