"""What a launcher that only OpenRLHF itself runs says where OpenRLHF is not installed."""

import sys

name = next((argument for argument in sys.orig_argv if "openrlhf.cli." in argument), "this launcher").removeprefix("-m")
print(f"error: {name} is not covered by rlhfless_ray: it is no Ray program; install OpenRLHF to run it", file=sys.stderr)
sys.exit(2)
