"""From a pre-trained encoder and a benchmark to theta_1 .. theta_T: the loop, the run directory, and the records."""
