"""Stand in for a launcher that needs OpenRLHF itself, if OpenRLHF is not installed: print an error and exit."""

import sys

name = next((argument for argument in sys.orig_argv if ".cli." in argument), "this launcher").removeprefix("-m")
if name == "openrlhf.cli.train_ppo":
    message = ": OpenRLHF removed it after 0.6.1; start openrlhf.cli.train_ppo_ray instead"
else:
    message = " is not covered by rlhfless_ray yet; install its own package to run it"
print(f"error: {name}{message}", file=sys.stderr)
sys.exit(2)
