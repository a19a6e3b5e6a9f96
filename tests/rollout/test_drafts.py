"""What a drafter keeps from step to step changes no decision."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.engine import drafts
from rlhfless_ray.engine.text_drafts import TextSource
from rlhfless_ray.types import EngineStep

PROMPT, ROOM, LONGEST = 6, 24, 120


class SimulatedEngine:
    """The part of vLLM that a drafter reads. Sequences repeat one text with errors; they begin, end, are cut and change their rows."""

    def __init__(self, keeps: bool) -> None:
        self.rng, self.keeps, self.numbers = np.random.default_rng(8), keeps, itertools.count()
        self.text = self.rng.integers(0, 40, LONGEST).astype(np.int32)
        self.said: dict[str, np.ndarray] = {}  # what each sequence says
        self.requests: dict[str, Any] = {}
        self.batch = SimpleNamespace(
            req_ids=[],
            num_tokens_no_spec=np.zeros(ROOM, int),
            num_prompt_tokens=np.zeros(ROOM, int),
            token_ids_cpu=np.zeros((ROOM, 256), np.int32),
        )
        self.sampler = SimpleNamespace(rows={}, begun=0, running=0, context_tokens=0)
        runner = SimpleNamespace(input_batch=self.batch, sampler=self.sampler, speculative_config=object())
        self.drafter = drafts.Drafter(SimpleNamespace(model_config=SimpleNamespace(max_model_len=LONGEST - 20)))
        self.drafter.attach(runner, SimpleNamespace(requests=self.requests), always=False)

    def begin(self) -> None:
        number, told = next(self.numbers), self.text.copy()
        wrong = self.rng.random(LONGEST) < 0.15
        told[wrong] = self.rng.integers(0, 40, wrong.sum())
        row, name = len(self.requests), str(number)
        self.said[name] = told
        self.sampler.begun += 1
        params = SimpleNamespace(extra_args={"response": 0, "offset": 0})
        self.requests[name] = SimpleNamespace(spec_token_ids=[], is_prefill_chunk=False, num_output_tokens=0, sampling_params=params)
        self.sampler.rows[name] = {"key": number, "max_tokens": int(self.rng.integers(20, LONGEST))}
        self.batch.req_ids.append(name)
        self.batch.num_prompt_tokens[row] = self.batch.num_tokens_no_spec[row] = PROMPT
        self.batch.token_ids_cpu[row, :PROMPT] = told[:PROMPT]

    def drop_ended(self) -> None:
        """Fill the rows of ended sequences with the last ones, as vLLM does before a step."""
        names, batch = self.batch.req_ids, self.batch
        for row in reversed(range(len(names))):
            if names[row] not in self.requests:
                last = names.pop()
                if row < len(names):
                    names[row] = last
                    for array in (batch.num_tokens_no_spec, batch.num_prompt_tokens, batch.token_ids_cpu):
                        array[row] = array[len(names)]

    def step(self) -> list[Any]:
        """Decode a step, and return its drafts with all that was learned."""
        self.drop_ended()
        while len(self.requests) < ROOM and self.rng.random() < 0.3:
            self.begin()
        tried, context = {}, 0
        for row, name in enumerate(self.batch.req_ids):
            request, said, size = self.requests[name], self.said[name], self.batch.num_tokens_no_spec[row]
            drafted, request.spec_token_ids = request.spec_token_ids, []
            hits = next((i for i, token in enumerate(drafted) if token != said[size + i]), len(drafted))
            if drafted:
                tried[name] = len(drafted), hits
            self.batch.token_ids_cpu[row, size : size + hits + 1] = said[size : size + hits + 1]
            self.batch.num_tokens_no_spec[row] += hits + 1
            request.num_output_tokens += hits + 1
            context += size + hits + 1
            limit = min(LONGEST - 20, PROMPT + self.sampler.rows[name]["max_tokens"])
            assert size + hits + 1 <= limit
            if size + hits + 1 == limit or self.rng.random() < 0.01:
                del self.requests[name]
                self.drafter.finish(self.sampler.rows[name]["key"], said[PROMPT : size + hits + 1].tolist())
        if not self.keeps:
            self.drafter.batch = None
        self.drafter.look_up()
        running, drafted, hits = len(self.batch.req_ids), *(sum(counts) for counts in zip((0, 0), *tried.values(), strict=True))
        work_s = 0.01 * (1 + 0.003 * drafted) * float(np.exp(self.rng.normal(0, 0.05)))
        if not self.drafter.is_idle:
            self.drafter.observe_step(EngineStep(running, running, context, work_s, drafted, hits, 3e-4, work_s=work_s), tried)
        offered = {name: request.spec_token_ids for name, request in self.requests.items()}
        return [tried, offered, vars(self.drafter.attempts) | {"learned": None}, self.drafter.learned.acceptance.tried.tolist()]


def test_a_kept_batch_gives_the_drafts_of_one_that_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, drafted = [SimulatedEngine(True), SimulatedEngine(False)], 0
    clocks = [itertools.count(step=2e-4), itertools.count(step=2e-4)]
    for _ in range(400):
        found = []
        for engine, clock in zip(engines, clocks, strict=True):
            monkeypatch.setattr(drafts, "time", SimpleNamespace(thread_time=lambda clock=clock: next(clock)))
            found.append(engine.step())
        assert found[0] == found[1]
        drafted += sum(count for count, _ in found[0][0].values())
    assert drafted > 1000


def test_a_pause_reads_nothing_of_the_batch() -> None:
    """A property of a fake raises AttributeError if it is read: neither the batch nor the scheduler's requests are there."""
    sampler = SimpleNamespace(begun=0, running=64, context_tokens=6400)
    drafter = drafts.Drafter(SimpleNamespace(model_config=SimpleNamespace(max_model_len=100)))
    drafter.attach(SimpleNamespace(sampler=sampler, speculative_config=object()), SimpleNamespace(), always=False)
    drafter.attempts.pause = 2
    for begun in (1, 2):
        sampler.begun = begun
        drafter.look_up()
        assert drafter.is_idle and drafter.context_tokens == 6400
    with pytest.raises(AttributeError):
        drafter.look_up()


def test_an_estimate_is_that_of_a_token_after_those_before_it() -> None:
    source, table = TextSource(), np.array([[0, 1, 2]], np.int32)
    for name, text in enumerate(([1, 2, 3, 5, 6, 7], [1, 2, 3, 5, 6, 7], [1, 2, 3, 5, 8, 9], [1, 2, 4, 9, 9, 9])):
        source.add(("text", name), np.array(text, np.int32))
    found = source.propose(["asked"], [1], table, np.array([0]), np.array([3]), [8])
    assert found.tokens == [[3, 5, 6, 7]] and found.matches == [2]
    assert found.estimates[0] == pytest.approx([3 / 4, 1, 2 / 3, 1])
