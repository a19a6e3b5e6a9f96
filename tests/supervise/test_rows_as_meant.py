"""Supervised rows that say something: it is read, refused by name, or named before the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise.load_rows import load_rows
from rlhfless_ray.supervise.trained_turns import trained

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}a{% endif %}"


def tokenizer(chat: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per ASCII character, after `<s>`."""
    core = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1} | {chr(c): c - 30 for c in range(32, 127)}))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=chat)


def read(folder: Path, rows: list[dict[str, Any]], stage: str = "sft", chat: str = TEMPLATE, **data: Any) -> tuple[list[str], list[str]]:
    """Return each sequence, with brackets around the parts that are trained, and the notes."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {"task": stage, "policy": {"path": "x"}, "data": {"path": str(file), **data}, "run": {"name": "a"}}
    recipe = SupervisedRecipe.parse({**tree, **({"teacher": {"path": "y"}} if stage == "kd" else {})})
    found = tokenizer(chat)
    loaded = load_rows(recipe, found)
    texts = []
    for start, length in zip(loaded.train.starts, loaded.train.lengths, strict=True):
        places = range(start, start + length)
        pieces = [
            f"[{found.decode([loaded.train.tokens[i]])}]" if loaded.train.mask[i] else found.decode([loaded.train.tokens[i]])
            for i in places
        ]
        texts.append("".join(pieces).replace("][", ""))
    return texts, list(loaded.notes)


def refused(folder: Path, rows: list[dict[str, Any]], stage: str = "sft", **data: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, rows, stage, **data)
    return str(caught.value).partition("rows.jsonl, ")[2]


def turns(*texts: str, **last: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return [*found[:-1], {**found[-1], **last}]


WHOLE: dict[str, Any] = {"template": "chat", "response_column": ""}
ROW: dict[str, Any] = {"prompt": "<s>why", "response": "so", "label": True, "chosen": "so", "rejected": "no"}


@pytest.mark.parametrize(
    ("stage", "trained"), [("sft", "[so</s>]"), ("kd", "[so</s>]"), ("kto", "[so</s>]"), ("dpo", "[so</s>]"), ("rm", "so</s>[</s>]")]
)
def test_a_text_has_one_first_token(tmp_path: Path, stage: str, trained: str) -> None:
    for prompt in ("why", "<s>why", " <s>why", "<s><s>why"):
        assert read(tmp_path, [{**ROW, "prompt": prompt}], stage)[0][0] == f"<s>why{trained}", prompt
    assert read(tmp_path, [ROW], stage, input_template="Q: {}")[0][0] == f"<s>Q: why{trained}"
    assert read(tmp_path, [ROW], stage, add_bos=False)[0][0] == f"<s>why{trained}", "the row's own"
    found, notes = read(tmp_path, [ROW], stage, "<s>" + TEMPLATE, template="chat")
    assert found[0].startswith("<s>uwhy;a") and any("turns that begin with the beginning-of-text token" in note for note in notes)


def test_whole_texts_and_steps_have_one_first_token(tmp_path: Path) -> None:
    whole = {"train_on": "all", "prompt_column": "text", "response_column": ""}
    assert read(tmp_path, [{"text": "<s>abc"}], **whole)[0] == ["<s>[abc]"]
    assert read(tmp_path, [{"prompt": "why", "response": "<s>so"}])[0] == ["<s>why[so</s>]"]
    steps = {"placeholder_token": ";", "reward_tokens": ["1", "0"]}
    assert read(tmp_path, [{"prompt": "<s>ab;", "label": ["1"]}], "prm", **steps)[0] == ["<s>ab;[</s>]"]


@pytest.mark.parametrize("written", [json.dumps, repr])
def test_conversations_that_are_text_are_read(tmp_path: Path, written: Any) -> None:
    asked, pair = (
        turns("why?", "so", "and?"),
        {"prompt": "why", "chosen": written(turns("why", "so")), "rejected": written(turns("why", "no"))},
    )
    assert read(tmp_path, [{"prompt": written(asked), "response": "it's"}], template="chat")[0] == ["uwhy?;aso;uand?;a[it's;]"]
    assert read(tmp_path, [{"prompt": written(turns("why", "so"))}], train_on="assistant", **WHOLE)[0] == ["uwhy;a[so;]"]
    assert read(tmp_path, [pair], "dpo", template="chat")[0] == ["uwhy;a[so;]", "uwhy;a[no;]"]
    assert "set data.template to chat" in refused(tmp_path, [{"prompt": written(asked), "response": "b"}])
    said = refused(tmp_path, [{"prompt": written(asked)[:-3], "response": "b"}], template="chat")
    assert said.startswith("line 1: column `prompt` begins like a list of turns, and is neither JSON nor a Python list")
    for text in ('{"a": 1}', '{"a": {"role": 1}}', "{a: 'role': }", '"role": 1'):
        assert read(tmp_path, [{"prompt": text, "response": "b"}])[0] == [f"<s>{text}[b</s>]"], "no turns"


@pytest.mark.parametrize(
    "written",
    [
        lambda turns: json.dumps([{"id": 3, "name": None, **turn} for turn in turns]),
        lambda turns: json.dumps([dict(reversed(turn.items())) for turn in turns], indent=2),
        lambda turns: json.dumps(json.dumps(turns)),
        lambda turns: repr(tuple(turns)),
        lambda turns: "\ufeff\n" + json.dumps(turns),
    ],
)
def test_conversations_are_read_in_whatever_way_they_are_text(tmp_path: Path, written: Any) -> None:
    text = written(turns("why", "so"))
    assert read(tmp_path, [{"prompt": text}], train_on="assistant", **WHOLE)[0] == ["uwhy;a[so;]"]
    assert "set data.template to chat" in refused(tmp_path, [{"prompt": text, "response": "b"}])


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_a_text_with_a_conversation_among_other_things_is_refused(tmp_path: Path, name: str) -> None:
    text = json.dumps({"id": 1, name: turns("why", "so"), "tools": []})
    for data in ({"train_on": "assistant", **WHOLE}, {}):
        assert f"has an object with the conversation in its `{name}`" in refused(tmp_path, [{"prompt": text, "response": "b"}], **data)


@pytest.mark.parametrize(
    "key",
    [
        *({"loss": False}, {"weight": 0.0}, {"trainable": "false"}, {"train": 0}, {"masked": True}, {"loss_mask": 0}),
        *({"is_trained": "off"}, {"lossMask": "0"}, {"Should-Train": False}, {"compute_loss": 0}, {"no_loss": 1}, {"is_masked": "on"}),
    ],
)
@pytest.mark.parametrize("contract", ["own", "openrlhf"])
def test_turns_that_say_so_are_not_trained(tmp_path: Path, key: dict[str, Any], contract: str) -> None:
    row = {"prompt": [*turns("a", "bad", **key), *turns("b", "good", weight=1)]}
    for train_on in ("assistant", "response", "all"):
        found, notes = read(tmp_path, [{"prompt": turns("c", "d")}, row], train_on=train_on, contract=contract, **WHOLE)
        assert "bad" in found[1].replace("[", "|").replace("]", "|").split("|")[0 if train_on != "all" else 2], found
        assert "good" in found[1].rpartition("[")[2]
        assert any(
            note.startswith("turns that are not trained because they say so: ") and "(1 of 2 rows, first line 2)" in note for note in notes
        )


def test_what_turns_say_of_training_is_kept_or_refused(tmp_path: Path) -> None:
    say = lambda row, **more: refused(tmp_path, [{"prompt": row}], **{"train_on": "assistant", **WHOLE, **more})  # noqa: E731
    assert say(turns("a", "b", weight=0.5)).startswith(
        "line 1: turn 2 has `weight: 0.5`, and only 0 and 1 (or false and true) are supported"
    )
    assert say(turns("a", "b", loss=0, train=True)).startswith(
        "line 1: turn 2 has `loss: 0` and `train: true`, which contradict each other"
    )
    assert "turn 2 has `mask: 1`, which may mean" in say(turns("a", "b", mask=1))
    assert "which trains parts of a turn" in say(turns("a", "b", train_detail=[{"begin_offset": 0, "end_offset": 1, "train": False}]))
    assert "the response says `loss: 0`, so nothing is left" in say(turns("a", "b", loss=0), train_on="response")
    assert "nothing is left to train on" in say(turns("a", "b", loss=0))
    row = {"prompt": [*turns("a", "b", train=True), *turns("c", "d")]}
    assert any("`train: true` (1 of 1 rows" in note for note in read(tmp_path, [row], **WHOLE)[1]), "data.train_on is response"
    reply = {"prompt": "q", "response": [*turns("x", "b", weight=0)[1:], *turns("c", "d")]}
    assert read(tmp_path, [reply], template="chat")[0] == ["uq;ab;uc;a[d;]"], "a response of several turns"
    assert trained({"role": "assistant", "loss": None}) == (None, "")


def test_keys_and_columns_that_nothing_reads_are_named(tmp_path: Path) -> None:
    thought = [{"prompt": turns("a", "b")}, {"prompt": turns("a", "b", reasoning_content="hm", audio=None), "id": 7, "note": None}]
    found, notes = read(tmp_path, thought, train_on="assistant", **WHOLE)
    assert found[1] == "ua;a[b;]" and notes == [
        "keys of turns that the chat template does not read: `reasoning_content` (1 of 2 rows, first line 2)",
        "columns that nothing reads: `id` (1 of 2 rows, first line 2)",
    ]
    thinks = TEMPLATE.replace("{{ m['content'] }}", "{{ m.reasoning_content }}{{ m['content'] }}")
    found, notes = read(tmp_path, thought[1:], chat=thinks, train_on="assistant", **WHOLE)
    assert found == ["ua;a[hmb;]"] and not any("keys of turns" in note for note in notes)
    mentions = TEMPLATE + "{# reasoning_content #}"
    assert any("`reasoning_content`" in note for note in read(tmp_path, thought, chat=mentions, train_on="assistant", **WHOLE)[1])
    assert any(
        "`weight`" in note
        for note in read(tmp_path, [{"prompt": "a", "chosen": turns("x", "b", weight=0)[1:], "rejected": "c"}], "rm", template="chat")[1]
    )
    columns = {"prompt": "a", "response": "b", "tools": [{"name": "f"}], "margin": 1}
    assert read(tmp_path, [columns])[1] == [
        "columns that nothing reads: `tools` (1 of 1 rows, first line 1), `margin` (1 of 1 rows, first line 1)"
    ]


@pytest.mark.parametrize("stage", ["dpo", "rm"])
@pytest.mark.parametrize("contract", ["own", "openrlhf"])
def test_pairs_that_repeat_the_prompt_have_it_once(tmp_path: Path, stage: str, contract: str) -> None:
    told = [{"role": "system", "content": "S"}]
    asked = turns("p", "q", "r")
    for prompt, before in (("r", []), (asked, []), (asked, asked), ([*told, *asked], asked), (asked, asked[2:]), (asked, [*told, *asked])):
        sides = [[*(before or turns("r") * (prompt == "r")), {"role": "assistant", "content": text}] for text in ("yes", "no")]
        found, _ = read(tmp_path, [{"prompt": prompt, "chosen": sides[0], "rejected": sides[1]}], stage, template="chat", contract=contract)
        plain = [text.replace("[", "").replace("]", "") for text in found]
        assert all(text.count("ur;") == 1 for text in plain) and "ayes;" in plain[0] and "ano;" in plain[1], (prompt, before)
        assert ("sS;" in plain[0]) == (told[0] in [*before, *prompt])
    found, notes = read(tmp_path, [{"prompt": "Who?", "chosen": "Who? Me", "rejected": "Who? You"}], stage, contract=contract)
    assert all(text.count("Who?") == 1 for text in found) and "which is trained once (first line 1)" in notes[0]


def test_responses_that_repeat_the_prompt_have_it_once(tmp_path: Path) -> None:
    assert read(tmp_path, [{"prompt": "Who?", "response": turns("Who?", "Me")}], template="chat")[0] == ["uWho?;a[Me;]"]
    assert read(tmp_path, [{"prompt": "Who?", "response": turns("Who?", "Me")}], template="chat", train_on="assistant")[0] == [
        "uWho?;a[Me;]"
    ]
    assert read(tmp_path, [{"prompt": "Who?", "response": "Who? Me"}], template="chat")[0] == ["uWho?;a[Me;]"]
    assert read(tmp_path, [{"prompt": "H", "response": "Hi"}])[0] == ["<s>H[Hi</s>]"], "within a word by chance"


def test_what_may_repeat_the_prompt_is_refused_or_named(tmp_path: Path) -> None:
    one = {"prompt": "Who?", "chosen": "Who? Me", "rejected": "You"}
    assert refused(tmp_path, [one], "dpo").startswith("line 1: a response begins with the prompt's text, and line 1 has one that does not")
    others = [{"prompt": f"q{n}?", "chosen": "yes", "rejected": "no"} for n in range(30)]
    found, notes = read(tmp_path, [*others, one], "dpo")
    assert found[-2] == "<s>Who?[Who? Me</s>]" and "taken as responses that quote it (first line 31)" in notes[0]
    other = {"prompt": "Who?", "chosen": turns("What?", "Me"), "rejected": turns("Who?", "You")}
    assert "line 1: column `chosen` begins with a turn of role `user` that is not the prompt" in refused(
        tmp_path, [other], "dpo", template="chat"
    )
    nothing = {**other, "chosen": turns("Who?")}
    assert "column `chosen` repeats the prompt and has no response" in refused(tmp_path, [nothing], "dpo", template="chat")
    system = {**other, "chosen": [{"role": "system", "content": "S"}, *turns("Who?", "Me")]}
    assert "have different turns before the response" in refused(tmp_path, [system], "dpo", template="chat")


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ({"role": "gpt", "content": "b"}, "turn 2 has the role `gpt`, which the chat template does not know; name it `assistant`"),
        ({"role": "Assistant", "content": "b"}, "turn 2 has the role `Assistant`, which the chat template does not know; name it"),
        ({"role": "assistant", "content": 7}, "turn 2 has 7 as `content`, which is no text; give it a string"),
        ({"role": "assistant", "content": " "}, "turn 2 is empty, and it would be trained; fix or remove the row"),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
            "turn 2 has a list as `content`, which the chat template writes",
        ),
    ],
)
def test_turns_that_are_none_are_refused(tmp_path: Path, turn: dict[str, Any], says: str) -> None:
    for train_on in ("response", "assistant"):
        assert says in refused(tmp_path, [{"prompt": [*turns("a"), turn]}], train_on=train_on, **WHOLE)


def test_a_template_without_roles_is_named(tmp_path: Path) -> None:
    chat = "{% for m in messages %}{% if m.role == 'user' %}<{{ m.content }}>{% else %}{{ m.content }};{% endif %}{% endfor %}"
    row = {"prompt": [{"role": "system", "content": "S"}, *turns("a", "b")]}
    found, notes = read(tmp_path, [row], chat=chat, train_on="assistant", **WHOLE)
    assert found == ["S;<a>[b;]"]
    assert notes == ["roles of turns that the chat template writes as if they were the assistant's: `system` (1 of 1 rows, first line 1)"]
