"""Training with one call of a Python function. It makes a recipe of what it is given."""
