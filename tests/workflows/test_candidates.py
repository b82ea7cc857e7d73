"""Candidates of a run score as their files do, one forward pass each, with and without a prior."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from tunable_magmax import METHODS, Preference, merge_checkpoints
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.evaluator import Evaluator, label_samples
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import Classifier, load_head
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.candidates import Candidate, Candidates, Merges, right_answers, tunable, usual_candidates

COUNTS = {"red": 3, "blue": 2, "green": 2, "grey": 1}
WEIGHTS = (0.7, 0.3)


@pytest.fixture
def made(any_run, tmp_path):
    """A run, an evaluator on a site, and the site's samples."""
    run = Run.open(any_run.path)
    samples = open_samples(any_run.pairs(tmp_path / "site", COUNTS))
    head = load_head(run.head)
    return run, Evaluator(load_encoder(run.base, "cpu"), head, label_samples(samples, head.classes)), samples


def test_the_usual_ones_and_their_names(image_run):
    found = usual_candidates(Run.open(image_run.path), (0.5, 1, "matched", 0.5))
    merges = ["average", "magmax", *(["tsv"] if "tsv" in METHODS else [])]
    assert [candidate.name for candidate in found] == ["base", "first", "last", *merges, *["tunable"] * 3]
    assert [candidate.checkpoint for candidate in found[:3]] == [0, 1, 2]
    titles = [candidate.title for candidate in found]
    assert titles[1] == "task first"
    assert titles[-3:] == ["tunable, scale 0.5", "tunable, scale 1", "tunable, matched"]
    assert not next(candidate for candidate in found if candidate.name == "magmax").weighted


def test_scores_are_those_of_the_files(made, tmp_path):
    run, evaluator, samples = made
    head = load_head(run.head)
    inputs = list(samples.load(range(len(samples))))
    with Candidates(run, evaluator, seed=3) as candidates:
        for k, candidate in enumerate(usual_candidates(run, (0.5, "matched"))):
            logits = candidates.logits(candidate, WEIGHTS)
            assert (logits.shape, logits.dtype) == ((len(samples), 4), np.float32)
            path = [run.base, *run.tasks][candidate.checkpoint or 0]
            if candidate.method is not None:
                path = tmp_path / f"{k}.safetensors"
                options = {"weights": WEIGHTS} if candidate.weighted else {}
                merge_checkpoints(
                    run.base, run.tasks, path, method=candidate.method, scale=candidate.scale, seed=3, **options
                )
                assert candidates.reports[candidate].method == candidate.method
            classifier = Classifier(load_encoder(path, "cpu", assets=run.base), head)
            raised = np.exp(logits - logits.max(axis=1, keepdims=True))
            shares = raised / raised.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(shares, classifier.probabilities(inputs), atol=1e-4)


def test_a_prior_is_added_afterwards(made):
    run, evaluator, _ = made
    prior = Preference((1, 0)).with_prior([{"red": 1, "blue": 1}, {"green": 1, "grey": 1}], eps=0.01).prior
    head = load_head(run.head)
    biased = Evaluator(
        evaluator.encoder, head.with_bias(prior.bias(head.classes)), evaluator.labelled, prepared=evaluator.prepared
    )
    with Candidates(run, evaluator) as candidates:
        logits = candidates.logits(tunable(), WEIGHTS)
        state = candidates.state(tunable(), WEIGHTS)
    for measured, bias in ((evaluator, None), (biased, prior.bias(head.classes))):
        right = right_answers(logits, evaluator.truth, bias)
        assert right.sum() == measured.measure(state).overall.right
    with Candidates(run, biased) as candidates:  # a head's own bias plays no part
        assert np.array_equal(candidates.logits(tunable(), WEIGHTS), logits)


def test_counted_by_hand():
    logits, truth = [[3.0, 2.0, 0.0], [1.0, 0.5, 0.9], [0.0, 5.0, 1.0]], [1, 2, 1]
    assert right_answers(logits, truth).tolist() == [False, False, True]
    assert right_answers(logits, truth, [-2.0, 0.0, 0.0]).tolist() == [True, True, True]
    with pytest.raises(InputError, match="the scores of 1 of 1 samples hold NaN or infinity"):
        right_answers([[np.nan, 1.0]], [0])


def test_refused():
    with pytest.raises(InputError, match="candidate 'x': give either a method or the number of a checkpoint"):
        Candidate("x")
    with pytest.raises(InputError, match="candidate 'x': give either"):
        Candidate("x", "magmax", 1)


def test_a_run_that_does_not_fit_into_memory_is_refused_before_it_is_read(image_run, monkeypatch):
    run = Run.open(image_run.path)
    monkeypatch.setattr("tunable_magmax.merging.resources.available_memory", lambda: 1000)
    monkeypatch.setattr("tunable_magmax.models.state.read_tensors", None)
    with pytest.raises(InputError, match=r"2 tasks are held in memory.* needs .*1000 B are free.*tmx sweep"):
        Merges(run)
