"""Sweeps: many runs on one cluster, at most so many at once."""
