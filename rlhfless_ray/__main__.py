"""`python -m rlhfless_ray …` is `rlhfless …`."""

from rlhfless_ray.cli.main import main

main()
