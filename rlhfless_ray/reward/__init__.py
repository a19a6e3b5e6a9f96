"""Responses → rewards: the built-in verifiers and a user's Python function, each scored in its own processes."""
