"""The search on labelled samples is no worse than its starts, ends when it should, and is one for one seed."""

from dataclasses import replace

import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.preference.search import PATIENCE, search
from tunable_magmax.preference.site import Site
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.options import Reading, SiteSources
from tunable_magmax.workflows.prefer import search_preference


def found_for(run, labelled, trials=100, max_samples=None, progress=None, seed=0):
    reading = Reading(device="cpu", max_samples=max_samples)
    return search_preference(Site(run, SiteSources(labelled=labelled), reading, seed, progress), trials)


def changed(run, **changes):
    """The same run with other values for each task."""
    return Run(run.path, replace(run.record, tasks=tuple(replace(task, **changes) for task in run.record.tasks)))


@pytest.mark.parametrize("classes", [("red", "blue"), ("red", "green")])
def test_no_worse_than_its_starts(any_run, tmp_path, classes):
    run = Run.open(any_run.path)
    pairs = any_run.pairs(tmp_path / "site", dict.fromkeys(classes, 6))
    one, two, many = (found_for(run, pairs, trials=trials) for trials in (1, 2, 8))
    assert many.provenance["log_loss"] <= two.provenance["log_loss"] <= one.provenance["log_loss"]
    assert [start["source"] for start in many.provenance["starts"]] == ["equal", "label"]
    assert (many.method, many.tasks, many.provenance["samples"], many.provenance["trials"]) == (
        "search",
        run.names,
        12,
        8,
    )
    assert many.scale is None
    assert one.weights == (0.5, 0.5)


def test_one_seed_one_result(image_run, tmp_path):
    pairs = image_run.pairs(tmp_path / "site", {"red": 3, "green": 3})
    run = changed(Run.open(image_run.path), profile=None)
    first, again = (found_for(run, pairs, trials=5, seed=1) for _ in range(2))
    assert first == again


def test_what_is_left_out_is_told(image_run, tmp_path):
    pairs = image_run.pairs(tmp_path / "site", {"red": 3, "blue": 3})
    (pairs / "zebra").mkdir()
    (pairs / "red" / "0.png").rename(pairs / "zebra" / "0.png")
    (pairs / "blue" / "0.png").write_text("?")
    with pytest.warns(UserWarning, match="left out") as told:
        found = found_for(Run.open(image_run.path), pairs, trials=1)
    assert ["zebra" in str(told[0].message), "0.png" in str(told[1].message)] == [True, True]
    assert found.provenance["samples"] == 4


def test_a_run_in_which_nothing_changed(image_run, tmp_path):
    run = changed(Run.open(image_run.path), checkpoint="base")
    with pytest.raises(InputError, match="no task changed anything"):
        found_for(run, image_run.pairs(tmp_path / "site", {"red": 1}))


def test_it_ends_after_some_trials_that_get_no_better():
    assert len(search(lambda weights: 1.0, [(1, 1), (1, 0), (0, 1)])) == 3 + PATIENCE
