"""Where merges run."""
