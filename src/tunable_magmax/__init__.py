"""Merge the checkpoints of a continually trained model into the one model that a given deployment needs."""
