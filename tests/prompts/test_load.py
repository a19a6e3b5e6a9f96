"""Prompts from files and tasks: what comes in comes out, and every mistake is one sentence that names its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.prompts.load_prompts import PromptSet, check_vocabulary, load_prompts
from rlhfless_ray.prompts.task_tokenizer import TaskTokenizer, build_tokenizer
from rlhfless_ray.recipe import Recipe

CHAT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def letters(bos: bool = False, eos: bool = False, chat: str | None = None) -> PreTrainedTokenizerFast:
    """One token per ASCII character; `bos` and `eos` are what the tokenizer adds when it is not told otherwise."""
    vocabulary = {"<bos>": 0, "<eos>": 1} | {chr(c): c - 30 for c in range(32, 127)}
    core = Tokenizer(models.WordLevel(vocabulary))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    if bos or eos:
        single = f"{'<bos> ' if bos else ''}$A{' <eos>' if eos else ''}"
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<bos>", 0), ("<eos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", chat_template=chat)


EXTRA = "columns that nothing reads: `extra` (10 of 10 rows, first line 1)"
ROWS = [{"question": f"What is {i}?", "answer": str(i), "extra": [i]} for i in range(10)]


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    file = folder / name
    if name.endswith((".jsonl", ".ndjson")):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name.endswith(".json"):
        file.write_text(json.dumps(rows, indent=1))
    elif name.endswith(".csv"):
        import csv

        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        import datasets

        data = datasets.Dataset.from_list(rows)
        _ = data.to_parquet(file) if name.endswith(".parquet") else data.save_to_disk(file)
    return file


def recipe(path: Path | str, **overrides: Any) -> Recipe:
    prompts = {"path": str(path), "batch_prompts": 2, **{k: v for k, v in overrides.items() if k not in ("held", "max_tokens")}}
    return Recipe.parse(
        {
            "policy": {"path": "model"},
            "prompts": prompts,
            "evaluate": {"prompts": overrides.get("held", 3)},
            "rollout": {"max_tokens": overrides.get("max_tokens", 16)},
            "reward": {"function": "math"},
        }
    )


def refused(recipe: Recipe, tokenizer: Any = None, context_tokens: int | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_prompts(recipe, tokenizer or letters(), context_tokens)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "folder"])
def test_every_format_gives_the_same_prompts(tmp_path: Path, name: str) -> None:
    found = load_prompts(recipe(write(tmp_path, name, ROWS)), letters())
    assert [p.row for p in found.train + found.heldout] == ROWS
    assert [p.index for p in found.train + found.heldout] == list(range(10))
    assert [p.text for p in found.heldout] == [row["question"] for row in ROWS[-3:]]
    assert found.train[4].token_ids == tuple(ord(c) - 30 for c in "What is 4?")
    assert all(type(token) is int for token in found.train[0].token_ids)


def test_csv_cells_are_strings_with_commas_and_line_breaks_kept(tmp_path: Path) -> None:
    rows = [{"question": "one,\ntwo", "answer": "1"}, *({"question": f"q{i}", "answer": ""} for i in range(5))]
    found = load_prompts(recipe(write(tmp_path, "rows.csv", rows), held=0, template="none"), chat_for_line_breaks())
    assert [p.row for p in found.train] == rows


def chat_for_line_breaks() -> PreTrainedTokenizerFast:
    tokenizer = letters()
    tokenizer.add_tokens(["\n"])
    return tokenizer


def test_json_lines_under_the_name_json_and_blank_lines_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text("\n\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    assert len(load_prompts(recipe(file), letters()).train) == 7


@pytest.mark.parametrize(("bos", "eos"), [(False, False), (True, False), (True, True), (False, True)])
def test_bos_comes_first_where_the_tokenizer_puts_it_and_eos_never_last(tmp_path: Path, bos: bool, eos: bool) -> None:
    found = load_prompts(recipe(write(tmp_path, "rows.jsonl", ROWS)), letters(bos, eos))
    expected = tuple(ord(c) - 30 for c in "What is 0?")
    assert found.train[0].token_ids == ((0, *expected) if bos else expected)


def test_chat_template_is_rendered_with_system_turn_and_nothing_added(tmp_path: Path) -> None:
    tokenizer = letters(bos=True, chat=CHAT)
    found = load_prompts(recipe(write(tmp_path, "rows.jsonl", ROWS), template="chat", system="Be brief."), tokenizer)
    assert found.train[1].text == "[system]Be brief.[user]What is 1?[assistant]"
    assert found.train[1].token_ids == tuple(ord(c) - 30 for c in found.train[1].text)


def test_built_in_task_keeps_held_out_rows_apart() -> None:
    settings = {"prompts": {"task": "chain", "rows": 100}, "evaluate": {"prompts": 40}, "reward": {"function": "task"}}
    tokenizer = build_tokenizer(task("chain"))
    found: PromptSet = load_prompts(Recipe.parse(settings), tokenizer, 512)
    assert (len(found.train), len(found.heldout)) == (100, 40)
    assert not {p.text for p in found.train} & {p.text for p in found.heldout}
    assert [p.index for p in found.train + found.heldout] == list(range(140))
    assert all(tokenizer.decode(p.token_ids) == p.text == p.row["prompt"] for p in found.train)
    settings["prompts"]["input_template"] = "Q: {}"
    with pytest.raises(UserError, match=r"^prompts.input_template: .* reads the symbols of prompts.task chain only, not all of 'Q: \d"):
        load_prompts(Recipe.parse(settings), TaskTokenizer(task("chain")), 512)


def changed(i: int, **cells: Any) -> list[dict[str, Any]]:
    return [{**row, **cells} if j == i else row for j, row in enumerate(ROWS)]


def test_turns_and_characters_that_no_model_reads_name_the_row(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}]
    for bad, says in [
        ([{"from": "human", "value": "a"}], "line 2: turn 1 has no `role`, only `from`, `value`; fix or remove the row"),
        ([*turns, {"role": "assistant", "content": None}], "line 2: turn 2 has no `content`; fix or remove the row"),
        ([{"role": "user", "content": [{"type": "image"}]}], "line 2: turn 1 has a part of type `image`, and only text is read; fix or"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "line 2: turn 1 has a list as `content`, which the chat template"),
        ("half \ud83d", "line 2: the text holds half of a surrogate pair, which is no character; fix or remove the row"),
    ]:
        rows = [{**ROWS[0], "question": turns}, {**ROWS[1], "question": bad}, *({**row, "question": turns} for row in ROWS[2:])]
        assert says in refused(recipe(write(tmp_path, "rows.jsonl", rows), template="chat"), letters(chat=CHAT))
    by_part = "{% for m in messages %}{{ m['role'] }}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"
    parts = [{**row, "question": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]} for row in ROWS]
    in_parts = recipe(write(tmp_path, "rows.jsonl", parts), template="chat")
    assert load_prompts(in_parts, letters(chat=by_part)).train[0].text == "usera"
    called = [*turns, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    called_rows = recipe(write(tmp_path, "rows.jsonl", [{**row, "question": called} for row in ROWS]), template="chat")
    assert "line 1: turn 2 has no `content`" in refused(called_rows, letters(chat=CHAT)), "the template would write None"
    assert load_prompts(called_rows, letters(chat=CHAT + "{# reads tool_calls #}")).train


def test_turns_that_the_chat_template_leaves_out_are_named(tmp_path: Path) -> None:
    plain = [{key: row[key] for key in ("question", "answer")} for row in ROWS]
    users = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }};{% endif %}{% endfor %}"
    file = write(tmp_path, "rows.jsonl", plain)
    note = "roles of turns of which no word is in the text that the chat template writes: `system` (10 of 10 rows, first line 1)"
    assert load_prompts(recipe(file, template="chat", system="Be brief."), letters(chat=users)).notes == (note,)
    assert not load_prompts(recipe(file, template="chat", system="a"), letters(chat=CHAT)).notes
    asked = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [{"name": "f"}]},
        {"role": "user", "content": "c"},
    ]
    rows = recipe(write(tmp_path, "rows.jsonl", [{**row, "question": asked} for row in plain]), template="chat")
    note = "keys of turns that the chat template does not read: `tool_calls` (10 of 10 rows, first line 1)"
    assert load_prompts(rows, letters(chat=CHAT)).notes == (note,)
    asked[1]["content"] = " "
    rows = recipe(write(tmp_path, "rows.jsonl", [{**row, "question": asked} for row in plain]), template="chat")
    assert "line 1: turn 2 has `tool_calls` only, and the chat template reads none" in refused(rows, letters(chat=CHAT))


def test_a_chat_template_gets_the_tools_of_a_row(tmp_path: Path) -> None:
    chat = CHAT + "{% for tool in tools or [] %}({{ tool['name'] }}){% endfor %}"
    asked = [{"role": "user", "content": "a"}]
    cells = [[{"name": "f"}], '[{"name": "f"}, {"name": "g"}]', None, *[[] for _ in ROWS[3:]]]
    rows = [{**row, "question": asked, "tools": cell} for row, cell in zip(ROWS, cells, strict=True)]
    file = write(tmp_path, "rows.jsonl", rows)
    found = load_prompts(recipe(file, template="chat"), letters(chat=chat)).train
    assert [prompt.text.partition("[assistant]")[2] for prompt in found[:4]] == ["(f)", "(f)(g)", "", ""]
    assert "line 1: the row has tools in column `tools`, and the chat template reads none; fix or remove the row, or set" in refused(
        recipe(file, template="chat"), letters(chat=CHAT)
    )
    assert load_prompts(recipe(file, template="chat", tools_column=""), letters(chat=CHAT)).train[0].text.endswith("[assistant]")
    keys = CHAT + "{% for tool in tools or [] %}({{ tool['parameters'] | list | join }}){% endfor %}"
    both = [{"name": "f", "parameters": {"a": "int"}}, {"name": "g", "parameters": {"b": "int"}}]
    table = write(tmp_path, "rows.parquet", [{**row, "question": asked, "tools": both} for row in ROWS])
    found = load_prompts(recipe(table, template="chat"), letters(chat=keys)).train
    assert found[0].text.endswith("(a)(b)"), "the table has a null in place of each parameter of the other tool"
    calls = [[{"name": "f", "arguments": {"a": 1}}], [{"name": "g", "arguments": {"b": 2}}]]
    turns = [[*asked, {"role": "assistant", "content": "", "tool_calls": call}, {"role": "tool", "content": "3"}] for call in calls]
    written = "{% for m in messages %}{% for c in m['tool_calls'] or [] %}{{ c['arguments'] | tojson }}{% endfor %}{% endfor %}"
    table = write(tmp_path, "rows.parquet", [{**row, "question": turns[i % 2]} for i, row in enumerate(ROWS)])
    found = load_prompts(recipe(table, template="chat"), letters(chat=written)).train
    assert [prompt.text for prompt in found[:2]] == ['{"a": 1}', '{"b": 2}']
    nulls = [{"name": "f", "parameters": {"a": None}}]
    turns = [*asked, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"a": None}}]}]
    both = "{% for tool in tools %}{{ tool['parameters'] | tojson }}{% endfor %}" + written
    for name, cell in (("rows.jsonl", nulls), ("rows.jsonl", json.dumps(nulls)), ("rows.parquet", json.dumps(nulls))):
        called = [*asked, {"role": "assistant", "content": "b"}] if name == "rows.parquet" else turns
        file = write(tmp_path, name, [{**row, "question": called, "tools": cell} for row in ROWS])
        found = load_prompts(recipe(file, template="chat"), letters(chat=both)).train
        assert found[0].text == '{"a": null}' * (1 if name == "rows.parquet" else 2), "JSON has no padding, so a null was written"
    for wrong, says in (("f,g", "line 1: column `tools` is not JSON"), (["f"], "line 1: column `tools` is not a list of tools")):
        bad = write(tmp_path, "rows.jsonl", [{**row, "question": asked, "tools": wrong} for row in ROWS])
        assert says in refused(recipe(bad, template="chat"), letters(chat=chat))


def test_a_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    tokenizer = letters()
    size = len(tokenizer)
    tokenizer.add_tokens(["<tool>"])
    rows = changed(9, question="Use <tool>")
    found = load_prompts(recipe(write(tmp_path, "rows.jsonl", rows)), tokenizer)
    check_vocabulary(found, tokenizer, size + 1)
    check_vocabulary(PromptSet(found.train, []), tokenizer, size)
    check_vocabulary(found, tokenizer, None)
    with pytest.raises(UserError, match=rf"^policy.path: prompt 'Use <tool>' has the token '<tool>' \({size}\), and the model has"):
        check_vocabulary(found, tokenizer, size)


def test_mistakes_in_rows_name_the_row(tmp_path: Path) -> None:
    say = lambda rows, **more: refused(recipe(write(tmp_path, "r.jsonl", rows), **more))  # noqa: E731
    assert "r.jsonl, line 3: the prompt in column `question` is of type int, not a string" in say(changed(2, question=7))
    assert "line 4: the prompt in column `question` is null" in say(changed(3, question=None))
    assert "line 1: the prompt in column `question` is empty" in say(changed(0, question=""))
    assert "line 6: the answer in column `answer` is null" in say(changed(5, answer=None))
    assert "line 6: the answer in column `answer` is NaN" in say(changed(5, answer=float("nan")))
    turns = [{**row, "question": [{"role": "user", "content": "a"}]} for row in changed(5, answer=None)]
    conversations = recipe(write(tmp_path, "turns.jsonl", turns), template="chat")
    assert "line 6: the answer in column `answer` is null" in refused(conversations, letters(chat=CHAT))
    own = {"reward": {"function": "reward.py:reward_func", "contract": "openrlhf"}}
    handed_on = Recipe.parse({**recipe(write(tmp_path, "r.jsonl", changed(5, answer=None))).model_dump(), **own})
    assert load_prompts(handed_on, letters()).train[5].row["answer"] is None
    missing = [{k: v for k, v in row.items() if k != "answer" or i != 8} for i, row in enumerate(ROWS)]
    assert "line 9: no column `answer`, only `question`, `extra`; set prompts.answer_column" in say(missing)
    sentence = say(ROWS, prompt_column="questions")
    assert "line 1: no column `questions`, only `question`, `answer`, `extra`; did you mean `question`?" in sentence


def test_mistakes_in_files_name_file_and_line(tmp_path: Path) -> None:
    def say(name: str, text: str | bytes) -> str:
        file = tmp_path / name
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        sentence = refused(recipe(file))
        assert str(file) in sentence
        return sentence

    assert "no such file" in refused(recipe(tmp_path / "nowhere.jsonl"))
    assert "unknown file type `.txt`; use .jsonl, .json, .csv, .parquet or .arrow" in say("rows.txt", "a")
    for name in ("e.jsonl", "e.json", "e.csv"):
        assert "the data set is empty" in say(name, "")
    assert "the data set is empty" in say("header.csv", "question,answer\n")
    assert "the data set is empty" in say("list.json", "[]")
    assert "line 2: not valid JSON" in say("bad.jsonl", '{"question": "a", "answer": "b"}\n{"question": \n')
    assert "line 1: expected an object with columns, found a list" in say("list.jsonl", "[1]\n")
    assert "line 2: not valid JSON" in say("bad.json", '[{"question": "a"},\n {"question" 3}]')
    assert "row 2: expected an object with columns, found a string" in say("mixed.json", '[{"question": "a"}, "b"]')
    assert "line 3: 3 cells, but the header names 2 columns" in say("wide.csv", "question,answer\na,1\nb,2,3\n")
    assert "two columns are called `answer`; rename or remove one" in say("twice.csv", "question,answer,answer\na,1,2\n")
    assert "line 3: 1 cells" in say("narrow.csv", "question,answer\na,1\nb\n")
    assert "not valid UTF-8 at byte" in say("latin.jsonl", '{"question": "é"}'.encode("latin-1"))
    assert "not a readable parquet file" in say("bad.parquet", "nothing")
    (tmp_path / "empty_folder").mkdir()
    assert "a folder that `datasets` cannot load" in refused(recipe(tmp_path / "empty_folder"))


def test_splits_of_a_saved_dataset_are_named(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "dict")
    assert "has no split `test`, only `train`" in refused(recipe(tmp_path / "dict", split="test"))
    assert len(load_prompts(recipe(tmp_path / "dict"), letters()).train) == 7


def test_an_episode_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    """vLLM refused it in every engine."""
    tree = {"policy": {"path": "model"}, "prompts": {"path": str(write(tmp_path, "r.jsonl", ROWS)), "batch_prompts": 2}}
    long = Recipe.parse({**tree, "agent": {"path": "agent.py", "max_tokens": 999}, "evaluate": {"prompts": 3}})
    assert refused(long, context_tokens=998) == "agent.max_tokens: 999 exceeds the policy's context of 998 tokens; lower it"


def test_what_does_not_fit_is_refused_by_row_never_cut(tmp_path: Path) -> None:
    file = write(tmp_path, "r.jsonl", changed(4, question="x" * 50))
    sentence = refused(recipe(file, max_prompt_tokens=49))
    assert "line 5: the prompt has 50 tokens, more than prompts.max_prompt_tokens = 49" in sentence
    sentence = refused(recipe(file, max_tokens=16), context_tokens=65)
    assert "line 5: 50 prompt tokens and rollout.max_tokens = 16 exceed the policy's context of 65 tokens" in sentence
    found = load_prompts(recipe(file, max_prompt_tokens=50, max_tokens=16), letters(), context_tokens=66)
    assert len(found.train[4].token_ids) == 50
    sentence = refused(recipe(file, batch_prompts=8))
    assert "10 rows are too few for 8 prompts per step (prompts.batch_prompts) and 3 held-out ones" in sentence
    assert len(load_prompts(recipe(file, batch_prompts=7), letters()).train) == 7


def test_templates_that_cannot_work_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "r.jsonl", ROWS)
    assert "the tokenizer of model has no chat template" in refused(recipe(file, template="chat"))
    assert "a system turn needs prompts.template=chat" in refused(recipe(file, system="Be brief."))
    strict = letters(chat="{{ raise_exception('no system\nturns') }}")
    sentence = refused(recipe(file, template="chat", system="Be brief."), strict)
    assert "line 1: the chat template failed (TemplateError: no system turns)" in sentence


def test_a_character_the_policy_does_not_know_is_refused(tmp_path: Path) -> None:
    assert "the policy's tokenizer cannot encode the prompts" in refused(
        recipe(write(tmp_path, "r.jsonl", changed(0, question="é"))), letters()
    )


def test_a_prompt_that_begins_with_the_first_token_gets_no_second_one(tmp_path: Path) -> None:
    asked = tuple(ord(c) - 30 for c in "Why?")
    for text in ("Why?", "<bos>Why?", "\t <bos>Why?", "<bos><bos>Why?"):
        file = write(tmp_path, "r.jsonl", changed(0, question=text))
        assert load_prompts(recipe(file), letters(bos=True)).train[0].token_ids == (0, *asked), text
    file = write(tmp_path, "r.jsonl", changed(0, question="<bos>Why?"))
    assert load_prompts(recipe(file, add_bos=False), letters(bos=True)).train[0].token_ids == (0, *asked), "the row's own"
    found = load_prompts(recipe(file, input_template="Q:{}"), letters(bos=True))
    assert found.train[0].text == "Q:Why?" and found.train[0].token_ids.count(0) == 1
    assert (
        found.notes[0].startswith("prompts that begin with the beginning-of-text token")
        and "(1 of 10 rows, first line 1)" in found.notes[0]
    )
    found = load_prompts(recipe(file, template="chat"), letters(bos=True, chat="<bos>" + CHAT))
    assert found.train[0].text == "<bos>[user]Why?[assistant]" and found.train[0].token_ids.count(0) == 1 and found.notes[1:] == (EXTRA,)
    plain = load_prompts(recipe(file, template="chat"), letters(bos=True, chat=CHAT))
    assert plain.train[0].text == "[user]<bos>Why?[assistant]" and plain.notes == (EXTRA,), "the template writes none"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_a_conversation_that_is_text_is_read_as_one(tmp_path: Path, name: str) -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "it's"}, {"role": "user", "content": "c"}]
    for written in (json.dumps, repr):
        file = write(tmp_path, name, [{"question": written(asked), "answer": "b"}] * 5)
        assert load_prompts(recipe(file, template="chat"), letters(chat=CHAT)).train[0].text == "[user]a[assistant]it's[user]c[assistant]"
        assert "the prompt in column `question` is a list of turns, which only a chat template renders" in refused(recipe(file))
    broken = write(tmp_path, "r.jsonl", changed(2, question=json.dumps(asked)[:-2]))
    assert "line 3: column `question` begins like a list of turns, and is neither JSON nor" in refused(recipe(broken), letters(chat=CHAT))
    for text in ('["a", "b"]', '{"a": 1}', "[{x}]"):
        kept = write(tmp_path, "r.jsonl", changed(0, question=text))
        assert load_prompts(recipe(kept), letters()).train[0].text == text, "a prompt may be JSON"


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([{"role": "human", "content": "a"}], "turn 1 has the role `human`, which the chat template does not know; name it `user`"),
        ([{"role": "user", "content": 3.5}], "turn 1 has 3.5 as `content`, which is no text"),
        ([{"role": "system", "content": "a"}], "the conversation has a system turn only, so nobody asks anything"),
        ([], "the prompt in column `question` is an empty list, not a string"),
    ],
)
def test_conversations_without_a_question_are_refused(tmp_path: Path, turns: Any, says: str) -> None:
    rows = [{"question": [{"role": "user", "content": "a"}], "answer": ""}, {"question": turns, "answer": ""}]
    file = write(tmp_path, "r.jsonl", rows)
    assert f"line 2: {says}" in refused(recipe(file, template="chat", batch_prompts=1, held=0), letters(chat=CHAT))


def test_keys_of_turns_and_tools_that_nobody_reads_are_named(tmp_path: Path) -> None:
    rows = [{"question": [{"role": "user", "content": "a", "name": "Ann"}], "answer": "", "tools": [{"name": "f"}]}] * 2
    file = write(tmp_path, "r.jsonl", rows)
    settings: dict[str, Any] = {"template": "chat", "batch_prompts": 1, "held": 0, "tools_column": ""}
    found = load_prompts(recipe(file, **settings), letters(chat=CHAT))
    tools = "columns that nothing reads: `tools` (2 of 2 rows, first line 1)"
    assert found.notes == ("keys of turns that the chat template does not read: `name` (2 of 2 rows, first line 1)", tools)
    named = CHAT.replace("{{ m['content'] }}", "{{ m.name }}:{{ m['content'] }}")
    found = load_prompts(recipe(file, **settings), letters(chat=named))
    assert found.train[0].text == "[user]Ann:a[assistant]" and found.notes == (tools,)
    plain = write(tmp_path, "p.jsonl", [{**row, "tools": [1]} for row in ROWS])
    assert load_prompts(recipe(plain), letters()).notes == (
        EXTRA,
        "columns with tools, which only prompts.template=chat reads: `tools` (10 of 10 rows, first line 1)",
    )


@pytest.mark.parametrize(("function", "contract"), [("math", "row"), ("mine.py:reward", "openrlhf"), ("mine.py:reward", "row")])
def test_columns_are_named_unless_a_reward_function_gets_whole_rows(tmp_path: Path, function: str, contract: str) -> None:
    rows = [{**row, "extra": None, "datasource": "a", **({"system": "Be brief."} if n == 3 else {})} for n, row in enumerate(ROWS)]
    given = recipe(write(tmp_path, "rows.jsonl", rows)).with_settings({"reward.function": function, "reward.contract": contract})
    named = () if contract == "row" and function != "math" else ("columns that nothing reads: `system` (1 of 10 rows, first line 4)",)
    assert load_prompts(given, letters()).notes == named
