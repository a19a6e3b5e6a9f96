"""Multi-turn rollouts: a user's agent answers the policy, and its text is not trained on."""
