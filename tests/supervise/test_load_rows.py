"""Rows → tokens: what is trained, in which template, and what bad rows get."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.prompts.conversations import lost_roles
from rlhfless_ray.prompts.task_tokenizer import build_tokenizer
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise.examples import Examples
from rlhfless_ray.supervise.load_rows import check_vocabulary, end_note, load_rows
from rlhfless_ray.supervise.row_reader import SupervisedRows

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}a{% endif %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token for each letter."""
    found = build_tokenizer(task("sort"))
    found.add_tokens(list(";0123456789 "))
    found.chat_template = TEMPLATE
    return found


def recipe(folder: Path, rows: list[dict[str, Any]], stage: str = "sft", **data: Any) -> SupervisedRecipe:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate = data.pop("evaluate", {})
    return SupervisedRecipe.parse(
        {"task": stage, "policy": {"path": "x"}, "data": {"path": str(file), **data}, "evaluate": evaluate, "run": {"name": "a"}}
    )


def shown(examples: Examples, tokenizer: Any) -> list[str]:
    """Return each sequence with its trained tokens in brackets."""
    found, start = [], 0
    for length in examples.lengths:
        tokens = examples.tokens[start : start + length]
        mask = examples.mask[start : start + length]
        found.append("".join(f"[{tokenizer.decode([t])}]" if m else tokenizer.decode([t]) for t, m in zip(tokens, mask, strict=True)))
        start += length
    return found


def read(folder: Path, tokenizer: Any, rows: list[dict[str, Any]], stage: str = "sft", **data: Any) -> tuple[list[str], SupervisedRows]:
    loaded = load_rows(recipe(folder, rows, stage, **data), tokenizer)
    return shown(loaded.train, tokenizer), loaded


def test_a_token_that_the_model_has_no_embedding_for_is_named_with_its_row(tmp_path: Path, tokenizer: Any) -> None:
    _, loaded = read(tmp_path, tokenizer, [{"prompt": "ab=", "response": "c"}, {"prompt": "b=", "response": ";"}])
    size = int(loaded.train.tokens.max())
    with pytest.raises(
        UserError, match=rf"the row 'b=;<eos>' has the token ';' \({size}\), and the model has embeddings for {size} tokens"
    ):
        check_vocabulary(loaded, tokenizer, size)
    check_vocabulary(loaded, tokenizer, size + 1)
    check_vocabulary(loaded, tokenizer, None)


def test_responses_end_and_prompts_are_context(tmp_path: Path, tokenizer: Any) -> None:
    found, _ = read(tmp_path, tokenizer, [{"prompt": "ab=", "response": "c"}])
    assert found == ["ab=[c][<eos>]"]
    found, _ = read(tmp_path, tokenizer, [{"prompt": "ab", "response": "c"}], input_template="x{}=")
    assert found == ["xab=[c][<eos>]"]


def test_pretraining_counts_every_token_but_the_first(tmp_path: Path, tokenizer: Any) -> None:
    found, _ = read(tmp_path, tokenizer, [{"text": "abc"}], train_on="all", prompt_column="text", response_column="")
    assert found == ["a[b][c]"]


def test_a_chat_template_gets_the_tools_of_a_row_and_no_python_code(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool['name'] }}={% endfor %}" + TEMPLATE
    rows = [{"prompt": "b", "response": "c", "tools": tools} for tools in ([{"name": "d"}], '[{"name": "e"}]', None)]
    found, _ = read(tmp_path, tokenizer, rows, template="chat")
    assert [text.partition("ub;a")[0] for text in found] == ["d=", "e=", ""]
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(UserError, match="line 1: the row has tools in column `tools`, and the chat template reads none; fix or remove"):
        read(tmp_path, tokenizer, rows, template="chat")
    parts = {"prompt": "b", "response": [{"role": "assistant", "content": [{"type": "text", "text": "c"}]}]}
    with pytest.raises(UserError, match="line 1: turn 2 has a list as `content`, which the chat template writes as Python code"):
        read(tmp_path, tokenizer, [parts], template="chat")


def test_chat_marks_the_last_turn_or_all_of_the_assistant(tmp_path: Path, tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    row = {"prompt": turns, "response": [{"role": "assistant", "content": "e"}]}
    found, _ = read(tmp_path, tokenizer, [row], template="chat")
    assert found == ["ub;ac;ud;a[e][;][<eos>]"] or found == ["ub;ac;ud;a[e][;]"]
    found, _ = read(tmp_path, tokenizer, [row], template="chat", train_on="assistant")
    assert found == ["ub;a[c][;]ud;a[e][;]"]


def test_openrlhfs_contract_adds_a_space_and_cuts_on_the_right(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "ab=", "response": "c\n"}, {"prompt": "ab=", "response": "cdefgh"}, {"prompt": "abcdef=", "response": "c"}]
    found, loaded = read(tmp_path, tokenizer, rows, contract="openrlhf", max_tokens=8)
    assert found == ["ab=[c][ ][<eos>]", "ab=[c][d][e][f][<eos>]"]
    assert "1 rows of more than 8 tokens (data.max_tokens) are left out" in loaded.notes[0] and "line 3" in loaded.notes[0]
    assert "cut at their end: line 2" in loaded.notes[1]


def test_openrlhfs_contract_cuts_conversations_too(tmp_path: Path, tokenizer: Any) -> None:
    """Their last token is the end-of-sequence token, and only a row whose last prompt is too long is left out."""

    def talk(*texts: str) -> dict[str, Any]:
        return {"prompt": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]}

    rows = [talk("b", "c"), talk("b", "c", "d", "efgh"), talk("b", "c", "defghabcde", "f")]
    settings = {"contract": "openrlhf", "template": "chat", "train_on": "assistant", "response_column": "", "overlong": "leave_out"}
    found, loaded = read(tmp_path, tokenizer, rows, max_tokens=14, **settings)
    assert found == ["ub;a[c][;] <eos>", "ub;a[c][;]ud;a[e][f][g][<eos>]"]
    assert "left out" in loaded.notes[0] and "line 3" in loaded.notes[0] and "cut at their end: line 2" in loaded.notes[1]


@pytest.mark.parametrize(("stage", "kept"), [("rm", 2), ("dpo", 2)])
def test_openrlhfs_contract_trains_pairs_with_an_empty_response(tmp_path: Path, tokenizer: Any, stage: str, kept: int) -> None:
    rows = [PAIR, {"prompt": "ab=", "chosen": "c", "rejected": ""}]
    found, loaded = read(tmp_path, tokenizer, rows, stage, contract="openrlhf", overlong="leave_out")
    assert len(loaded.train) == kept and found[-1].replace("[", "").replace("]", "").startswith("ab= <eos>")
    (text,), _ = read(tmp_path, tokenizer, [{"prompt": "a", "response": "b"}, {"prompt": "", "response": "c"}], contract="openrlhf")
    assert text == "a[b][ ][<eos>]"


def test_openrlhfs_contract_trains_whole_texts_of_pairs_without_a_prompt(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"chosen": "ab", "rejected": "ac"}]
    found, _ = read(tmp_path, tokenizer, rows, "dpo", contract="openrlhf", prompt_column="")
    assert found == ["a[b][ ][<eos>]", "a[c][ ][<eos>]"]
    with pytest.raises(UserError, match=r"there is no prompt beside column `chosen`; set data.prompt_column$"):
        read(tmp_path, tokenizer, rows, "dpo", prompt_column="")


def test_notes_name_a_row_once(tmp_path: Path, tokenizer: Any) -> None:
    pairs = [PAIR, {"prompt": "a=", "chosen": "b" * 9, "rejected": "c" * 9}]
    _, loaded = read(tmp_path, tokenizer, pairs, "dpo", contract="openrlhf", max_tokens=8)
    assert len(loaded.notes) == 1 and loaded.notes[0].startswith("1 rows of") and loaded.notes[0].endswith("cut at their end: line 2")
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a" * 9, "response": "b"}]
    _, loaded = read(tmp_path, tokenizer, rows, max_tokens=8, overlong="stop", contract="openrlhf")
    assert len(loaded.notes) == 1 and "left out" in loaded.notes[0]


def test_a_conversation_begins_and_ends_as_its_roles_say(tmp_path: Path, tokenizer: Any) -> None:
    settings: dict[str, Any] = {"template": "chat", "response_column": ""}
    greets = [{"prompt": [{"role": "assistant", "content": "b"}]}]
    for train_on in ("response", "assistant"):
        assert read(tmp_path, tokenizer, greets, train_on=train_on, **settings)[0] == ["a[b][;]"]
    asks = [{"prompt": [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}]
    with pytest.raises(
        UserError, match=r"line 1: the last turn of column `prompt` is of role `user`, not a response; fix or remove the row"
    ):
        read(tmp_path, tokenizer, asks, **settings)
    assert read(tmp_path, tokenizer, asks, train_on="assistant", **settings)[0] == ["a[b][;]uc;"]


def test_a_share_of_the_training_rows_can_be_evaluated(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "a", "response": letter} for letter in "bcdef"]
    _, loaded = read(tmp_path, tokenizer, rows, evaluate={"train_share": 0.4})
    assert len(loaded.train) == 5 and shown(loaded.heldout, tokenizer) == ["a[b][<eos>]", "a[c][<eos>]"]
    with pytest.raises(UserError, match=r"evaluate.train_share: rows are held out by evaluate.path or evaluate.rows"):
        read(tmp_path, tokenizer, rows, evaluate={"train_share": 0.4, "rows": 1})


def test_pairs_of_a_reward_model_count_the_place_after_the_last_token(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "ab=", "chosen": "c", "rejected": "dd", "margin": 0.5}]
    found, loaded = read(tmp_path, tokenizer, rows, "rm")
    assert found == ["ab=c<eos>[<eos>]", "ab=dd<eos>[<eos>]"]
    assert loaded.train.extras.tolist() == [0.5] and len(loaded.train) == 1


@pytest.mark.parametrize("column", ["prompt", ""])
def test_a_reward_model_is_read_where_a_rollout_ends(tmp_path: Path, tokenizer: Any, column: str) -> None:
    """Chat templates often put a line break after the token that ends a turn. A rollout ends with that token."""
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<eos> {% endfor %}"
    turns = [{"role": "assistant", "content": "c"}], [{"role": "assistant", "content": "d"}]
    row = {"prompt": "b", "chosen": turns[0], "rejected": turns[1]}
    found, _ = read(tmp_path, tokenizer, [row], "rm", template="chat", prompt_column=column)
    before = "b<eos> " if column else ""
    assert found == [f"{before}c<eos>[<eos>]", f"{before}d<eos>[<eos>]"]


def test_kto_pairs_every_prompt_with_another_response(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "a=", "response": "x", "label": True}, {"prompt": "b=", "response": "yy", "label": False}]
    found, loaded = read(tmp_path, tokenizer, rows, "kto")
    assert found == ["a=[x][<eos>]", "a=[y][y][<eos>]", "b=[y][y][<eos>]", "b=[x][<eos>]"]
    assert loaded.train.extras.tolist() == [1.0, 0.0]


STEPS = {"placeholder_token": ";", "reward_tokens": ["1", "0"]}


def test_steps_of_a_process_reward_model_count_the_place_after_their_placeholder(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "ab;c;d", "label": ["1", "0"]}, {"prompt": "a;", "label": [0.25]}]
    found, loaded = read(tmp_path, tokenizer, rows, "prm", **STEPS)
    assert found == ["ab;[c];[d]<eos>", "a;[<eos>]"]
    assert loaded.train.labels.tolist() == [1.0, 0.0, 0.25] and loaded.train.labels_of(np.array([1, 0])).tolist() == [0.25, 1.0, 0.0]
    assert loaded.reward_tokens == [tokenizer("1")["input_ids"][0], tokenizer("0")["input_ids"][0]]
    rows = [{"prompt": "a;b;c;", "label": ["1", "2", "0"]}]
    _, loaded = read(tmp_path, tokenizer, rows, "prm", **{**STEPS, "reward_tokens": ["0", "1", "2"]})
    assert loaded.train.labels.tolist() == [1.0, 2.0, 0.0]
    _, loaded = read(tmp_path, tokenizer, rows, "prm", placeholder_token=";")
    assert loaded.train.labels.tolist() == [tokenizer(x)["input_ids"][0] for x in "120"] and loaded.reward_tokens is None


def test_a_limit_of_openrlhf_does_not_count_the_token_after_a_reward(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "a", "chosen": "bcdefgh", "rejected": "b"}]
    found, loaded = read(tmp_path, tokenizer, rows, "rm", contract="openrlhf", overlong="leave_out", max_tokens=6)
    assert found[0] == "abcde<eos>[<eos>]" and loaded.notes == (
        "1 rows of more than 6 tokens (data.max_tokens) are cut at their end: line 1",
    )
    in_context = load_rows(recipe(tmp_path, rows, "rm", contract="openrlhf", overlong="leave_out", max_tokens=6), tokenizer, 6)
    assert shown(in_context.train, tokenizer)[0] == "abcd<eos>[<eos>]", "there the model takes no more"


def test_cut_texts_keep_the_labels_of_their_steps(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "a;b;cdefgh;", "label": ["1", "0", "1"]}, {"prompt": "abcdefgh;", "label": ["1"]}]
    found, loaded = read(tmp_path, tokenizer, rows, "prm", contract="openrlhf", overlong="leave_out", max_tokens=6, **STEPS)
    assert found == ["a;[b];[c]d<eos>"] and loaded.train.labels.tolist() == [1.0, 0.0]
    assert "line 2" in loaded.notes[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "ab", "label": ["1"]}, "line 2: column `prompt` has no placeholder token `;`, so it has no steps"),
        ({"prompt": "a;b;", "label": ["1"]}, "line 2: column `label` has 1 labels for 2 steps"),
        ({"prompt": "a;", "label": "1"}, "line 2: column `label` has no list for 1 steps"),
        ({"prompt": "a;", "label": ["7"]}, "line 2: the label '7' in column `label` is none of data.reward_tokens 1, 0"),
        ({"prompt": "a;", "label": [1.5]}, "line 2: the label 1.5 in column `label` is neither a reward token nor a probability"),
        ({"prompt": "a;", "label": [True]}, "line 2: the label True in column `label` is neither"),
        ({"prompt": "a;"}, "line 2: no column `label`"),
    ],
)
def test_bad_steps_are_named(tmp_path: Path, tokenizer: Any, row: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, tokenizer, [{"prompt": "a;", "label": ["1"]}, row], "prm", **STEPS)
    assert message in str(error.value)


def test_tokens_of_steps_are_single_ones(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "a;", "label": [0.5]}]
    with pytest.raises(UserError, match=r"data.placeholder_token: `;;` is 2 tokens of policy.path's tokenizer"):
        read(tmp_path, tokenizer, rows, "prm", placeholder_token=";;")
    with pytest.raises(UserError, match=r"line 1: the label 0.5 .* is a probability; set data.reward_tokens to two tokens"):
        read(tmp_path, tokenizer, rows, "prm", placeholder_token=";")


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "kto", "kd"])
def test_builtin_tasks_have_rows_for_every_stage(stage: str, tokenizer: Any) -> None:
    teacher = {"teacher": {"path": "x"}} if stage == "kd" else {}
    parsed = SupervisedRecipe.parse({"task": stage, "data": {"task": "sort", "rows": 20}, "evaluate": {"rows": 5}, **teacher})
    loaded = load_rows(parsed, tokenizer)
    assert len(loaded.train) == 20 and len(loaded.heldout) == 5
    assert load_rows(parsed, tokenizer).train.tokens.tolist() == loaded.train.tokens.tolist()
    if stage in ("rm", "dpo"):
        texts = shown(loaded.train, tokenizer)
        for chosen in texts[::2]:
            prompt, _, response = chosen.replace("[", "").replace("]", "").partition("=")
            assert response.replace("<eos>", "") == "".join(sorted(prompt))


def test_pairs_of_a_builtin_task_repeat_no_prompt(tokenizer: Any) -> None:
    """Of some rows all drawn responses are right, or wrong, so that more rows have to be tried."""
    parsed = SupervisedRecipe.parse({"task": "dpo", "data": {"task": "sort", "rows": 200}})
    found = load_rows(parsed, tokenizer).train
    starts = np.cumsum(found.lengths) - found.lengths
    prompts = [tokenizer.decode(found.tokens[a : a + n]) for a, n in zip(starts[::2], found.context_lengths[::2], strict=True)]
    tried = [row["prompt"] for row in task("sort").rows(400, 0, "train")]
    numbers = [tried.index(prompt) for prompt in prompts]
    assert numbers == sorted(set(numbers)) and numbers[-1] >= 200


def test_held_out_rows_are_the_last(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": f"{letter}=", "response": letter} for letter in "abcde"]
    found, loaded = read(tmp_path, tokenizer, rows, evaluate={"rows": 2})
    assert [text[0] for text in found] == ["a", "b", "c"]
    assert [text[0] for text in shown(loaded.heldout, tokenizer)] == ["d", "e"]


PAIR = {"prompt": "a=", "chosen": "b", "rejected": "c"}


def test_a_mix_trains_on_no_held_out_row(tmp_path: Path, tokenizer: Any) -> None:
    """`interleave_datasets` repeats the rows of the smaller data set until the larger one is used up."""
    files = [tmp_path / "few.jsonl", tmp_path / "many.jsonl"]
    for file, letters in zip(files, ("abc", "defghijklmnopqrstuv"), strict=True):
        file.write_text("".join(json.dumps({"prompt": f"{letter}=", "response": letter}) + "\n" for letter in letters))
    data = {"paths": [str(file) for file in files], "probabilities": [0.5, 0.5]}
    tree = {"task": "sft", "policy": {"path": "x"}, "data": data, "evaluate": {"rows": 6}, "run": {"name": "a"}}
    loaded = load_rows(SupervisedRecipe.parse(tree), tokenizer)
    train, heldout = shown(loaded.train, tokenizer), shown(loaded.heldout, tokenizer)
    assert not set(train) & set(heldout) and len(heldout) == 6
    assert "repetitions of held-out rows (evaluate.rows) in the mix are left out of training" in loaded.notes[-1]


def test_null_keys_of_a_turn_are_no_keys(tmp_path: Path, tokenizer: Any) -> None:
    """Parquet gives every turn the keys of all turns."""
    named = deepcopy(tokenizer)
    named.chat_template = "{% for m in messages %}{% if m.name is defined %}{{ m.name }};{% endif %}{{ m.content }};{% endfor %}"
    turns = [{"role": "user", "name": "a", "content": "b"}, {"role": "assistant", "name": None, "content": "c"}]
    found, _ = read(tmp_path, named, [{"prompt": turns[:1], "response": turns[1:]}], template="chat")
    assert found == ["a;b;[c][;]"]


def test_a_list_of_parts_that_a_template_prints_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "b"}]}]
    with pytest.raises(UserError, match="line 1: turn 1 has a list as `content`, which the chat template writes as Python code"):
        read(tmp_path, tokenizer, [{"prompt": turns, "response": "c"}], template="chat")


def test_turns_that_a_template_leaves_out_are_named(tmp_path: Path, tokenizer: Any) -> None:
    named = deepcopy(tokenizer)
    roles = "{% if m.role == 'user' %}b{{ m.content }}{% elif m.role == 'assistant' %}{{ m.content }};{% endif %}"
    named.chat_template = f"{{% for m in messages %}}{roles}{{% endfor %}}"
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " c "}]
    rows: list[dict[str, Any]] = [{"prompt": asked, "response": "d"}, {"prompt": asked[1:], "response": "d"}]
    _, loaded = read(tmp_path, named, rows, template="chat")
    note = "roles of turns of which no word is in the text that the chat template writes: `system` (1 of 2 rows, first line 1)"
    assert loaded.notes == (note,)
    long = {"prompt": asked, "response": "d" * 20}
    _, left = read(tmp_path, named, [*rows, long], template="chat", max_tokens=9, overlong="leave_out")
    assert left.notes[1:] == (note,), "a row that is left out does not count"
    assert not read(tmp_path, named, rows[1:], template="chat")[1].notes
    called = [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]
    row = {"prompt": asked[1:], "response": called}
    with pytest.raises(UserError, match="line 1: turn 2 has `tool_calls` only, and the chat template reads none; remove the turn, or use"):
        read(tmp_path, named, [row], template="chat")
    note = "keys of turns that the chat template does not read: `tool_calls` (1 of 1 rows, first line 1)"
    assert read(tmp_path, named, [row], template="chat", contract="openrlhf")[1].notes == (note,), "as OpenRLHF, which trains on it"
    called[0]["content"] = "d"
    assert read(tmp_path, named, [row], template="chat")[1].notes == (note,)


def test_a_turn_that_a_template_edits_is_not_lost() -> None:
    turns = [{"role": "tool", "content": '{"name":  "<Rome>"}'}, {"role": "user", "content": "42"}, {"role": "system", "content": "user"}]
    assert not lost_roles(turns, "{&quot;name&quot;: &quot;&lt;Rome&gt;&quot;}")
    assert lost_roles(turns, "42") == {"tool"}
    assert lost_roles([{"role": "system", "content": "You are an assistant. Be brief."}], "<assistant>") == {"system"}


def test_the_last_turn_is_the_models(tmp_path: Path, tokenizer: Any) -> None:
    """A reward model also judges an agent's work until its last tool call. OpenRLHF trains on any last turn."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "tool", "content": "c"}]
    settings: dict[str, Any] = {"template": "chat", "prompt_column": "", "response_column": "turns"}
    with pytest.raises(UserError, match="the last turn of column `turns` is of role `tool`, not a response"):
        read(tmp_path, tokenizer, [{"turns": turns}], **settings)
    named = deepcopy(tokenizer)
    named.chat_template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    assert read(tmp_path, named, [{"turns": turns}], contract="openrlhf", **settings)[0]
    # with a generation prompt, `a`, the rest is what lies beyond its length, as OpenRLHF slices it
    texts, rows = read(tmp_path, tokenizer, [{"turns": turns}], contract="openrlhf", **settings)
    assert texts == ["ua;ab;a[c][;][ ][<eos>]"] and "1 rows are sliced as in OpenRLHF" in rows.notes[0]
    pair = {"chosen": turns, "rejected": [*turns[:2], {"role": "tool", "content": "d"}]}
    assert len(read(tmp_path, tokenizer, [pair], "rm", template="chat", prompt_column="")[0]) == 2
    with pytest.raises(UserError, match="the last turn of column `turns` is of role `user`, not a response"):
        read(tmp_path, tokenizer, [{"turns": turns[:1]}], contract="openrlhf", **settings)


def test_a_chat_template_whose_turns_end_no_rollout_is_named(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base model, say: its tokenizer's end-of-sequence token is not the one that ends a turn of its chat template."""
    settings: dict[str, Any] = {"template": "chat"}
    row = {"prompt": "a", "response": "b"}
    parsed, (_, rows) = recipe(tmp_path, [row], **settings), read(tmp_path, tokenizer, [row], **settings)
    (note,) = end_note(parsed, rows, {"config.json": b"{}"}, tokenizer)
    assert note.startswith("no trained response has an end-of-sequence token ('<eos>'), because the chat template writes none")
    generation = json.dumps({"eos_token_id": [1, tokenizer.convert_tokens_to_ids(";")]}).encode()
    assert not end_note(parsed, rows, {"config.json": b"{}", "generation_config.json": generation}, tokenizer)
    monkeypatch.setattr("rlhfless_ray.supervise.load_rows.BLOCK", 2)
    assert not end_note(parsed, rows, {"config.json": b"{}", "generation_config.json": generation}, tokenizer), "in the last block"
    plain = recipe(tmp_path, [row])
    assert not end_note(plain, load_rows(plain, tokenizer), {"config.json": b"{}"}, tokenizer)


def test_pairs_are_responses_to_one_prompt(tmp_path: Path, tokenizer: Any) -> None:
    turns = [[{"role": "user", "content": asked}, {"role": "assistant", "content": answer}] for asked, answer in ("ab", "ac", "db")]
    settings: dict[str, Any] = {"template": "chat", "prompt_column": ""}
    good, bad = {"chosen": turns[0], "rejected": turns[1]}, {"chosen": turns[0], "rejected": turns[2]}
    assert read(tmp_path, tokenizer, [good], "dpo", **settings)[0] == ["ua;a[b][;]", "ua;a[c][;]"]
    stamped = {**good, "rejected": [{**turns[1][0], "id": 3, "tool_calls": None}, turns[1][1]]}
    assert read(tmp_path, tokenizer, [stamped], "dpo", **settings)[0] == ["ua;a[b][;]", "ua;a[c][;]"], "no template reads an id"
    with pytest.raises(
        UserError, match="line 2: the conversations in `chosen` and `rejected` differ before their last turn; put the turns"
    ):
        read(tmp_path, tokenizer, [good, bad], "dpo", **settings)
    assert len(read(tmp_path, tokenizer, [good, bad], "rm", **settings)[0]) == 4, "a reward model reads whole conversations"


def test_openrlhfs_contract_trains_equal_pairs_and_names_them(tmp_path: Path, tokenizer: Any) -> None:
    same = {**PAIR, "rejected": "b"}
    _, loaded = read(tmp_path, tokenizer, [PAIR, same], "dpo", contract="openrlhf")
    assert len(loaded.train) == 2
    assert loaded.notes == ("1 rows have the same `chosen` and `rejected`, which teach no preference: line 2",)
    with pytest.raises(UserError, match=r"`chosen` and `rejected` are the same in all 2 rows, so there is nothing to prefer"):
        read(tmp_path, tokenizer, [same, same], "dpo", contract="openrlhf")
    cut = {"prompt": "a=", "chosen": "b" * 9 + "c", "rejected": "b" * 9 + "d"}
    with pytest.raises(UserError, match=r"are the same in all 2 rows once they are cut at 8 tokens; raise data.max_tokens"):
        read(tmp_path, tokenizer, [cut, cut], "dpo", contract="openrlhf", max_tokens=8)


def test_evaluations_need_rows() -> None:
    """OpenRLHF's launcher asks for them without any, and has none then."""
    tree: dict[str, Any] = {"task": "sft", "policy": {"path": "x"}, "data": {"path": "a"}, "run": {"name": "a"}}
    for asked in ({"each_epoch": True}, {"every_steps": 3}):
        with pytest.raises(UserError, match="there are no rows to evaluate on; set evaluate"):
            SupervisedRecipe.parse({**tree, "evaluate": asked})
        for rows in ({"train_share": 0.1}, {"rows": 0}):
            SupervisedRecipe.parse({**tree, "evaluate": {**asked, **rows}})
        SupervisedRecipe.parse({**tree, "data": {"path": "a", "contract": "openrlhf"}, "evaluate": asked})


def test_shares_and_reward_tokens_are_checked() -> None:
    mix = {"paths": ["a", "b"], "probabilities": [0.5, 0.6]}
    with pytest.raises(UserError, match=r"data.probabilities: must be positive and add up to 1"):
        SupervisedRecipe.parse({"task": "sft", "policy": {"path": "x"}, "data": mix})
    with pytest.raises(UserError, match=r"data.reward_tokens: a token is named twice"):
        SupervisedRecipe.parse({"task": "prm", "policy": {"path": "x"}, "data": {"path": "a", **STEPS, "reward_tokens": ["1", "1"]}})


@pytest.mark.parametrize(
    ("stage", "row", "data", "message"),
    [
        ("sft", {"promt": "a", "response": "b"}, {}, "line 2: no column `prompt`, only `promt`, `response`; did you mean `promt`?"),
        ("sft", {"prompt": "a", "response": None}, {}, "line 2: column `response` is null, not a string"),
        ("sft", {"prompt": "a", "response": ""}, {}, "line 2: column `response` is empty"),
        ("sft", {"prompt": [{"role": "user", "content": "a"}], "response": "b"}, {}, "set data.template to chat"),
        ("sft", {"prompt": "a=", "response": "b" * 99}, {"max_tokens": 20}, "line 2: 102 tokens are more than 20"),
        ("dpo", {**PAIR, "rejected": "b"}, {}, "line 2: `chosen` and `rejected` are the same"),
        ("sft", {"prompt": "a\ud83d", "response": "b"}, {}, "line 2: the text holds half of a surrogate pair"),
        ("rm", {**PAIR, "margin": "wide"}, {}, "line 2: the margin in column `margin` is 'wide', not a number"),
        ("rm", {**PAIR, "margin": float("nan")}, {}, "line 2: the margin in column `margin` is nan, not a number"),
        ("kto", {"prompt": "a", "response": "b", "label": "good"}, {}, "line 2: the label in column `label` is 'good'"),
        (
            "sft",
            {"prompt": [{"role": "user", "content": "a"}]},
            {"template": "chat", "train_on": "assistant", "response_column": ""},
            "line 2: the conversation has no turn of the assistant",
        ),
        (
            "sft",
            {"prompt": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {"template": "chat", "train_on": "assistant", "response_column": ""},
            "line 2: turn 1 has no `role`, only `from`, `value`",
        ),
        (
            "sft",
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]},
            {"template": "chat", "train_on": "assistant", "response_column": ""},
            "line 2: turn 2 has no `content`",
        ),
        (
            "sft",
            {"prompt": [{}]},
            {"template": "chat", "train_on": "assistant", "response_column": ""},
            "line 2: turn 1 has no `role`, only an empty turn; fix",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, tokenizer: Any, stage: str, row: Any, data: dict[str, Any], message: str) -> None:
    good = {**PAIR, "response": "b", "label": True}
    if data.get("train_on") == "assistant":
        good = {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(UserError) as error:
        load_rows(recipe(tmp_path, [good, row], stage, **data), tokenizer)
    assert message in str(error.value)


@pytest.mark.parametrize(("missing", "there"), [("response", "prompt"), ("prompt", "response")])
def test_a_text_alone_names_the_column_that_is_missing(tmp_path: Path, tokenizer: Any, missing: str, there: str) -> None:
    with pytest.raises(
        UserError, match=f"line 1: there is no {missing} beside column `{there}`; set data.{missing}_column, or data.train_on"
    ):
        load_rows(recipe(tmp_path, [{there: "a"}], **{f"{missing}_column": ""}), tokenizer)


def test_a_bad_row_of_the_held_out_file_is_named_with_the_file(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "held.jsonl").write_text('{"prompt": "a"}\n')
    evaluate = {"path": str(tmp_path / "held.jsonl")}
    with pytest.raises(UserError, match=r"^evaluate.path .*held.jsonl, line 1: no column `response`"):
        load_rows(recipe(tmp_path, [{"prompt": "a", "response": "b"}], evaluate=evaluate), tokenizer)


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    before, tokenizer.chat_template = (
        tokenizer.chat_template,
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )
    try:
        turns = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
        with pytest.raises(UserError, match="cannot be told apart"):
            load_rows(recipe(tmp_path, [{"prompt": turns}], template="chat", response_column=""), tokenizer)
    finally:
        tokenizer.chat_template = before


def test_long_rows_can_be_left_out(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "a=", "response": "b"}, {"prompt": "a=", "response": "b" * 50}]
    found, loaded = read(tmp_path, tokenizer, rows, max_tokens=20, overlong="leave_out")
    assert found == ["a=[b][<eos>]"] and "line 2" in loaded.notes[0]
    assert np.array_equal(loaded.train.lengths, [4])
