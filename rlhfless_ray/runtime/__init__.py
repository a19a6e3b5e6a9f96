"""A run from assembly to export: its stages, the operations that the loop calls, and its checkpoints."""
