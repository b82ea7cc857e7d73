"""From a few samples of a site to a `Preference`: how much each task matters there. Knows no checkpoint format."""
