"""Starting or joining Ray, and what keeps a laptop's processes small and quick to start."""
