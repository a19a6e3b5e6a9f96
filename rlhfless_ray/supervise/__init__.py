"""Supervised stages on Ray Train: SFT, reward models, DPO, KTO and distillation."""
