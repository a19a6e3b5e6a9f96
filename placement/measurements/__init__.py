"""What a run measures, how far predictions made of it were off, and what it tries."""
