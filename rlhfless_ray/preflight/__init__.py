"""Check a run before it starts: its policy, and the memory that its processes need."""
