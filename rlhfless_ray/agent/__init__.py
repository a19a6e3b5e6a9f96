"""Rollouts of several turns: a user's agent answers the policy, and what it says is not trained on."""
