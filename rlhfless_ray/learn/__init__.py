"""Learning: advantages, losses and the learner gang."""
