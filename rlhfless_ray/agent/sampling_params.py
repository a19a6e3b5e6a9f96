"""`vllm.SamplingParams` for agent files in a process without vLLM."""

from __future__ import annotations

from copy import deepcopy


class SamplingParams:
    """Take any of vLLM's arguments by keyword; those that agents read have vLLM's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __init__(self, **arguments: object) -> None:
        vars(self).update(arguments)

    def clone(self) -> SamplingParams:
        return deepcopy(self)
