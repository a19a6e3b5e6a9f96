"""Weights as values: folders as bytes, versions pulled by whoever needs them."""
