"""Rollout plans: which actor decodes which sequences, and what that takes and costs."""
