"""Scaling decisions: how many actors and slots to hold, for how long, and whether a prefix service pays."""
