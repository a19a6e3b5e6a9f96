"""What one step consists of: its plan, its requests, its groups and its prefix KV."""
