"""Names that Ray's processes and this project's starters share."""

AUTH_MODE = "RAY_AUTH_MODE"  # Ray's variable; token: this process shows a cluster's token
PACKAGES = ("rlhfless_ray", "placement")  # packages that a job takes along
