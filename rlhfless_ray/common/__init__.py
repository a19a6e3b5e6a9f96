"""Errors, deadlines, timing and pre-flight checks that every other folder uses."""
