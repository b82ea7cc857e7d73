"""Opens data sets, labels and ready features, and divides the classes of a benchmark among tasks."""
