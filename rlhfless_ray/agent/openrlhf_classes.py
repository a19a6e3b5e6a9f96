"""The base classes of OpenRLHF's `openrlhf.utils.agent`: those of 0.8.7 to 0.9.0 and of 0.9.1 onwards in one."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from rlhfless_ray.agent.multi_turn_loop import AgentError, play

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AgentInstanceBase:
    """The environment of one sample."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    async def reset(self, states: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        return states

    async def step(self, state_dict: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__}.step is not implemented")


class AgentExecutorBase:
    """Play one sample.

    From 0.9.1 on the constructor takes no arguments and `execute` takes everything. Before, the constructor took an agent
    class, limits, an engine, a tokenizer and a result queue.
    """

    def __init__(
        self,
        agent_instance_cls: type | None = None,
        max_steps: int | None = None,
        max_length: int | None = None,
        llm_engine: Any = None,
        hf_tokenizer: PreTrainedTokenizerBase | None = None,
        result_queue: Any = None,
    ) -> None:
        if agent_instance_cls is not None and not issubclass(agent_instance_cls, AgentInstanceBase):
            raise AgentError(f"{agent_instance_cls.__name__} must inherit from AgentInstanceBase")
        self.agent_instance_cls = agent_instance_cls
        self.max_steps, self.max_length = max_steps, max_length
        self.llm_engine, self.hf_tokenizer, self.result_queue = llm_engine, hf_tokenizer, result_queue

    async def generate(self, prompt_ids: list[int], sampling_params: Any) -> Any:
        return await self.llm_engine.generate(prompt_ids, sampling_params)

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int | None = None,
        hf_tokenizer: PreTrainedTokenizerBase | None = None,
        llm_engine: Any = None,
        images: Any = None,
    ) -> dict[str, Any] | None:
        if self.agent_instance_cls is None:
            raise NotImplementedError(f"{type(self).__name__}.execute is not implemented")
        if images:
            raise AgentError("the prompt has images, which this runtime does not support")
        result = await play(
            await construct(self.agent_instance_cls),
            prompt,
            label,
            sampling_params,
            max_length or self.max_length,  # type: ignore[arg-type]
            hf_tokenizer or self.hf_tokenizer,
            llm_engine or _OwnGenerate(self),
            max_turns=self.max_steps,
        )
        if self.result_queue is None:
            return result
        await self.result_queue.put(result)
        return None


class _OwnGenerate:
    """An executor's own `generate`, which a subclass may override."""

    def __init__(self, executor: AgentExecutorBase) -> None:
        self.executor = executor

    async def generate(self, token_ids: list[int], sampling_params: object) -> Any:
        return await self.executor.generate(token_ids, sampling_params)


class MultiTurnAgentExecutor(AgentExecutorBase):
    def __init__(self, agent_instance_cls: type) -> None:
        super().__init__(agent_instance_cls)


async def construct(agent_class: Any) -> Any:
    """Create an instance. Some examples have `async def __init__`, which was legal while instances were Ray actors."""
    instance = agent_class.__new__(agent_class)
    pending: Any = agent_class.__init__(instance)
    if inspect.isawaitable(pending):
        await pending
    return instance
