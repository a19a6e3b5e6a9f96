"""Rollout: engines that turn requests into completions."""
