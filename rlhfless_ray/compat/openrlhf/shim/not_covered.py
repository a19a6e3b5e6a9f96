"""What a launcher that only OpenRLHF itself runs says where OpenRLHF is not installed."""

import sys

name = next((argument for argument in sys.orig_argv if "openrlhf.cli." in argument), "this launcher").removeprefix("-m")
if name == "openrlhf.cli.train_ppo":
    said = ": OpenRLHF had it until 0.6.1; start openrlhf.cli.train_ppo_ray instead"
else:
    said = " is not covered by rlhfless_ray: it is no Ray program; install OpenRLHF to run it"
print(f"error: {name}{said}", file=sys.stderr)
sys.exit(2)
