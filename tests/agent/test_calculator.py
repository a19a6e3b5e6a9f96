"""The agent `calculator`: values of expressions, and an episode."""

from __future__ import annotations

import asyncio

import pytest

from rlhfless_ray.agent.calculator import Calculator, calculate
from rlhfless_ray.agent.load_agent import AgentSource


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48 / 2", "24"),
        ("12 * (3 + 4)", "84"),
        ("-7 // 2 % 3", "2"),
        ("$1,200 + 0.5", "1200.5"),
        ("1 / 0", "error: ZeroDivisionError"),
        ("2 ** 9", "error: ValueError"),
        ("__import__('os')", "error: ValueError"),
        ("1 +", "error: SyntaxError"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


def test_an_episode_computes_once_and_is_scored() -> None:
    assert AgentSource.load("calculator").contract == "executor"

    async def play() -> list[dict]:
        agent = Calculator()
        await agent.reset({"observation": "What is 6 * 7?"})
        turns = ["I compute <tool>6 * 7</tool>", " so\n#### 42"]
        return [await agent.step({"action_text": text, "label": "It is 42.\n#### 42"}) for text in turns]

    first, last = asyncio.run(play())
    assert (first["environment_feedback"], first["done"], first["rewards"]) == ("<result>42</result>", False, 0.0)
    assert (last["environment_feedback"], last["done"], last["rewards"]) == ("", True, 1.0)
    assert last["extra_logs"] == {"tool_calls": 1}
