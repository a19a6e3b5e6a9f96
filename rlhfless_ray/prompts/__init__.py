"""Convert rows of data sets and built-in tasks to prompts."""
