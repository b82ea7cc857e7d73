"""The experiment in miniature, done once."""

from __future__ import annotations

import pytest
from experiments.miniature import written

from tunable_magmax.experiments.config import read_experiment
from tunable_magmax.experiments.reproduce import reproduce


@pytest.fixture(scope="session")
def done(tmp_path_factory):
    root = tmp_path_factory.mktemp("experiment")
    experiment = read_experiment(written(root))
    files = reproduce(experiment, root / "results", root / "work", "cpu")
    return root, experiment, files
