"""One step's plan, requests, groups and prefix KV."""
