"""Sweeps: many runs on one cluster, a limited number at once."""
