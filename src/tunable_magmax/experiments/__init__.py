"""The paper's experiments, and others like them: environments, jobs, records, tables, figures and a report."""
