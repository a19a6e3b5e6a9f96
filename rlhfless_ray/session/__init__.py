"""The rollout session: the groups in flight, from the start to the end of a run."""
