"""Opens data sets, labels and ready features, and deals the classes of a benchmark to tasks."""
