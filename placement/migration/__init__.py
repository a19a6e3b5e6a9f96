"""Migration: moving the sequences of a running rollout between actors."""
