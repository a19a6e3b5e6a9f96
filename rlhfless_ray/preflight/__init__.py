"""What a run is checked for before it starts: its policy, and the memory that its processes need."""
