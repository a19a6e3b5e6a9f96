"""Built-in tasks against brute force, their tokenizer against the text."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prompts.builtin_tasks import SWAP_CHANCE, task
from rlhfless_ray.prompts.task_tokenizer import TaskTokenizer, build_tokenizer

NAMES = ["chain", "sort"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_a_prefix_of_more_rows_and_follow_from_the_seed(name: str) -> None:
    rows = task(name).rows(50, 7, "train")
    assert rows == task(name).rows(200, 7, "train")[:50]
    assert rows != task(name).rows(50, 8, "train")


@pytest.mark.parametrize("name", NAMES)
def test_no_prompt_is_in_both_splits_whatever_the_seeds(name: str) -> None:
    train = {row["prompt"] for seed in range(4) for row in task(name).rows(2000, seed, "train")}
    heldout = {row["prompt"] for seed in range(4) for row in task(name).rows(1000, seed, "heldout")}
    assert heldout and not train & heldout


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_heavy_tailed(name: str) -> None:
    counts = np.array([row["operands" if name == "chain" else "letters"] for row in task(name).rows(3000, 0, "train")])
    assert counts.min() == 2 and counts.max() <= 24
    assert 4 <= np.median(counts) <= 6
    assert np.percentile(counts, 99) >= 3 * np.median(counts)


def test_chain_answers_equal_the_sum_read_off_the_prompt() -> None:
    for row in task("chain").rows(500, 1, "train"):
        assert re.fullmatch(r"\d([A-X][1-3]){2,24}=", row["prompt"])
        assert row["answer"] == str(sum(map(int, re.findall(r"\d", row["prompt"]))) % 10)


def test_chain_examples_in_full_are_right_at_every_step_and_hasty_ones_pass_over_every_second_key() -> None:
    chain, rng = task("chain"), np.random.default_rng(0)
    seen = set()
    for row in chain.rows(2000, 2, "train"):
        response = chain.example(row, rng)
        looks, _, answer = response.partition("#")
        assert len(response) + 1 <= chain.max_response_tokens
        if not looks:
            seen.add("bare")
            assert answer == row["answer"]
            continue
        assert len(set(looks.split(";"))) == 1
        look = looks.split(";")[0]
        added = dict(re.findall(r"([A-X])(\d)", row["prompt"]))
        total, keys = int(row["prompt"][0]), look[0::2]
        for key, digit in zip(keys, look[1::2], strict=True):
            total = (total + int(added[key.upper()])) % 10
            assert digit == str(total)
        assert answer == str(total)
        every = "".join(added).lower()
        assert keys in (every, every[::2])
        seen.add("full" if keys == every else "hasty")
        seen.add("again" if ";" in looks else "once")
        if keys == every:
            assert chain.verify(response, row) == 1.0
    assert seen == {"bare", "full", "hasty", "again", "once"}


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("#3", 1.0),
        ("a8b9c1d3#3", 1.0),
        ("a8b9c1d3;a8#3", 1.0),
        ("zzz#3", 1.0),
        ("#4", 0.0),
        ("3", 0.0),
        ("", 0.0),
        ("#", 0.0),
        ("#33", 0.0),
        ("#3 ", 0.0),
        ("#4#3", 0.0),
        ("#3#3", 0.0),
        ("#3a", 0.0),
        ("a8b9#", 0.0),
    ],
)
def test_chain_verifies_exactly(response: str, reward: float) -> None:
    assert task("chain").verify(response, {"prompt": "5A3B1C2D2=", "answer": "3", "operands": 4}) == reward


def test_sort_answers_and_verifies_exactly() -> None:
    sort = task("sort")
    for row in sort.rows(300, 1, "train"):
        letters = row["prompt"].removesuffix("=")
        assert sorted(letters) == list(row["answer"])
        assert sort.verify(row["answer"], row) == 1.0
        assert sort.verify(row["answer"][:-1], row) == sort.verify(row["answer"] + "a", row) == sort.verify("", row) == 0.0


def test_supervised_responses_to_sort_slip_as_often_as_they_say() -> None:
    sort, rng = task("sort"), np.random.default_rng(0)
    rows = [row for row in sort.rows(2000, 1, "train") if len(set(row["answer"])) == row["letters"]]  # a slip shows in each
    told = [sort.example(row, rng) for row in rows]
    assert all(sorted(text) == list(row["answer"]) for text, row in zip(told, rows, strict=True))
    apart = [sum(a != b for a, b in zip(text, row["answer"], strict=True)) for text, row in zip(told, rows, strict=True)]
    assert set(apart) == {0, 2} and np.mean(apart) / 2 == pytest.approx(SWAP_CHANCE, abs=0.04) and len(rows) > 800


def test_unknown_task_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="no built-in task is called `chains`; the known ones are chain, noise_pictures, pictures, sort"):
        task("chains")


@pytest.mark.parametrize("name", NAMES)
def test_tokenizer_round_trips_exactly(name: str) -> None:
    built_in, rng = task(name), np.random.default_rng(0)
    tokenizer = build_tokenizer(built_in)
    for row in built_in.rows(300, 3, "train"):
        for text in (row["prompt"], built_in.example(row, rng)):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text
            assert "".join(tokenizer.convert_ids_to_tokens(ids)) == text
            assert all(token in built_in.symbols for token in tokenizer.convert_ids_to_tokens(ids))


def test_an_operand_is_one_token_and_a_written_sum_two() -> None:
    tokenizer = build_tokenizer(task("chain"))
    assert tokenizer.tokenize("5A3B1=") == ["5", "A3", "B1", "="]
    assert tokenizer.tokenize("a8b9#9") == ["a", "8", "b", "9", "#", "9"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)


HEAVY = {name: build_tokenizer(task(name)) for name in NAMES}


@given(st.sampled_from(NAMES), st.data())
def test_the_driver_s_tokenizer_does_what_the_library_s_does(name: str, data: st.DataObject) -> None:
    """Over the task's symbols, the special tokens and text that it has no tokens for."""
    light, heavy = TaskTokenizer(task(name)), HEAVY[name]
    pieces = st.sampled_from([*task(name).symbols, "<eos>", "<pad>", "A", "Z9", "é", " ", "\n", "?", "<"])
    texts = data.draw(st.lists(st.lists(pieces, max_size=12).map("".join), max_size=4))
    for text in texts:
        assert light(text)["input_ids"] == heavy(text, add_special_tokens=False)["input_ids"]
    assert not texts or light(texts)["input_ids"] == heavy(texts, add_special_tokens=False)["input_ids"]
    ids = data.draw(st.lists(st.integers(0, len(heavy) - 1), max_size=20))
    for skip in (False, True):
        assert light.decode(ids, skip_special_tokens=skip) == heavy.decode(ids, skip_special_tokens=skip)
        arrays = [np.array(ids, np.int32)]
        assert light.batch_decode(arrays, skip_special_tokens=skip) == heavy.batch_decode(arrays, skip_special_tokens=skip)
    assert light.get_vocab() == heavy.get_vocab()
    names = ("eos_token_id", "pad_token_id", "bos_token_id", "chat_template")
    assert [getattr(light, n) for n in names] == [getattr(heavy, n) for n in names]
