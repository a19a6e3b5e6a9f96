"""One run from its parts to its last step: assembly, the stages that the loop calls, checkpoints, export."""
