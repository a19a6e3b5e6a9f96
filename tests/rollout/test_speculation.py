"""Engines that draft tokens say what engines say that do not: tokens, log-probabilities and ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from asking import FILES, VERSIONS, answer, assert_same, at_several_temperatures, requests, weights_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless_ray.engine.control_queue import DraftNews
from rlhfless_ray.engine.stop_strings import StopStrings

pytestmark = pytest.mark.engine


class Words:
    """A tokenizer whose token 7 reads `7;`, and so on."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(f"{token};" for token in tokens)


@pytest.fixture(scope="module")
def engines(new_engine: Callable[..., Any]) -> dict[str, Any]:
    from tiny_head import tiny_head  # imports vLLM, which an engine's test does first

    made = {kind: new_engine(FILES["A"], speculation=kind) for kind in ("off", "on", "auto")}
    # one drafter is the policy itself, the other has other weights
    made["twin"], made["model"] = (new_engine(FILES["A"], FILES[name], speculation="on") for name in "AB")
    made["head"] = new_engine(FILES["A"], tiny_head(FILES["A"]["config.json"], draft_vocabulary=40), speculation="on")
    version = next(VERSIONS)
    for engine in made.values():
        engine.load(version, weights_of(FILES["A"]))
        engine.stop_strings = StopStrings(Words)
    return made


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        *(("on", 0.0), ("auto", 0.7), ("model", 0.7), ("head", 0.0)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("on", 0.7), ("auto", 0.0), ("model", 0.0), ("head", 0.7))),
    ],
)
def test_drafts_change_only_the_number_of_steps(engines: dict[str, Any], kind: str, temperature: float) -> None:
    """Asked twice: the second time the source knows the tokens of the first responses, which other seeds repeat in part only."""
    steps: dict[str, list[Any]] = {"off": [], kind: []}
    generated = 0
    for seed in (0, 5):
        asked = [replace(one, seed=one.seed + seed, top_p=0.95 if one.key % 4 else 1.0) for one in requests(temperature=temperature)]
        found = {name: answer(engines[name], asked) for name in ("off", kind)}
        assert_same(found[kind], found["off"])
        steps = {name: steps[name] + engines[name].take_stats().steps for name in ("off", kind)}
        generated += sum(len(one.token_ids) for one in found["off"].values())
    assert not sum(step.drafted for step in steps["off"])
    assert len(steps[kind]) <= len(steps["off"])
    if kind != "auto":  # which drafts what pays, by times that depend on the machine
        assert sum(step.accepted for step in steps[kind]) > (100 if temperature == 0 else 0)
    drawn = sum(step.running + step.accepted for step in steps[kind])
    assert drawn >= generated, "tokens drawn after a response's end do not count"


def test_a_drafter_with_the_policys_weights_draws_the_policys_tokens(engines: dict[str, Any]) -> None:
    """It draws with the same numbers, so next to all of its tokens are accepted, at any temperature and top-p."""
    asked = [replace(one, top_p=0.9 if one.key % 2 else 1.0) for one in requests(8, temperature=0.7, seed=3)]
    engines["twin"].take_stats()
    assert_same(answer(engines["twin"], asked), answer(engines["off"], asked))
    steps = engines["twin"].take_stats().steps
    drafted, accepted = (sum(counts) for counts in zip(*(step.by_model for step in steps), strict=True))
    assert drafted > 100 and accepted > 0.95 * drafted
    assert len(steps) < 20, "of 40 tokens"


def test_a_drafter_uses_newly_loaded_weights(engines: dict[str, Any]) -> None:
    """Its keys and values of the old ones are dropped. Weights that do not fit cost the drafter and no token."""
    asked, drafter = requests(8, temperature=0.7, seed=6), engines["model"].drafter
    weights, model = weights_of(FILES["A"]), drafter.source
    before = {name: parameter.detach().numpy().copy() for name, parameter in model.module.named_parameters()}
    try:
        engines["model"].take_stats()
        assert_same(answer(engines["model"], asked), answer(engines["off"], asked))
        engines["model"].update_drafts(DraftNews({}, (), weights))
        asked = [replace(one, seed=one.seed + 1) for one in asked]
        engines["model"].take_stats()
        assert_same(answer(engines["model"], asked), answer(engines["off"], asked))
        drafted, accepted = (sum(counts) for counts in zip(*(step.by_model for step in engines["model"].take_stats().steps), strict=True))
        assert drafted > 100 and accepted > 0.95 * drafted, "they are the policy's"
        engines["model"].update_drafts(DraftNews({}, (), {"other": np.zeros(1)}))
        assert drafter.source is None
        assert_same(answer(engines["model"], asked), answer(engines["off"], asked))
    finally:
        drafter.source = model
        model.load(before)


def test_drafts_change_no_token_after_new_weights_and_a_time_without_a_lease(engines: dict[str, Any]) -> None:
    """Texts and the drafter's weights are then of an older policy, and the engine's cache is new."""
    asked = at_several_temperatures(requests(12, seed=9))
    kinds = ("off", "twin", "head", "auto")
    first = {kind: answer(engines[kind], asked) for kind in kinds}
    try:
        for name in "BA":
            version = next(VERSIONS)
            for kind in kinds:
                engines[kind].park()
                engines[kind].unpark()
                engines[kind].load(version, weights_of(FILES[name]))
                engines[kind].take_stats()
            wanted = answer(engines["off"], asked)
            for kind in kinds[1:]:
                assert_same(answer(engines[kind], asked), wanted)
            assert sum(step.drafted for step in engines["twin"].take_stats().steps) > 100
            assert (wanted[0].token_ids.tolist() == first["off"][0].token_ids.tolist()) == (name == "A")
    finally:
        version = next(VERSIONS)
        for kind in kinds:
            engines[kind].load(version, weights_of(FILES["A"]))


def test_a_failing_drafter_changes_no_token(engines: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    asked, drafter = requests(8, temperature=0.7, seed=4), engines["model"].drafter
    model = drafter.source
    drafter.source = type("Broken", (), {"__getattr__": lambda self, name: getattr(model, name), "propose": lambda self, *_: 1 / 0})()
    try:
        assert_same(answer(engines["model"], asked), answer(engines["off"], asked))
        assert drafter.source is None and "the drafter failed" in capfd.readouterr().err
    finally:
        drafter.source = model


def test_a_drafter_that_overflows_or_lacks_padding_of_the_vocabulary_drafts_on(engines: dict[str, Any]) -> None:
    """On GPU an index that there is not would end the process, and with it the engine."""
    from rlhfless_ray.engine.model_drafts import Ask

    asked, drafter = requests(8, temperature=0.7, seed=7), engines["model"].drafter
    model = drafter.source
    before = {name: parameter.detach().numpy().copy() for name, parameter in model.module.named_parameters()}
    try:
        model.load({name: np.full_like(array, np.nan) for name, array in before.items()})
        assert_same(answer(engines["model"], asked), answer(engines["off"], asked))
        assert drafter.source is model
    finally:
        model.load(before)
    [draft] = model.propose([Ask(-1, np.array([1, 10**6, 2]), np.array([0.5]), 1, 1.0, (1.0, 0))], 1)
    assert len(draft.tokens) == 1


def test_an_engine_drafts_from_texts_of_other_engines(engines: dict[str, Any]) -> None:
    """Of siblings on other engines, in pieces, and of earlier steps."""
    asked = requests(8, temperature=0.0, seed=5)
    wanted = answer(engines["off"], asked)
    texts = tuple((100 + key, one.token_ids) for key, one in wanted.items())
    for part in (slice(0, 5), slice(5, None)):
        engines["on"].update_drafts(DraftNews({}, tuple((name, tokens[part]) for name, tokens in texts)))
    engines["on"].take_stats()
    assert_same(answer(engines["on"], asked), wanted)
    steps = engines["on"].take_stats().steps
    assert sum(step.accepted for step in steps) > 0.6 * sum(len(one.token_ids) for one in wanted.values())


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**16), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([1.0, 0.8]), st.sampled_from([0, 5]), st.booleans())
def test_drafts_and_cuts_change_no_token(
    engines: dict[str, Any], seed: int, temperature: float, top_p: float, top_k: int, stops: bool
) -> None:
    """A cut response goes on in an engine with other drafts, from text, from siblings and from a model."""
    rng = np.random.default_rng(seed)
    asked = [replace(one, top_p=top_p, top_k=top_k) for one in requests(6, temperature, seed=seed, longest=24)]
    if stops:
        plain = answer(engines["off"], asked)
        asked = [replace(one, stop=(f"{plain[one.key].token_ids[-1]};",), min_tokens=3) for one in asked]
    wanted = answer(engines["off"], asked)
    rest = []
    for one in asked:
        response = tuple(wanted[one.key].token_ids.tolist())
        rest.append(replace(one, generated=response[: int(rng.integers(0, len(response)))]))
    for kind in ("model", "head", "auto"):
        engines[kind].update_drafts(
            DraftNews({}, tuple((seed * 10 + key, one.token_ids[: rng.integers(1, 24)]) for key, one in wanted.items()))
        )
        found = _tokens(engines[kind], rest)
        for one in rest:
            assert [*one.generated, *found[one.key]] == wanted[one.key].token_ids.tolist()


def _tokens(engine: Any, asked: list[Any]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {one.key: [] for one in asked}
    for news in engine.generate(asked):
        for key, begin, end in zip(news.keys.tolist(), news.bounds, news.bounds[1:], strict=False):
            found[key] += news.token_ids[begin:end].tolist()
    return found


def test_drafts_change_no_end_by_stop_word_or_length(engines: dict[str, Any]) -> None:
    """A step that accepts drafts may run over a stop word, over the end of the sequence and over the longest response."""
    plain = answer(engines["off"], requests(temperature=0.0))
    asked = []
    for one in requests(temperature=0.0):
        response = plain[one.key].token_ids
        word = f"{response[len(response) // 2]};" if one.key % 2 else ""
        asked.append(replace(one, stop=(word,) if word else (), min_tokens=5 if one.key % 3 else 0, max_tokens=20 + one.key % 7))
    wanted = answer(engines["off"], asked)
    for _ in range(2):
        assert_same(answer(engines["on"], asked), wanted)
    ends = {one.finish_reason for one in wanted.values()}
    assert {"stop", "length"} <= ends
    assert len({len(one.token_ids) for one in wanted.values()}) > 5
    assert np.mean([step.accepted for step in engines["on"].take_stats().steps]) > 1


def test_steps_without_drafts_take_the_way_of_an_engine_without_them(engines: dict[str, Any]) -> None:
    """vLLM replays a whole CUDA graph in a uniform step. There are no graphs on CPU. After a step it asks all members for drafts."""
    for kind in ("off", "auto"):
        core = engines[kind].core
        runner = core.model_executor.driver_worker.model_runner
        assert runner.cudagraph_dispatcher.uniform_decode_query_len == runner.uniform_decode_query_len
        assert runner._is_uniform_decode(1, runner.uniform_decode_query_len, 4, 4)
        assert not core.check_for_draft_tokens


def test_vllm_does_not_take_a_drafter_for_its_own(engines: dict[str, Any]) -> None:
    """On GPU it would save the buffers of what it takes for the drafter's module when it parks."""
    for kind in ("model", "head", "on"):
        assert engines[kind].core.model_executor.driver_worker.model_runner.get_draft_model() is None


def test_text_drafts_come_from_the_newest_responses() -> None:
    from rlhfless_ray.engine.text_drafts import TextSource

    source = TextSource(kept_tokens=100)
    text = np.arange(10, 70, dtype=np.int32)

    def draft(name: str, tokens: np.ndarray) -> list[int]:
        found = source.propose([name], [2], tokens[None], np.array([0]), np.array([len(tokens)]), [8])
        source.forget_all_but([name])
        return found.tokens[0]

    prompt = np.array([1, 2], np.int32)
    assert draft("first", np.concatenate([prompt, text])) == []
    assert draft("second", np.concatenate([prompt + 2, text[:8]])) == text[8:16].tolist()
    assert source.total == 2 + 60 + 2 + 8
    assert draft("third", np.concatenate([prompt + 4, text + 100])) == [] and source.total == 2 + 8 + 2 + 60
    assert draft("fourth", np.concatenate([prompt + 6, text[20:28]])) == [], "the first response is forgotten"
    assert draft("fourth", np.concatenate([prompt + 6, text[20:29]])) == [] and source.known == {"fourth": 8}, "few tokens wait"
    assert draft("fifth", prompt) == []
    assert draft("fourth", np.concatenate([prompt + 6, text[20:30]])) == [] and source.texts["fourth"][1] == 10, "one that was preempted"
    source.finish("fourth", text[20:34])
    assert source.texts["fourth"][1] == 14 and source.known == {}
    text.setflags(write=False)  # as what comes through Ray
    source.finish("sixth", text[:8])
    assert draft("seventh", np.concatenate([prompt + 6, text[:4]])) == text[4:8].tolist(), "from one that was never looked up"
