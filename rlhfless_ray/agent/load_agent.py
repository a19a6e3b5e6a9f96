"""Load agent files of every OpenRLHF contract, and play a prompt with them.

0.8.0 – 0.8.2   async def step(state, action, label) -> (reward, next_state, done, extra_info)
0.8.3 – 0.8.6   async def step(observation, action, label) -> {rewards, scores, next_state or next_observation, done, …}
0.8.7 – 0.9.0   class AgentExecutor, constructed with (max_steps, max_length, llm_engine, hf_tokenizer, result_queue)
0.9.1 –         class AgentExecutor, constructed without arguments
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlhfless_ray.agent.engine_api import AgentEngine, Generate
from rlhfless_ray.agent.episode import BadEpisode, Episode
from rlhfless_ray.agent.episode_source import EpisodeSource
from rlhfless_ray.agent.multi_turn_loop import AgentError, play
from rlhfless_ray.agent.openrlhf_classes import AgentExecutorBase, AgentInstanceBase
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.reward.user_file import UserFile
from rlhfless_ray.reward.values import describe_exception

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_STEPS = 10_000  # passed to the constructors of 0.8.7 to 0.9.0
KEY = "agent.path"
SHIPPED = {"calculator": Path(__file__).with_name("calculator.py")}  # agents by name
CONTRACT = "write `class AgentExecutor(MultiTurnAgentExecutor)`, whose constructor needs no arguments"


@dataclass(frozen=True)
class AgentSource(EpisodeSource):
    """An agent file. It pickles."""

    file: UserFile
    contract: str  # "step", "queue" (0.8.7 – 0.9.0) or "executor"

    @classmethod
    def load(cls, path: str) -> AgentSource:
        """Run the file's top-level code once and find its contract.

        Raises UserError for a missing file, one that fails to load (with its line), and one that fits no contract.
        """
        where = f"{KEY} {path}"
        file = UserFile.read(str(SHIPPED.get(path, path)), where)
        return cls(file, _find_contract(file.checked_module(where), where))

    @property
    def where(self) -> str:
        return f"{KEY} {self.file.path}"

    def player(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Player:
        return Player(self, tokenizer, max_length)


def _find_contract(module: ModuleType, where: str) -> str:
    executor = getattr(module, "AgentExecutor", None)
    if executor is None:
        step = getattr(module, "step", None)
        if not inspect.iscoroutinefunction(step):
            raise UserError(f"{where}: the file has neither a class `AgentExecutor` nor `async def step`; {CONTRACT}")
        if not _accepts(step, "", "", ""):
            raise UserError(f"{where}: `step{inspect.signature(step)}` cannot take (observation, action, label)")
        return "step"
    if not inspect.isclass(executor) or not issubclass(executor, AgentExecutorBase):
        raise UserError(f"{where}: `AgentExecutor` must inherit from AgentExecutorBase or MultiTurnAgentExecutor of openrlhf.utils.agent")
    if _accepts(executor):
        return "executor"
    if _accepts(executor, max_steps=0, max_length=0, llm_engine=0, hf_tokenizer=0, result_queue=0):
        return "queue"
    raise UserError(f"{where}: `AgentExecutor{inspect.signature(executor)}` needs arguments that are not passed; {CONTRACT}")


def _accepts(function: Any, *arguments: Any, **named_arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments, **named_arguments)
    except TypeError:
        return False
    return True


class Player:
    """Play prompts, many at once on one event loop.

    `max_length`: token limit of an episode.
    """

    def __init__(self, source: AgentSource, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self.source, self.tokenizer, self.max_length = source, tokenizer, max_length
        self.seats: AbstractAsyncContextManager[object] = nullcontext()
        self.executor: Any = None
        if source.contract != "step":
            executor_class = source.file.module().AgentExecutor
            self.executor = (
                executor_class()
                if source.contract == "executor"
                else executor_class(
                    max_steps=MAX_STEPS,
                    max_length=max_length,
                    llm_engine=AgentEngine(_generate_for_sample),
                    hf_tokenizer=tokenizer,
                    result_queue=_ResultQueue(),
                )
            )

    async def play(self, prompt: str, label: object, sampling_params: object, generate: Generate) -> Episode | str:
        """Play one prompt. Returns the episode, or an error message."""
        _GENERATE.set(generate)
        try:
            # the episodes of a prompt have the same label, which an agent may change
            return Episode.of(await self._result(prompt, deepcopy(label), deepcopy(sampling_params), AgentEngine(generate)))
        except (AgentError, BadEpisode) as error:
            return str(error)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
                raise  # by the caller, not by the agent, which may cancel tasks of its own
            return describe_exception(error, self.source.file)

    async def _result(self, prompt: str, label: object, params: object, llm_engine: AgentEngine) -> Any:
        context = (self.max_length, self.tokenizer, llm_engine)
        if self.source.contract == "step":
            # a fresh module per sample, because files of this contract count their turns in globals
            agent = _StepFunctionAgent(self.source.file.module().step)
            return await play(agent, prompt, label, params, *context)
        if self.source.contract == "queue":
            results: list[Any] = []
            _RESULTS.set(results)
            await self.executor.execute(prompt, label, params)
            if len(results) != 1:
                raise AgentError(f"`execute` put {len(results)} results into its queue, not one")
            return results[0]
        keywords = dict(zip(("max_length", "hf_tokenizer", "llm_engine"), context, strict=True))
        # `images` exists since 0.10.0; older executors do not accept it
        optional = {"images": None} if _accepts(self.executor.execute, prompt, label, params, **keywords, images=None) else {}
        return await self.executor.execute(prompt=prompt, label=label, sampling_params=params, **keywords, **optional)


_RESULTS: ContextVar[list[Any]] = ContextVar("results of the current sample")
_GENERATE: ContextVar[Generate] = ContextVar("generate function of the current sample")


async def _generate_for_sample(token_ids: list[int], sampling_params: object) -> Any:
    """Call the current sample's `generate`, for executors that get their engine before any sample."""
    return await _GENERATE.get()(token_ids, sampling_params)


class _ResultQueue:
    """The result queue of 0.8.7 to 0.9.0. A result belongs to the sample whose task puts it."""

    async def put(self, result: object) -> None:
        _RESULTS.get().append(result)

    def put_nowait(self, result: object) -> None:
        _RESULTS.get().append(result)


class _StepFunctionAgent(AgentInstanceBase):
    """A `step` function of 0.8.0 to 0.8.6 as an agent. It returns the whole text, whose new end is the feedback."""

    def __init__(self, step: Any) -> None:
        self._step = step

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        seen, action = state_dict["observation_text"], state_dict["action_text"]
        params = {"sampling_params": state_dict["sampling_params"]}
        more_arguments = params if _accepts(self._step, seen, action, state_dict["label"], **params) else {}
        result = await self._step(seen, action, state_dict["label"], **more_arguments)
        optional: dict[str, Any] = {}
        if isinstance(result, Mapping):
            text = result.get("next_observation", result.get("next_state"))
            if text is None or "rewards" not in result or "done" not in result:
                keys = ", ".join(f"`{key}`" for key in result)
                raise AgentError(f"`step` must return a dict with `rewards`, `next_observation` and `done` (its keys: {keys})")
            rewards, done = result["rewards"], result["done"]
            optional = {key: result.get(key) for key in ("scores", "sampling_params", "extra_logs")}
        elif isinstance(result, tuple) and len(result) == 4:
            rewards, text, done, _ = result
        else:
            raise AgentError(f"`step` returned {type(result).__name__}, neither (reward, next_state, done, extra_info) nor a dict")
        feedback = ""
        if isinstance(text, str) and text.startswith(seen + action):
            feedback = text[len(seen + action) :]
        elif not done:
            raise AgentError("the next observation must begin with the observation and the action: what was sampled is trained")
        return {**optional, "rewards": rewards, "environment_feedback": feedback, "done": done}
