"""Measures checkpoints: accuracies with intervals, and what a sequence of tasks gains and forgets."""
