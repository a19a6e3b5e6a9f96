"""What runs in an engine's process: vLLM, its drafts and its sampler, and the values that the driver exchanges with it."""
