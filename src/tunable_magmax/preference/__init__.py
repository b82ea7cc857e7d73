"""From a few samples of a target to a `Preference`: how much each task matters there. Knows no checkpoint format."""
