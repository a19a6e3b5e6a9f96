"""The agent `calculator`: the policy may compute with `<tool>12 * (3 + 4)</tool>` inside its answer, and gets `<result>84</result>`.

The reward is that of `math` for the whole answer. Copy this file to write an agent with another tool.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from rlhfless_ray.agent.openrlhf_classes import AgentInstanceBase, MultiTurnAgentExecutor
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.reward.math_answer import math_reward

CALL, END = "<tool>", "</tool>"
MOST_CALLS, MOST_CHARACTERS, MOST_DIGITS = 8, 200, 30
OPERATIONS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers, `+ - * / // %` and brackets, or what is wrong with it."""
    try:
        if len(expression) > MOST_CHARACTERS:
            raise ValueError("too long")
        value = _value(ast.parse(expression.strip().replace(",", "").replace("$", ""), mode="eval").body)
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {type(error).__name__}"
    return f"{value:.10g}" if isinstance(value, float) else str(value)[:MOST_DIGITS]


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right)) if type(node.op) in OPERATIONS else _refuse()
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.operand))
    return _refuse()


def _refuse() -> float:
    raise ValueError("not an expression of numbers")


class Calculator(AgentInstanceBase):
    """One answer. A turn ends at `</tool>`, the recipe's stop word, or with the answer."""

    async def reset(self, states: JsonObject, **kwargs: object) -> JsonObject:
        self.calls, self.answer = 0, ""
        return {"observation": states["observation"]}

    async def step(self, state_dict: JsonObject, **kwargs: object) -> JsonObject:
        text = state_dict["action_text"]
        self.answer += text
        if text.rstrip().endswith(END) and CALL in text and self.calls < MOST_CALLS:
            self.calls += 1
            result = f"<result>{calculate(text.rpartition(CALL)[2].rpartition(END)[0])}</result>"
            self.answer += result
            return {"rewards": 0.0, "environment_feedback": result, "done": False, "extra_logs": {"tool_calls": self.calls}}
        reward = math_reward("", self.answer, {"answer": state_dict["label"]}, answer_column="answer")
        return {"rewards": reward, "environment_feedback": "", "done": True, "extra_logs": {"tool_calls": self.calls}}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self) -> None:
        super().__init__(Calculator)
