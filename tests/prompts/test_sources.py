"""Data sets in all their forms, several at once, evaluation sets, templates, and rows that are too long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prompts.load_prompts import PromptSet, load_prompts
from rlhfless_ray.prompts.sources import read_sources
from rlhfless_ray.recipe import Recipe
from tests.prompts.test_load import CHAT, letters

BUILDER = """
import datasets

class Made(datasets.GeneratorBasedBuilder):
    def _info(self):
        return datasets.DatasetInfo(features=datasets.Features({"question": datasets.Value("string"), "answer": datasets.Value("string")}))

    def _split_generators(self, dl_manager):
        return [datasets.SplitGenerator(name=name, gen_kwargs={"name": name}) for name in ("train", "test")]

    def _generate_examples(self, name):
        for i in range(4):
            yield i, {"question": f"{name} {i}", "answer": str(i)}
"""


def rows(word: str, count: int = 6, **more: Any) -> list[dict[str, Any]]:
    return [{"question": f"{word} {i}", "answer": str(i), **more} for i in range(count)]


def jsonl(file: Path, content: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(file)


def loaded(prompts: dict[str, Any], tokenizer: Any = None, **sections: dict[str, Any]) -> PromptSet:
    tree = {
        "policy": {"path": "model"},
        "prompts": {"batch_prompts": 2, **prompts},
        "evaluate": {"prompts": 0, **sections.pop("evaluate", {})},
        "rollout": {"max_tokens": 16, **sections.pop("rollout", {})},
        "reward": {"function": "math"},
        **sections,
    }
    return load_prompts(Recipe.parse(tree), tokenizer or letters())


def texts(found: PromptSet) -> list[str]:
    return [prompt.text for prompt in found.train]


def test_arrow_files_in_both_formats(tmp_path: Path) -> None:
    import pyarrow

    table = pyarrow.Table.from_pylist(rows("a"))
    for kind in (pyarrow.ipc.new_stream, pyarrow.ipc.new_file):
        with kind(str(tmp_path / "a.arrow"), table.schema) as writer:
            writer.write_table(table)
        assert texts(loaded({"path": str(tmp_path / "a.arrow")})) == [f"a {i}" for i in range(6)]
    (tmp_path / "a.arrow").write_text("nothing")
    with pytest.raises(UserError, match="not a readable Arrow file"):
        loaded({"path": str(tmp_path / "a.arrow")})


def test_a_column_of_sounds_or_damaged_images_is_not_decoded(tmp_path: Path) -> None:
    cells = [{"bytes": b"damaged", "path": None}] * 6
    for kind in (datasets.Image(), datasets.Audio()):
        data = datasets.Dataset.from_list([{**row, "medium": cell} for row, cell in zip(rows("a"), cells, strict=True)])
        data = data.cast_column("medium", kind)
        data.select([2, 0, 1]).save_to_disk(tmp_path / type(kind).__name__)
        found = loaded({"path": str(tmp_path / type(kind).__name__)})
        assert texts(found) == ["a 2", "a 0", "a 1"] and found.train[0].row["medium"] == cells[0]


def test_a_folder_of_files_and_a_folder_in_it(tmp_path: Path) -> None:
    for name in ("part", "other"):
        (tmp_path / "data" / name).mkdir(parents=True)
        jsonl(tmp_path / "data" / name / "train.jsonl", rows(name))
        jsonl(tmp_path / "data" / name / "test.jsonl", rows(f"{name} test"))
    folder = str(tmp_path / "data")
    assert texts(loaded({"paths": [f"{folder}@part"]})) == [f"part {i}" for i in range(6)]
    assert texts(loaded({"paths": [f"{folder}@part"], "split": "test"})) == [f"part test {i}" for i in range(6)]
    with pytest.raises(UserError, match="has no folder `parts`"):
        loaded({"paths": [f"{folder}@parts"]})


def test_a_python_file_with_a_builder(tmp_path: Path) -> None:
    file = tmp_path / "made.py"
    file.write_text(BUILDER)
    assert texts(loaded({"path": str(file), "split": "test"})) == [f"test {i}" for i in range(4)]
    file.write_text("rows = 1")
    with pytest.raises(UserError, match="one `datasets` builder class in the file, found 0"):
        loaded({"path": str(file)})
    file.write_text("raise RuntimeError('no')")
    with pytest.raises(UserError, match="running the file failed: RuntimeError: no"):
        loaded({"path": str(file)})


def test_a_name_that_is_nowhere_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **more: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match="hub does not give a data set of that name \\(no network\\)"):
        loaded({"path": "org/name"})
    with pytest.raises(UserError, match="no such file"):
        loaded({"path": "org/name.jsonl"})


def test_a_file_has_no_splits(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompts.split: .* it has no split `test`; set it to train"):
        loaded({"path": jsonl(tmp_path / "a.jsonl", rows("a")), "split": "test"})


def test_several_one_after_the_other_and_capped_each_and_together(tmp_path: Path) -> None:
    paths = [jsonl(tmp_path / f"{word}.jsonl", rows(word)) for word in "ab"]
    assert texts(loaded({"paths": paths})) == [*(f"a {i}" for i in range(6)), *(f"b {i}" for i in range(6))]
    assert texts(loaded({"paths": paths, "max_rows": 4})) == [f"a {i}" for i in range(4)]
    with pytest.raises(UserError, match=r"line 3 of .*b.jsonl: no column `question`"):
        jsonl(tmp_path / "b.jsonl", [{"question": "x", "answer": "y"}] * 2 + [{"answer": "y"}])
        loaded({"paths": paths})


def test_a_comma_too_many_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompts.path: the name of a data set is empty"):
        loaded({"paths": [jsonl(tmp_path / "a.jsonl", rows("a")), ""]})


def test_a_mix_is_the_one_of_interleave_datasets(tmp_path: Path) -> None:
    content = {"a": rows("a", 5), "b": rows("b", 9)}
    paths = [jsonl(tmp_path / f"{word}.jsonl", content[word]) for word in "ab"]
    expected = datasets.interleave_datasets(
        [datasets.Dataset.from_list(part) for part in content.values()], probabilities=[0.7, 0.3], seed=3, stopping_strategy="all_exhausted"
    )
    found = [row for _, row in read_sources(paths, "train", "prompts", probabilities=[0.7, 0.3], seed=3)]
    assert found == list(expected)
    assert {row["question"] for row in found} == {row["question"] for part in content.values() for row in part}  # none is lost
    assert len(read_sources(paths, "train", "prompts", probabilities=[0.7, 0.3], seed=-3)) >= 14  # any seed is one
    for wrong, said in [([0.5], "1 numbers for 2 data sets"), ([0.5, 0.6], "add up to 1"), ([0.0, 1.0], "must be positive")]:
        with pytest.raises(UserError, match=said):
            loaded({"paths": paths, "probabilities": wrong})


def test_a_file_of_which_most_rows_are_held_out_says_so(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows("a", 6))
    assert loaded({"path": path}, evaluate={"prompts": 3}).notes == ()
    assert loaded({"path": path}, evaluate={"prompts": 4}).notes[0].startswith("4 of 6 rows are held out of training (evaluate.prompts);")


def test_a_mix_trains_on_no_held_out_row(tmp_path: Path) -> None:
    paths = [jsonl(tmp_path / f"{word}.jsonl", rows(word, count)) for word, count in (("a", 3), ("b", 60))]
    found = loaded({"paths": paths, "probabilities": [0.5, 0.5], "batch_prompts": 2}, evaluate={"prompts": 2})
    held = [prompt.text for prompt in found.heldout]
    assert any(text.startswith("a") for text in held), "of the smaller data set, which repeats"
    assert not {*held} & {*texts(found)}
    assert [p.index for p in [*found.train, *found.heldout]] == list(range(len(found.train) + 2))
    assert "repetitions of held-out rows (evaluate.prompts) in the mix are left out of training" in found.notes[0]


def test_an_evaluation_set_leaves_every_row_for_training(tmp_path: Path) -> None:
    train, held = jsonl(tmp_path / "t.jsonl", rows("t")), jsonl(tmp_path / "e.jsonl", rows("e", 3))
    more = jsonl(tmp_path / "f.jsonl", rows("f", 2))
    found = loaded({"path": train, "max_rows": 4}, evaluate={"path": f"{held},{more}", "prompts": 1})
    assert [p.text for p in found.heldout] == ["e 0", "e 1", "e 2", "f 0"]
    assert len(found.train) == 4 and [p.index for p in found.heldout] == [4, 5, 6, 7]
    assert loaded({"path": train}, evaluate={"path": held, "prompts": 0}).heldout == []


def test_an_input_template_goes_around_the_prompt(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"question": "{x}", "answer": ""}] * 2)
    assert texts(loaded({"path": path, "input_template": "User: {} {{ok}}"})) == ["User: {x} {ok}"] * 2
    for wrong in ("no gap", "{} {}", "{name}", "{"):
        with pytest.raises(UserError, match=r"one {} where the prompt goes"):
            loaded({"path": path, "input_template": wrong})
    with pytest.raises(UserError, match="the chat template replaces it"):
        loaded({"path": path, "input_template": "{}", "template": "chat"})


def test_a_list_of_turns_is_taken_as_it_is(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = jsonl(tmp_path / "a.jsonl", [{"question": turns, "answer": ""}, {"question": "plain", "answer": ""}])
    tokenizer = letters(chat=CHAT)
    assert texts(loaded({"path": path, "template": "chat"}, tokenizer)) == ["[system]s[user]u[assistant]", "[user]plain[assistant]"]
    assert loaded({"path": path, "template": "chat"}, tokenizer).notes == ()
    answered = jsonl(tmp_path / "b.jsonl", [{"question": [*turns, {"role": "assistant", "content": "a"}], "answer": ""}] * 2)
    (note,) = loaded({"paths": [path, answered], "template": "chat"}, tokenizer).notes
    assert note.startswith("2 of 4 prompts end with a turn of the assistant (first line 1 of ") and "writes another one after it;" in note
    with pytest.raises(UserError, match="a system turn of its own"):
        loaded({"path": path, "template": "chat", "system": "again"}, tokenizer)
    with pytest.raises(UserError, match=r"is a list of turns, which only a chat template renders; set prompts.template=chat"):
        loaded({"path": path})


def test_what_a_tokenizer_puts_first_can_be_left_away(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows("a"))
    with_it, without = (loaded({"path": path, "add_bos": on}, letters(bos=True)).train[0].token_ids for on in (True, False))
    assert with_it == (0, *without)


def test_long_prompts_end_the_run_or_are_left_out_and_told(tmp_path: Path) -> None:
    long = {"question": "x" * 9, "answer": ""}
    path = jsonl(tmp_path / "a.jsonl", [*rows("a", 2), long, *rows("b", 2)])
    with pytest.raises(UserError, match=r"line 3: the prompt has 9 tokens.*prompts.overlong=leave_out"):
        loaded({"path": path, "max_prompt_tokens": 8})
    found = loaded({"path": path, "max_prompt_tokens": 8, "overlong": "leave_out"})
    assert texts(found) == ["a 0", "a 1", "b 0", "b 1"] and [p.index for p in found.train] == [0, 1, 2, 3]
    assert found.notes == ("1 prompts of more than 8 tokens (prompts.max_prompt_tokens) are left out: line 3",)
    with pytest.raises(UserError, match=r"4 rows \(1 are too long and left out\) are too few for 5"):
        loaded({"path": path, "max_prompt_tokens": 8, "overlong": "leave_out", "batch_prompts": 5})


def test_long_prompts_can_lose_their_first_tokens(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [*rows("a", 2), {"question": "abcdefghij", "answer": ""}])
    found = loaded({"path": path, "max_prompt_tokens": 8, "overlong": "cut_left"})
    whole = loaded({"path": path, "max_prompt_tokens": 10})
    assert [len(p.token_ids) for p in found.train] == [3, 3, 8] and [p.cut_tokens for p in found.train] == [0, 0, 2]
    assert found.train[2].token_ids == whole.train[2].token_ids[2:] and found.train[2].text == "abcdefghij"
    assert found.notes == ("1 prompts of more than 8 tokens (prompts.max_prompt_tokens) are cut from the left: line 3",) and not whole.notes


def test_a_total_length_leaves_what_the_prompt_does_not_take(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows("a"))
    rollout = {"max_tokens": 16, "max_total_tokens": 9}
    recipe = Recipe.parse({"policy": {"path": "m"}, "prompts": {"path": path}, "rollout": rollout, "reward": {"function": "math"}})
    assert [recipe.rollout.response_tokens(n) for n in (1, 3, 8)] == [8, 6, 1] and recipe.rollout.longest_tokens(5) == 9
    assert loaded({"path": path}, rollout=rollout).train[0].token_ids
    with pytest.raises(UserError, match=r"3 prompt tokens leave no room for a response within rollout.max_total_tokens = 3"):
        loaded({"path": path}, rollout={"max_tokens": 16, "max_total_tokens": 3})


def test_episodes_take_any_number_of_rows(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows("a", 3))
    assert len(loaded({"path": path, "batch_prompts": 8}, run={"episodes": 1}).train) == 3
    with pytest.raises(UserError, match="3 rows are too few for 8"):
        loaded({"path": path, "batch_prompts": 8})
