"""Opens data sets, samples and labels, and divides the classes of a benchmark among tasks."""
