"""The cluster simulator: the planner's code in virtual time, on clusters and models given as data.

from placement.simulate import named, simulate
run = simulate(named("qwen3b-gsm8k-grpo"), ["fixed", "ours"])
run.policies["ours"].step_s, run.policies["ours"].full
"""

from placement.simulate.policies import POLICIES
from placement.simulate.run import PolicyRun, Run, simulate
from placement.simulate.setting import Setting, load, named, names, parse
from placement.simulate.step import Hold, Knobs, StepRun
from placement.simulate.terms import Terms

__all__ = [
    "POLICIES",
    "Hold",
    "Knobs",
    "PolicyRun",
    "Run",
    "Setting",
    "StepRun",
    "Terms",
    "load",
    "named",
    "names",
    "parse",
    "simulate",
]
