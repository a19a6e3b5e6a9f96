"""The planner: pure Python and numpy. Imports neither ray nor torch nor rlhfless_ray."""
