"""Rows of a data set or of a built-in task → Prompt."""
