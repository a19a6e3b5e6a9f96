"""Engines that draft tokens say what engines say that do not: tokens, log-probabilities and ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from asking import FILES, VERSIONS, answer, assert_same, requests, weights_of

from rlhfless_ray.rollout.stop_strings import StopStrings

pytestmark = pytest.mark.engine


class Words:
    """A tokenizer whose token 7 reads `7;`, and so on."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(f"{token};" for token in tokens)


@pytest.fixture(scope="module")
def engines(new_engine: Callable[..., Any]) -> dict[str, Any]:
    made = {kind: new_engine(FILES["A"], speculation=kind) for kind in ("off", "on", "auto")}
    version = next(VERSIONS)
    for engine in made.values():
        engine.load(version, weights_of(FILES["A"]))
        engine.words = StopStrings(Words)
    return made


@pytest.mark.parametrize("kind", ["on", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_change_nothing_but_the_number_of_steps(engines: dict[str, Any], kind: str, temperature: float) -> None:
    """Asked twice: the second time the source knows what the first responses said, which other seeds repeat in part only."""
    steps = {}
    for seed in (0, 5):
        asked = [replace(one, seed=one.seed + seed, top_p=0.95 if one.key % 4 else 1.0) for one in requests(temperature=temperature)]
        found = {name: answer(engines[name], asked) for name in ("off", kind)}
        assert_same(found[kind], found["off"])
        steps = {name: engines[name].take_steps() for name in ("off", kind)}
    assert not sum(step.drafted for step in steps["off"])
    assert sum(step.accepted for step in steps[kind]) > (100 if temperature == 0 else 0)
    assert len(steps[kind]) < len(steps["off"]) if temperature == 0 else len(steps[kind]) <= len(steps["off"])
    generated = sum(len(one.token_ids) for one in found["off"].values())
    drawn = sum(step.running + step.accepted for step in steps[kind])
    assert drawn >= generated, "tokens drawn after a response's end do not count"


def test_stop_words_and_least_lengths_end_responses_where_they_would_end(engines: dict[str, Any]) -> None:
    """A step that accepts drafts may run over a stop word, over the end of the sequence and over the longest response."""
    plain = answer(engines["off"], requests(temperature=0.0))
    asked = []
    for one in requests(temperature=0.0):
        said = plain[one.key].token_ids
        word = f"{said[len(said) // 2]};" if one.key % 2 else ""
        asked.append(replace(one, stop=(word,) if word else (), min_tokens=5 if one.key % 3 else 0, max_tokens=20 + one.key % 7))
    wanted = answer(engines["off"], asked)
    for _ in range(2):
        assert_same(answer(engines["on"], asked), wanted)
    ends = {one.finish_reason for one in wanted.values()}
    assert {"stop", "length"} <= ends
    assert len({len(one.token_ids) for one in wanted.values()}) > 5
    assert np.mean([step.accepted for step in engines["on"].take_steps()]) > 1


def test_drafts_come_from_other_responses_until_newer_ones_take_their_place() -> None:
    from rlhfless_ray.rollout.text_drafts import TextSource

    source = TextSource(kept_tokens=100)
    text = np.arange(10, 70, dtype=np.int32)

    def draft(name: str, tokens: np.ndarray) -> list[int]:
        found = source.propose(name, 2, tokens, 8).tokens
        source.forget_all_but([name])
        return found

    prompt = np.array([1, 2], np.int32)
    assert draft("first", np.concatenate([prompt, text])) == []
    assert draft("second", np.concatenate([prompt + 2, text[:8]])) == text[8:16].tolist()
    assert source.total == 2 + 60 + 2 + 8
    assert draft("third", np.concatenate([prompt + 4, text + 100])) == [] and source.total == 2 + 8 + 2 + 60
    assert draft("fourth", np.concatenate([prompt + 6, text[20:28]])) == [], "the first response is forgotten"
    assert draft("fourth", np.concatenate([prompt + 6, text[20:29]])) == [] and source.known == {"fourth": 8}, "few tokens wait"
    assert draft("fifth", prompt) == [3], "from the prompts"
    assert draft("fourth", np.concatenate([prompt + 6, text[20:30]])) == [] and source.texts["fourth"][1] == 10, "one that was preempted"
    source.finish("fourth", text[20:34])
    assert source.texts["fourth"][1] == 14 and source.known == {}
    source.finish("sixth", text[:8])
    assert draft("seventh", np.concatenate([prompt + 6, text[:4]])) == text[4:8].tolist(), "from one that was never looked up"
