"""A run's shared objects and its files on disk."""
