"""Names that reward and agent files import from OpenRLHF and vLLM, offered where those are not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

# module → where its names come from
OFFERED = {
    "openrlhf": {},
    "openrlhf.utils": {"extract_boxed_answer": "reward.boxed", "grade_answer": "reward.boxed"},
    "openrlhf.utils.math_utils": {"extract_boxed_answer": "reward.boxed", "grade_answer": "reward.boxed"},
    "openrlhf.utils.logging_utils": {"init_logger": "reward.offered"},
    "openrlhf.utils.agent": {name: "agent.base" for name in ("AgentInstanceBase", "AgentExecutorBase", "MultiTurnAgentExecutor")},
    "vllm": {"SamplingParams": "agent.params"},
}


def offer() -> None:
    """Put the modules into this process, those that cannot be imported. A package that is installed stays as it is."""
    missing = [root for root in {name.partition(".")[0] for name in OFFERED} if not _installed(root)]
    for name, names in OFFERED.items():
        root, _, rest = name.partition(".")
        if root not in missing or (name in sys.modules and not rest):
            continue
        module = types.ModuleType(name, f"What rlhfless_ray offers of {name}.")
        module.__path__ = []  # type: ignore[attr-defined]
        for attribute, source in names.items():
            setattr(module, attribute, getattr(importlib.import_module(f"rlhfless_ray.{source}"), attribute))
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _installed(root: str) -> bool:
    """Whether the real package is there, or was offered already. A launcher's import shim makes an empty `openrlhf`: no more."""
    within = next((name for name in OFFERED if name.startswith(f"{root}.")), root)
    if within in sys.modules:
        return True
    try:
        return importlib.util.find_spec(within) is not None
    except ModuleNotFoundError:
        return False


def init_logger(name: str):  # type: ignore[no-untyped-def]
    import logging

    return logging.getLogger(name)
