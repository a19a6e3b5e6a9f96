"""Compute rewards of responses: built-in verifiers, users' Python functions, reward models and HTTP servers."""
