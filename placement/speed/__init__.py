"""Speed models: rooflines, and fits to measured times."""
