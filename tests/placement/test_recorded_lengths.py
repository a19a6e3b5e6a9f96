"""Recorded lengths: every format that is read, and every malformed entry named in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from placement.forecast.recorded_lengths import read_lengths


@pytest.mark.parametrize(
    ("name", "text", "tokens", "prompts"),
    [
        ("a.json", "[3, 4, 5.5]", [3, 4, 5.5], 3),
        ("a.json", "[[3, 4], [5]]", [3, 4, 5], 2),
        ("a.json", '[{"prompt_tokens": 9, "response_tokens": [3, 4]}]', [3, 4], 1),
        ("a.jsonl", "3\n\n[4, 5]\n", [3, 4, 5], 2),
        ("a.jsonl", '{"prompt_index": 7, "tokens": 3}\n{"prompt_index": 7, "tokens": 4}\n{"prompt_index": 8, "tokens": 5}\n', [3, 4, 5], 2),
        ("a.jsonl", '{"prompt": "a\u2028b", "tokens": 3}\r\n{"prompt": "a\u0085b", "tokens": 4}\r\n', [3, 4], 2),
        ("a.csv", "3\n4\n5\n", [3, 4, 5], 3),
        ("a.csv", "\ufeffanything\n3\n4\n", [3, 4], 2),
        ("a.csv", "prompt_tokens,response_tokens\n9,3\n9,4\n", [3, 4], 2),
        ("a.csv", "prompt,x,tokens\np,1,3\nq,1,4\np,1,5\n", [3, 4, 5], 2),
    ],
)
def test_formats(tmp_path: Path, name: str, text: str, tokens: list[float], prompts: int) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = read_lengths(path)
    np.testing.assert_array_equal(found.tokens, tokens)
    assert found.group.max() + 1 == prompts


def test_a_run_folder_gives_its_last_step(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for step, tokens in ((2, 10), (10, 20), (9, 30)):
        rows = [{"step": step, "prompt_index": i // 2, "prompt": "p", "response": "r", "tokens": tokens + i} for i in range(4)]
        (tmp_path / "samples" / f"step_{step}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read_lengths(tmp_path)
    np.testing.assert_array_equal(found.tokens, [20, 21, 22, 23])
    np.testing.assert_array_equal(found.group, [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.csv", "response_tokens\n3\nabc\n", "line 3, column `response_tokens`: `abc` is not a number"),
        ("a.csv", "prompt_tokens,response_tokens\n9,3\nx,4\n", "line 3, column `prompt_tokens`: `x` is not a number"),
        ("a.csv", "prompt_tokens,response_tokens\n9,3\n9\n", "line 3: 1 columns, the header has 2"),
        ("a.csv", "a,b\n1,2\n", "no column is known to be the lengths among a, b; say which (`plan --column`"),
        ("a.csv", "tokens,length\n1,2\n", "several columns could be the lengths"),
        ("a.csv", "1,2\n3,4\n", "2 columns without a header"),
        ("a.csv", "response_tokens\n", "no lengths in it"),
        ("a.csv", "", "no lengths in it"),
        ("a.csv", "5\ninf\n", "line 2, column `1`: inf is not finite"),
        ("a.csv", "5\n0\n", "line 2, column `1`: 0 is below 1"),
        ("a.json", "[]", "no lengths in it"),
        ("a.json", "[[1, 2], [3, NaN]]", "entry 2, response 2: nan is not finite"),
        ("a.json", "[[1, 2], [3, -4]]", "entry 2, response 2: -4 is below 1"),
        ("a.json", "[1, null]", "entry 2: null is not a number"),
        ("a.json", "[1, true]", "entry 2: true is not a number"),
        ("a.json", '{"a": 1}', "a list of lengths is needed"),
        ("a.json", "[1, 2", "not JSON: line 1, column"),
        ("a.jsonl", '{"tokens": 4}\n{"tokens": "x"}\n', "line 2, column `tokens`: `x` is not a number"),
        ("a.jsonl", "{", "not JSON: line 1"),
        ("a.txt", "3", "read from .json, .jsonl and .csv"),
    ],
)
def test_malformed_lengths_are_named(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        read_lengths(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_row_without_the_column_of_the_others_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"response_tokens": 100}\n{"reward": 3}\n')
    with pytest.raises(ValueError, match="line 2: no column `response_tokens`"):
        read_lengths(path)
    path = tmp_path / "mixed.json"
    path.write_text('[{"answers": {"a": 3, "b": 4}}, {"other": {"a": 3}}]')
    with pytest.raises(ValueError, match="entry 2: no column `answers`"):
        read_lengths(path, "answers")
    path.write_text('[{"answers": {"a": 3, "b": 4}, "words": 3}, {"answers": {"a": 5}, "words": 1}]')
    assert read_lengths(path, "answers").tokens.tolist() == [3, 4, 5] and read_lengths(path, "answers").group.tolist() == [0, 0, 1]
    path.write_text("[3, 1e300]")
    with pytest.raises(ValueError, match="entry 2: 1e\\+300 is no number of tokens"):
        read_lengths(path)


@pytest.mark.usefixtures("short_csv_fields")
@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("a.json", "[" * 100_000, "line 1: lists in lists too deep"),
        ("a.jsonl", "3\n" + "[" * 100_000, "line 2: lists in lists too deep"),
        ("a.json", f"[{'9' * 5000}]", "too many digits"),
        ("a.json", f"[3, {'9' * 500}]", "entry 2: an integer beyond 1e\\+09 is no number of tokens"),
        ("a.json", "[{}]", "entry 1: the object is empty"),
        ("a.csv", 'tokens\n"3\n4\n', "line 3: not CSV .unexpected end of data"),
        ("a.csv", 'tokens,prompt\n3,"two\nlines"\nx,c\n', "line 4, column `tokens`: `x` is not a number"),
        ("a.csv", f"tokens\n{'9' * 200_000}\n", "line 2: not CSV .field larger than"),
    ],
)
def test_files_that_trip_the_parsers_are_one_sentence_too(tmp_path: Path, file: str, text: str, said: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        read_lengths(tmp_path / file)
    assert "\n" not in str(caught.value)
