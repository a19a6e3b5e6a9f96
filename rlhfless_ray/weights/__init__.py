"""Model folders and weight versions as values that travel through Ray."""
