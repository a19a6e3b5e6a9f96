"""Rollout: the driver has engines turn requests into completions."""
