"""Conversations as token ids: what was sampled is found again in every template, and each sampled token is trained once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.agent.engine_api import PolicyReply
from rlhfless_ray.door.conversation import BadRequest, Turn, TurnTree, branches_of, read_messages
from rlhfless_ray.door.tool_calls import reply_message
from tests.chat_policy import chat_tokenizer

pytestmark = pytest.mark.pure
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

# each as its family renders turns, tools, calls and results; in Llama's and Gemma's, contents are trimmed
CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}{% if not loop.first or m.content %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|eot_id|>{% endif %}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    '{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    '{% elif m.tool_calls %}[TOOL_CALLS][{"name": "{{ m.tool_calls[0].function.name }}", "arguments": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
# template, the token that ends a turn, and how the policy calls a tool, None if the template has no tools
FAMILIES = {
    "chatml": (CHATML, "<|im_end|>", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
    "llama": (LLAMA, "<|eot_id|>", '{"name": "add", "parameters": {"a": 1}}'),
    "gemma": (GEMMA, "<end_of_turn>", None),
    "mistral": (MISTRAL, "</s>", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'),
}
SPECIAL = (
    "<|im_end|> <|eot_id|> <end_of_turn> </s> <s> <bos> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <start_of_turn> [INST] "
    "[/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    texts = tmp_path_factory.mktemp("texts") / "texts.txt"
    texts.write_text("the sum of the numbers is the number of the sum " * 9)
    tokenizer = chat_tokenizer(texts)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *SPECIAL.split()]})
    return tokenizer


class Policy:
    """Writes given texts letter by letter, as no tokenizer would, and ends its turns with a family's token."""

    def __init__(self, tokenizer: Any, end: str) -> None:
        self.tokenizer, self.end = tokenizer, end

    def reply(self, text: str, finish_reason: str = "stop") -> PolicyReply:
        pieces = [text] if text.startswith("[TOOL_CALLS]") else list(text)
        ids = [token for piece in pieces for token in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]
        ids += self.tokenizer(self.end)["input_ids"] if finish_reason == "stop" else []
        return PolicyReply(ids, text, [-0.5 - 0.01 * i for i in range(len(ids))], finish_reason)


def say(conversation: TurnTree, messages: list[dict[str, Any]], reply: PolicyReply, tools: Any = ()) -> tuple[Turn, dict[str, Any]]:
    """A request and the policy's reply, as the server does it. Returns the turn and the message that the client gets."""
    read = read_messages(messages)
    turn = conversation.add(conversation.chat_context(read, list(tools)), reply)
    message = reply_message(reply.text, list(tools))
    conversation.remember_chat(turn, read, list(tools), message)
    return turn, message


def trained_ids(conversation: TurnTree) -> Iterator[list[int]]:
    for branch in branches_of(conversation.turns):
        yield branch.token_ids[branch.trained].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_conversation_keeps_every_sampled_token(tokenizer: Any, family: str) -> None:
    tokenizer.chat_template, end, call = FAMILIES[family]
    conversation, policy, tools = TurnTree(tokenizer), Policy(tokenizer, end), TOOLS if call else []
    messages: list[dict[str, Any]] = [{"role": "user", "content": "the sum of 1"}]
    replies = [policy.reply("the number is"), policy.reply(call or "the sum"), policy.reply("  the end ")]
    turns = []
    for number, reply in enumerate(replies):
        turn, message = say(conversation, messages, reply, tools)
        turns.append(turn)
        message = {**message, "refusal": None, "audio": None}  # as clients return what they got
        is_call = bool(message.get("tool_calls"))
        assert is_call == (bool(call) and number == 1)
        if is_call:
            messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}]
        else:
            messages += [message, {"role": "user", "content": [{"type": "text", "text": "and the sum?"}]}]
    for before, after in itertools.pairwise(turns):
        assert after.context[: len(before.token_ids)] == before.token_ids, "what was sampled is not tokenized again"
    whole = tokenizer.apply_chat_template(read_messages(messages[:-2]), tools=tools or None, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(list(turns[-1].context)) == whole, "the policy reads what the template writes"
    (branch,) = branches_of(conversation.turns)
    assert branch.token_ids[branch.trained].tolist() == [token for reply in replies for token in reply.token_ids]
    assert branch.logprobs[branch.trained].tolist() == pytest.approx([value for reply in replies for value in reply.logprobs])
    assert (branch.turns, branch.is_truncated, branch.prompt_tokens) == (3, False, len(turns[0].context))


def test_truncated_reply_is_closed_by_the_template(tokenizer: Any) -> None:
    tokenizer.chat_template, end, _ = FAMILIES["chatml"]
    conversation, policy = TurnTree(tokenizer), Policy(tokenizer, end)
    first = [{"role": "user", "content": "the sum"}]
    turn, message = say(conversation, first, policy.reply("the numb", "length"))
    context = conversation.chat_context(read_messages([*first, message, {"role": "user", "content": "go on"}]), [])
    assert tuple(context[: len(turn.token_ids)]) == turn.token_ids
    assert tokenizer.decode(context[len(turn.token_ids) :]) == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_changed_histories_fork_and_nothing_is_trained_twice(tokenizer: Any) -> None:
    tokenizer.chat_template, end, _ = FAMILIES["chatml"]
    conversation, policy = TurnTree(tokenizer), Policy(tokenizer, end)
    begin = [{"role": "system", "content": "the"}, {"role": "user", "content": "the sum"}]
    texts = ["<think>the number</think>of", "one", "two", "three", "four"]
    replies = [policy.reply(text) for text in texts]
    _, first = say(conversation, begin, replies[0])
    long = [*begin, first, {"role": "user", "content": "more"}]
    _, second = say(conversation, long, replies[1])
    say(conversation, [*long, second, {"role": "user", "content": "more"}], replies[2])
    say(conversation, [*begin, {**first, "content": "of"}, {"role": "user", "content": "more"}], replies[3])  # its thinking is left out
    say(conversation, [{"role": "user", "content": "a summary of the sum"}], replies[4])  # a compacted context
    branches = branches_of(conversation.turns)
    assert [branch.turns for branch in branches] == [3, 1, 1]
    wanted = [[*replies[0].token_ids, *replies[1].token_ids, *replies[2].token_ids], replies[3].token_ids, replies[4].token_ids]
    assert list(trained_ids(conversation)) == wanted


def test_reply_that_branches_share_is_context_of_the_second(tokenizer: Any) -> None:
    tokenizer.chat_template, end, _ = FAMILIES["chatml"]
    conversation, policy = TurnTree(tokenizer), Policy(tokenizer, end)
    begin = [{"role": "user", "content": "the sum"}]
    _, first = say(conversation, begin, policy.reply("of"))
    for question in ("one", "two"):
        turn, _ = say(conversation, [*begin, first, {"role": "user", "content": question}], policy.reply("the number"))
    shared, second = branches_of(conversation.turns)
    assert (shared.turns, second.turns) == (2, 1) and second.prompt_tokens == len(turn.context)


def test_text_prompts_continue_what_was_sampled(tokenizer: Any) -> None:
    tokenizer.chat_template, end, _ = FAMILIES["chatml"]
    conversation, policy = TurnTree(tokenizer), Policy(tokenizer, end)
    turn = conversation.add(conversation.text_context("the sum "), policy.reply("is the"))
    conversation.remember_text(turn, "the sum ")
    context = conversation.text_context("the sum is the number")
    assert tuple(context[: len(turn.token_ids)]) == turn.token_ids
    assert tokenizer.decode(context[len(turn.token_ids) :]) == " number"


def test_without_a_template_texts_are_joined(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    ids = TurnTree(tokenizer).chat_context(read_messages([{"role": "user", "content": "the sum"}]), [])
    assert ids == tokenizer("the sum")["input_ids"]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "messages: expected a list"),
        ([], "at least one message"),
        ([{"content": "x"}], r"messages\[0\]: expected an object with a role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content: a part of type image_url is not supported"),
        ([{"role": "assistant", "tool_calls": [{"id": 1}]}], "expected objects with function.name"),
    ],
)
def test_malformed_messages_are_named(messages: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        read_messages(messages)


def test_failing_template_is_a_bad_request(tokenizer: Any) -> None:
    tokenizer.chat_template = GEMMA
    with pytest.raises(BadRequest, match="no system role"):
        TurnTree(tokenizer).chat_context([{"role": "system", "content": ""}], [])


@given(st.lists(st.tuples(st.integers(-1, 9), st.lists(st.integers(0, 2), max_size=3), st.integers(1, 3)), min_size=1, max_size=10))
def test_each_sampled_token_of_a_tree_is_trained_once(shape: list[tuple[int, list[int], int]]) -> None:
    """Draw turns that each continue an earlier one, or begin anew. Token ids of replies name them, so that each is known again."""
    turns: list[Turn] = []
    for number, (parent, more, length) in enumerate(shape):
        before = turns[parent].token_ids if 0 <= parent < number else (1,)
        names = [10 + 10 * number + i for i in range(length)]
        turns.append(Turn((*before, *more), PolicyReply(names, "", [-float(name) for name in names], "stop")))
    branches = branches_of(turns)
    trained = [token for branch in branches for token in branch.token_ids[branch.trained].tolist()]
    assert sorted(trained) == sorted(token for turn in turns for token in turn.reply.token_ids)
    for branch in branches:
        assert np.array_equal(branch.logprobs, np.where(branch.trained, -branch.token_ids.astype(np.float32), 0))
        assert any(tuple(branch.token_ids.tolist()) == turn.token_ids for turn in turns)
        assert not branch.trained[: branch.prompt_tokens].any()
