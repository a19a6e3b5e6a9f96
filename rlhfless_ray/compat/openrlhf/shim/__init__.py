"""A folder for PYTHONPATH. It holds no `openrlhf` package: see sitecustomize.py."""
