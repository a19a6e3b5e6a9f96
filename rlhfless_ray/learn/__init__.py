"""Learning: advantages, losses and the learner."""
