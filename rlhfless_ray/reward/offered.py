"""Names that reward and agent files import from OpenRLHF and vLLM, offered where those are not installed or do not work."""

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


ALWAYS = ("openrlhf.utils.agent",)
"""Ours in any case: it is this runtime that plays agents, and a file has to subclass the classes that it plays."""


def offer() -> None:
    """Put the modules into this process, those that cannot be imported. A package that is installed and works stays as it is,
    but for the classes of agents."""
    for root in dict.fromkeys(name.partition(".")[0] for name in OFFERED):
        names = [name for name in OFFERED if name.partition(".")[0] == root]
        for name in ([name for name in names if name in ALWAYS] if _works(root) else names):
            _put(name)


def _put(name: str) -> None:
    parent, _, child = name.rpartition(".")
    if isinstance(there := sys.modules.get(name), Offered) or (there is not None and not parent):
        return
    module = Offered(name, f"What rlhfless_ray offers of {name}.")
    module.__path__ = []  # type: ignore[attr-defined]
    for attribute, source in OFFERED[name].items():
        setattr(module, attribute, getattr(importlib.import_module(f"rlhfless_ray.{source}"), attribute))
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], child, module)


class Offered(types.ModuleType):
    """A module of ours under a name of theirs."""


def _works(root: str) -> bool:
    """Whether the real package is there and what files import from it can be imported: a checkout of OpenRLHF in the working folder
    is, but what it needs itself may not be installed. A launcher's import shim makes an empty `openrlhf`: no more."""
    within = next((name for name in OFFERED if name.startswith(f"{root}.")), root)
    if within in sys.modules:
        return not isinstance(sys.modules[within], Offered)
    try:
        if importlib.util.find_spec(within) is None:
            return False
        if within != root:
            importlib.import_module(within)
    except Exception:  # whatever a package raises that lacks what it needs
        for name in [name for name in sys.modules if name.startswith(f"{within}.")]:
            del sys.modules[name]
        return False
    return True


def init_logger(name: str):  # type: ignore[no-untyped-def]
    import logging

    return logging.getLogger(name)
