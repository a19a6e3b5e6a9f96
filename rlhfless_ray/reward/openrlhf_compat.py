"""Provide names that reward and agent files import from OpenRLHF and vLLM, where those are missing or broken."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

# module → {name: module of this package that defines it}
PROVIDED = {
    "openrlhf": {},
    "openrlhf.utils": {"extract_boxed_answer": "reward.math_answer", "grade_answer": "reward.math_answer"},
    "openrlhf.utils.math_utils": {"extract_boxed_answer": "reward.math_answer", "grade_answer": "reward.math_answer"},
    "openrlhf.utils.logging_utils": {"init_logger": "reward.openrlhf_compat"},
    "openrlhf.utils.agent": {
        name: "agent.openrlhf_classes" for name in ("AgentInstanceBase", "AgentExecutorBase", "MultiTurnAgentExecutor")
    },
    "vllm": {"SamplingParams": "agent.sampling_params"},
}


ALWAYS_PROVIDED = ("openrlhf.utils.agent",)
"""Replaced even if OpenRLHF works: this runtime runs the agents, so files must subclass its own classes."""


def install_modules() -> None:
    """Add the modules to `sys.modules` if they cannot be imported.

    A working package stays as it is, except for the agent classes.
    """
    for root in dict.fromkeys(name.partition(".")[0] for name in PROVIDED):
        names = [name for name in PROVIDED if name.partition(".")[0] == root]
        for name in [name for name in names if name in ALWAYS_PROVIDED] if _can_import(root) else names:
            _install(name)


def _install(name: str) -> None:
    parent, _, child = name.rpartition(".")
    if isinstance(there := sys.modules.get(name), ProvidedModule) or (there is not None and not parent):
        return
    module = ProvidedModule(name, f"rlhfless_ray's replacement for {name}.")
    module.__path__ = []  # type: ignore[attr-defined]
    for attribute, source in PROVIDED[name].items():
        setattr(module, attribute, getattr(importlib.import_module(f"rlhfless_ray.{source}"), attribute))
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], child, module)


class ProvidedModule(types.ModuleType):
    """A module of this package under the name of an external one."""


def _can_import(root: str) -> bool:
    """Return whether the real package and the modules that user files need can be imported.

    A checkout of OpenRLHF in the working folder can be found, but its own dependencies may be missing. The launchers' import
    shim provides an empty `openrlhf` only.
    """
    within = next((name for name in PROVIDED if name.startswith(f"{root}.")), root)
    if within in sys.modules:
        return not isinstance(sys.modules[within], ProvidedModule)
    try:
        if importlib.util.find_spec(within) is None:
            return False
        if within != root:
            importlib.import_module(within)
    except Exception:  # missing dependencies can raise anything
        for name in [name for name in sys.modules if name.startswith(f"{within}.")]:
            del sys.modules[name]
        return False
    return True


def init_logger(name: str):  # type: ignore[no-untyped-def]
    import logging

    return logging.getLogger(name)
