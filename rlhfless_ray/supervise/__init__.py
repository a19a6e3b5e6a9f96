"""Supervised stages on Ray Train: SFT, reward models, DPO and KTO."""
