"""Errors, deadlines, timing and other helpers that several folders use."""
