"""The cluster simulator: the planner's code in virtual time, on clusters and models given as data.

Examples
--------
>>> from placement.simulate import named, simulate
>>> run = simulate(named("qwen3b-gsm8k-grpo").but(epochs=1, prompts=8), ["fixed", "rlhfless-paper"])
>>> sorted(run.policies), run.policies["rlhfless-paper"].full < run.policies["fixed"].full
(['fixed', 'rlhfless-paper'], True)
"""

from placement.simulate.phase_times import PhaseTimes
from placement.simulate.setting import Setting, load, named, names, parse
from placement.simulate.simulate_run import PolicyRun, SimulatedRun, simulate
from placement.simulate.simulate_step import DeviceHold, StepPlanSettings, StepRun
from placement.simulate.step_policies import POLICIES, policies_of

__all__ = [
    "POLICIES",
    "DeviceHold",
    "PhaseTimes",
    "PolicyRun",
    "Setting",
    "SimulatedRun",
    "StepPlanSettings",
    "StepRun",
    "load",
    "named",
    "names",
    "parse",
    "policies_of",
    "simulate",
]
