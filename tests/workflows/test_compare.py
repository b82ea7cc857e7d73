"""A comparison counts right, compares on the same samples, and says plainly who wins."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from scipy.stats import binomtest

from tunable_magmax import METHODS, Preference
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import Share
from tunable_magmax.models.head import Head, load_head, save_head
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.candidates import Candidate, tunable
from tunable_magmax.workflows.compare import (
    Rivals,
    compare,
    plan_comparison,
    recorded_candidate,
    tailored_candidate,
)
from tunable_magmax.workflows.evaluate import evaluate, evaluate_run
from tunable_magmax.workflows.prefer import Estimation
from tunable_magmax.workflows.scoring import AppliedPrior, Reading
from tunable_magmax.workflows.tailor import tailor
from tunable_magmax.workflows.tailoring import Tailoring, default_method, default_scale
from tunable_magmax.workflows.target import TargetReading, TargetSources
from tunable_magmax.workflows.verdicts import Comparison, compared_rows, least_samples

CPU = Reading(device="cpu")
TABLES = [{"red": 5, "blue": 5}, {"green": 5, "grey": 5}]
LIKELY = Preference((3, 1), tasks=("first", "second")).with_prior(TABLES, eps=0.001)
BASE, BIRDS = Candidate("base", checkpoint=0), Candidate("birds", checkpoint=1)


@pytest.fixture(scope="module")
def site(image_run, tmp_path_factory):
    return image_run.pairs(tmp_path_factory.mktemp("site") / "site", {"red": 6, "blue": 4, "green": 2})


@pytest.fixture(scope="module")
def compared(image_run, site):
    return compare(image_run.path, LIKELY, site, reading=CPU)


def test_every_row_is_what_eval_measures(image_run, site, compared):
    run = Run.open(image_run.path)
    merges = 2 + ("tsv" in METHODS) + 3
    assert len(compared.rows) == 2 * (3 + merges)
    assert (compared.samples, compared.prior) == (12, AppliedPrior("preference", 0.001))
    checkpoints = {
        prior: evaluate_run(run.path, site, prior=asked, reading=CPU).accuracies
        for prior, asked in ((True, LIKELY), (False, "none"))
    }
    for row in compared.rows:
        candidate = row.candidate
        if candidate.checkpoint is not None:
            name = ("base", *run.labels)[candidate.checkpoint]
            assert row.share == checkpoints[row.prior][name].overall
        elif candidate.method in ("average", "tunable_magmax"):
            options = {"method": candidate.method, "scale": candidate.scale, "weights": list(LIKELY.weights)}
            asked = LIKELY if row.prior else "none"
            found = evaluate(Recipe(run.base, run.tasks, options), site, run=run.path, prior=asked, reading=CPU)
            assert row.share == found.accuracy.overall
            assert compared.scales[candidate.title] == found.merge.scale


def test_the_tailored_model_and_the_order(compared):
    assert compared.tailored.candidate == tunable(1.0)
    assert compared.tailored.prior
    rights = [row.share.right for row in compared.rows]
    assert rights == sorted(rights, reverse=True)
    assert sum(row.pair is None for row in compared.rows) == 1
    for row in compared.rows:
        if row.pair is not None:
            assert row.pair.difference == pytest.approx(row.share.value - compared.tailored.share.value)
            p_value = (
                binomtest(row.pair.won, row.pair.won + row.pair.lost).pvalue if row.pair.won + row.pair.lost else 1
            )
            assert row.pair.p_value == pytest.approx(p_value)
            assert row.p_value >= row.pair.p_value


def test_the_scale_and_prior_that_are_asked_for(image_run, site):
    own = compare(
        image_run.path, replace(LIKELY, scale=0.7), site, rivals=Rivals(scales=[0.5], prior="none"), reading=CPU
    )
    assert own.tailored.candidate.scale == 0.7
    scales = [row.candidate.scale for row in own.rows if row.candidate.name == "tunable"]
    assert sorted(scales) == [0.5, 0.7]
    assert own.prior is None
    assert not any(row.prior for row in own.rows)


def test_a_heads_own_bias_counts_where_the_preference_has_no_prior(image_run, site, tmp_path):
    head = load_head(image_run.path / "head.safetensors")
    save_head(Head.of(head.weight, head.classes, head.logit_scale, np.array([100, 0, 0, 0])), tmp_path / "head.st")
    shutil.copytree(image_run.path, tmp_path / "run")
    record = json.loads((tmp_path / "run/run.json").read_text())
    for task in record["tasks"]:
        task.pop("profile", None)
        task.pop("classes", None)
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    found = compare(tmp_path / "run", replace(LIKELY, prior=None), site, head=tmp_path / "head.st", reading=CPU)
    assert found.prior == AppliedPrior("head")
    assert {row.share for row in found.rows if row.prior} == {Share(6, 12)}  # everything is taken for red


def test_a_preference_without_a_prior_gets_that_of_the_tailored_model(image_run, site, tmp_path):
    by_hand = Preference.from_weights([1, 3])
    found = compare(image_run.path, by_hand, site, reading=CPU)
    made = tailor(
        image_run.path,
        TargetSources(),
        tmp_path / "out",
        reading=TargetReading(device="cpu"),
        preference=by_hand,
    )
    assert (found.prior.source, found.prior.eps) == ("preference", made.record["prior"]["eps"])
    assert found.tailored.candidate == tunable(made.record["merge"]["scale"])
    written = evaluate(tmp_path / "out", site, reading=CPU)
    assert found.tailored.share == written.accuracy.overall
    assert compare(image_run.path, by_hand, site, rivals=Rivals(prior="none"), reading=CPU).prior is None
    assert tailored_candidate(Preference((1,) * 9), prior=True, tsv=False) == tunable(1.0)


@pytest.mark.parametrize(
    ("options", "candidate", "prior"),
    [
        ({"scale": 0.7}, tunable(0.7), True),
        ({"method": "tsv"}, Candidate("tsv", "tsv", weighted=True), True),
        ({"method": "magmax"}, Candidate("magmax", "magmax", None, "matched"), True),
        ({"method": "magmax", "scale": 0.7}, Candidate("magmax, scale 0.7", "magmax", None, 0.7), True),
        ({"scale": 0}, BASE, True),
        ({"method": "last_task", "scale": 1}, Candidate("last", checkpoint=2), True),
        ({"estimation": Estimation(prior="none"), "seed": 3}, tunable(), False),
    ],
)
def test_the_directory_of_a_tailored_model(image_run, site, tmp_path, options, candidate, prior):
    out = tmp_path / "out"
    reading = TargetReading(device="cpu")
    tailor(image_run.path, TargetSources(), out, Tailoring(**options), reading, preference=replace(LIKELY, prior=None))
    found = compare(image_run.path, out, site, reading=CPU)
    assert (found.tailored.candidate, found.tailored.prior) == (candidate, prior)
    assert found.tailored.share == evaluate(out, site, reading=CPU).accuracy.overall
    assert (found.model, found.preference) == (str(out), str(out / "preference.json"))
    assert len({row.candidate.title for row in found.rows}) == len(found.by_model())
    assert plan_comparison(image_run.path, out, site, reading=CPU).tailored == candidate
    by_file = compare(image_run.path, out / "preference.json", site, reading=CPU)
    assert (by_file.model, by_file.tailored.candidate) == (None, tunable(1.0))


def test_a_task_that_pairs_chose_is_its_checkpoint(image_run):
    merge = {"method": "tunable_magmax", "scale": 1.0, "scale_from": "second as it is", "seed": 0}
    record = {"merge": merge, "prior": {}, "choice": {"chosen": "the likeliest task"}}
    run = Run.open(image_run.path)
    assert recorded_candidate(record, Preference((3, 1)), run) == Candidate("first", checkpoint=1)
    assert recorded_candidate(record, Preference((1, 3)), run) == Candidate("last", checkpoint=2)


def test_json_says_everything(compared):
    record = json.loads(json.dumps(compared.to_dict()))
    assert record["version"] == 1
    assert record["rows"][record["tailored"]]["verdict"] is None
    assert record["rows"][record["tailored"]]["scale_used"] > 0
    assert record["summary"] == compared.sentences()
    first = record["rows"][0]
    assert first["accuracy"] == first["right"] / record["samples"]
    assert set(first) >= {"model", "prior", "interval", "won", "lost", "difference", "p_value", "verdict"}


def test_a_plan_reads_no_tensors(image_run, site, monkeypatch):
    monkeypatch.setattr("tunable_magmax.models.state.read_tensors", None)
    plan = plan_comparison(image_run.path, LIKELY, site)
    assert plan.samples == 12
    assert plan.tailored in plan.candidates
    assert plan.to_dict()["tailored"] == "tunable, scale 1"


@pytest.mark.parametrize(
    ("preference", "prior", "title"),
    [
        (Preference((9, 1)), True, "tunable, scale 1"),
        (Preference((9, 1)), False, "tunable, matched"),
        (Preference((9, 1), scale=0.7), True, "tunable, scale 0.7"),
        (Preference.equal(9), True, "tsv"),
        (Preference((1,) * 9, scale=0.7), False, "tsv, scale 0.7"),
    ],
)
def test_the_tailored_model_is_what_tailor_makes_by_default(preference, prior, title):
    tailored = tailored_candidate(preference, prior)
    assert tailored.title == title
    assert tailored.method == default_method(preference.weights)
    assert tailored.scale in (preference.scale, default_scale(tailored.method, prior))


# -- words ---------------------------------------------------------------------------------------------------------


def of(mine, **others):
    """A comparison without a prior: which samples the tailored model and others get right."""
    known = {"base": BASE, "birds": BIRDS, "tsv": Candidate("tsv", "tsv", weighted=True), "half": tunable(0.5)}
    right = {(known[name], False): np.array(answers, bool) for name, answers in others.items()}
    rows = compared_rows({**right, (tunable(), False): np.array(mine, bool)}, (tunable(), False))
    return Comparison("run", "site", "head", len(mine), 0, rows, None, {})


def first(count, samples=100):
    """So many of the first samples are right."""
    return [k < count for k in range(samples)]


@pytest.mark.parametrize(
    ("mine", "others", "sentences"),
    [
        (
            first(90),
            {"base": first(10), "tsv": first(89)},
            ["The tailored model is the best here: 90.0%, clearly better than 1 of the 2 others."],
        ),
        (
            first(90),
            {"birds": first(90)},
            [
                "The tailored model is the best here: 90.0%, though not clearly better than any other.",
                "`task birds` alone cannot be told apart from it on these 100 samples (90.0% against 90.0%); it "
                "needs no merge.",
            ],
        ),
        (
            first(50),
            {"base": first(80), "birds": first(10)},
            [
                "`base` is clearly better than the tailored model: 80.0% against 50.0%.",
                "So this site needs no tailored merge.",
            ],
        ),
        (
            first(50),
            {"base": first(70), "tsv": first(80)},
            [
                "`tsv` is clearly better than the tailored model: 80.0% against 50.0%; `tmx tailor run --preference "
                "FILE --method tsv --scale 1 --prior none -o OUT` makes it.",
                "`base` alone is, too: 70.0% against 50.0%; this site needs no tailored merge.",
            ],
        ),
        (
            first(50),
            {"half": first(80)},
            [
                "`tunable, scale 0.5` is clearly better than the tailored model: 80.0% against 50.0%; `tmx tailor "
                "run --preference FILE --scale 0.5 --prior none -o OUT` makes it."
            ],
        ),
        (
            first(90),
            {"base": first(88)},
            [
                "The tailored model is the best here: 90.0%, though not clearly better than any other.",
                "`base` alone cannot be told apart from it on these 100 samples (88.0% against 90.0%); about 391 "
                "would tell, if the difference is real; it needs no merge.",
            ],
        ),
        (
            first(88),
            {"base": first(90)},
            [
                "`base` has the most right answers (90.0% against 88.0%), but 100 samples cannot tell it from the "
                "tailored model; about 391 would tell, if the difference is real.",
                "It needs no merge.",
            ],
        ),
        (
            first(5, 5),
            {"base": first(0, 5)},
            ["No verdict: 5 samples cannot tell any of these models apart, and at least 6 are needed."],
        ),
        (
            first(88),
            {"tsv": first(90), "base": first(3)},
            [
                "`tsv` has the most right answers (90.0% against 88.0%), but 100 samples cannot tell it from the "
                "tailored model; about 473 would tell, if the difference is real.",
                "The tailored model is clearly better than 1 of the 2 others.",
            ],
        ),
    ],
)
def test_plain_sentences(mine, others, sentences):
    assert of(mine, **others).sentences() == sentences


def test_of_equal_models_the_tailored_comes_first():
    found = of(first(5, 10), base=first(5, 10), birds=first(5, 10))
    assert [row.candidate for row in found.rows] == [tunable(), BASE, BIRDS]


@pytest.mark.parametrize("comparisons", [1, 5, 53])
def test_fewer_samples_can_never_tell(comparisons):
    least = least_samples(comparisons)
    for samples, clear in ((least - 1, False), (least, True)):
        assert (comparisons * binomtest(samples, samples).pvalue <= 0.05) == clear


# -- bad input -----------------------------------------------------------------------------------------------------


def test_three_samples_tell_nothing(image_run, tmp_path):
    three = image_run.pairs(tmp_path / "three", {"red": 2, "green": 1})
    with pytest.warns(UserWarning, match="3 samples cannot show any difference between so many models, however large"):
        found = compare(image_run.path, LIKELY, three, reading=CPU)
    assert {row.verdict for row in found.rows} == {"cannot tell", None}
    assert [sentence[:11] for sentence in found.sentences()] == ["No verdict:"]


def test_refused(image_run, site, tmp_path):
    with pytest.raises(
        InputError,
        match=r"the preference is about other tasks .* it has a, b; .* make one for this run with `tmx prefer`",
    ):
        compare(image_run.path, Preference((1, 1), tasks=("a", "b")), site)
    with pytest.raises(InputError, match=r"the preference has 3 weights, and .*run has 2 tasks: make a preference for"):
        compare(image_run.path, Preference((1, 1, 1)), site)
    with pytest.raises(InputError, match=r"is a directory without preference\.json: give the file that `tmx prefer`"):
        compare(image_run.path, tmp_path, site)
    (tmp_path / "old").mkdir()
    LIKELY.save(tmp_path / "old/preference.json")
    merged = {"method": "magmax", "scale": 1.0, "seed": 0, "scale_from": "you"}
    for record in (
        {},
        [],
        {"merge": merged, "prior": None, "choice": {}},
        {"merge": merged, "prior": 3, "choice": None},
        {"merge": {**merged, "scale": [1]}, "prior": None, "choice": None},
        {"merge": {**merged, "seed": -1}, "prior": None, "choice": None},
    ):
        (tmp_path / "old/tmx-tailor.json").write_text(json.dumps(record))
        with pytest.raises(InputError, match=r"tmx-tailor\.json is no record of `tmx tailor`"):
            compare(image_run.path, tmp_path / "old", site)
    other = Preference((1, 1)).with_prior([{"x": 1}, {"y": 1}])
    with pytest.raises(InputError, match=r"no class of the prior .* is a class of the head"):
        compare(image_run.path, other, site)
    head = load_head(image_run.path / "head.safetensors")
    save_head(Head.of(np.eye(4), head.classes, 1.0), tmp_path / "narrow.safetensors")
    with pytest.raises(InputError, match=r"the head has width 4 and the encoder .* do not belong together"):
        compare(image_run.path, LIKELY, site, head=tmp_path / "narrow.safetensors", reading=CPU)
