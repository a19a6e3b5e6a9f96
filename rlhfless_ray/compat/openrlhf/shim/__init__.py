"""Folder for PYTHONPATH. It has no `openrlhf` package; sitecustomize.py says why."""
