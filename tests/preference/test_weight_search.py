"""A search ends when it gets no better."""

from tunable_magmax.preference.search import PATIENCE, search


def test_it_ends_after_some_trials_that_get_no_better():
    assert len(search(lambda weights: 1.0, [(1, 1), (1, 0), (0, 1)])) == 3 + PATIENCE
