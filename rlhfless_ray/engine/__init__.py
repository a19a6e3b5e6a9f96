"""Run vLLM in an engine's process, with its drafts and its sampler, and exchange values with the driver."""
