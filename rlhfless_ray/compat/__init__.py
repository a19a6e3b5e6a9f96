"""Command lines and files of other projects, run unchanged."""
