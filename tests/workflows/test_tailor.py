"""Tailoring: one directory with all that a site needs, whole or not at all, and honest about what chose it."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

import adapters
from labelled_run import TASKS, LabelledRun, enter
from models import tiny
from safetensors.torch import load_file, save_file
from tunable_magmax.workflows.tailor_plan import plan_tailor

from tunable_magmax import METHODS, Preference, verify_checkpoint
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.comparison import paired
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import load_head, save_head
from tunable_magmax.models.profiling import make_profile
from tunable_magmax.preference.prior import SitePrior
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows import choice as choosing
from tunable_magmax.workflows import tailor as tailoring_
from tunable_magmax.workflows.choice import LIKELIEST, resolved, rivals
from tunable_magmax.workflows.compare import compare, plan_comparison
from tunable_magmax.workflows.evaluate import evaluate
from tunable_magmax.workflows.prefer import Estimation, prefer
from tunable_magmax.workflows.scale import ScaleChoice, deal
from tunable_magmax.workflows.scoring import Reading
from tunable_magmax.workflows.tailor import tailor
from tunable_magmax.workflows.tailoring import (
    MANY_TASKS,
    Tailoring,
    default_method,
    effective_tasks,
    prior_warnings,
    why_not_tsv,
    with_site_prior,
)
from tunable_magmax.workflows.target import TargetReading, TargetSources

CPU = TargetReading(device="cpu")
FAR = 1e5
"""A scale that spoils the model, whose tasks moved only a little."""
COUNTS = {"red": 9, "blue": 5, "green": 6, "grey": 4}


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """A run whose base already tells the classes apart, with profiles that hold its embeddings; tasks move a little."""
    path = tmp_path_factory.mktemp("probed") / "run"
    run, base = LabelledRun(path, "vit"), tiny.build("vit")
    tiny.save(base, path / "base")
    encoder = load_encoder(path / "base", "cpu")
    rows = {}
    for t, (task, classes) in enumerate(TASKS.items(), 1):
        tiny.changed(copy.deepcopy(base), 1e-4, seed=t).save_pretrained(path / task)
        for name in classes:
            rows[name] = run.mean_embedding(encoder, name)
    trained, profiles = enter(path, rows, logit_scale=500), {}
    for t, (task, classes) in enumerate(TASKS.items()):
        samples = open_samples(run.pairs(path / f"data-{task}", dict.fromkeys(classes, 12), seed=0))
        profiles[t] = trained.profile_path(task)
        make_profile(task, samples, load_encoder(path / task, "cpu", assets=path / "base"), base=encoder).save(
            profiles[t]
        )
    trained.register_profiles(profiles, path / "head.safetensors", path / "base")
    return run


@pytest.fixture(scope="module")
def site(probed, tmp_path_factory):
    """Labelled pictures of a site, and the same without labels."""
    folder = tmp_path_factory.mktemp("site")
    pairs = probed.pairs(folder / "pairs", COUNTS)
    (folder / "inputs").mkdir()
    for file in sorted(pairs.rglob("*.png")):
        shutil.copy(file, folder / "inputs" / f"{file.parent.name}{file.name}")
    return TargetSources(inputs=folder / "inputs"), TargetSources(pairs=pairs)


def made(run, sources, out, reading=CPU, **options):
    return tailor(run.path, sources, out, Tailoring(**options), reading)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# -- the directory ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_inputs(probed, site, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "site-model"
    return made(probed, site[0], out), out


def test_everything_that_a_site_needs_is_there(by_inputs, probed):
    found, out = by_inputs
    expected = {"model.safetensors", "config.json", "preprocessor_config.json", "head.safetensors", "preference.json"}
    assert set(contents(out)) == expected | {"tmx-report.json", "tmx-config.yaml", "tmx-tailor.json", "README.md"}
    preference = Preference.load(out / "preference.json")
    assert preference == found.preference
    assert preference.weights == pytest.approx((14 / 24, 10 / 24), abs=0.1)
    head = load_head(out / "head.safetensors")
    np.testing.assert_array_equal(head.bias, preference.prior.bias(head.classes))
    assert load_head(probed.path / "head.safetensors").bias is None
    assert found.record == json.loads((out / "tmx-tailor.json").read_text())
    assert set(found.report.files) == set(contents(out)) - {"tmx-report.json"}
    assert verify_checkpoint(out).ok
    card = (out / "README.md").read_text()
    assert "## Tailored to a site" in card
    assert f"| first | {preference.weights[0]:.4f} |" in card
    assert "tmx predict THIS_FOLDER" in card


def test_the_merge_is_that_of_the_parts(by_inputs, probed, tmp_path):
    from tunable_magmax import merge_checkpoints

    run = Run.open(probed.path)
    weights = by_inputs[0].preference.weights
    merge_checkpoints(run.base, run.tasks, tmp_path / "parts", weights=weights, scale=1, names=run.names)
    assert (tmp_path / "parts/model.safetensors").read_bytes() == (by_inputs[1] / "model.safetensors").read_bytes()


def test_equal_inputs_give_equal_bytes_wherever_they_are(by_inputs, probed, site, tmp_path):
    shutil.copytree(probed.path, tmp_path / "elsewhere")
    shutil.copytree(site[0].inputs, tmp_path / "inputs")
    sources = TargetSources(inputs=tmp_path / "inputs")
    again = made(LabelledRun(tmp_path / "elsewhere", "vit"), sources, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(by_inputs[1])
    assert set(again.seconds) == {"embedding", "estimating", "merging", "checking"}
    assert not any(str(tmp_path).encode() in content for content in contents(tmp_path / "again").values())


def test_a_second_call_says_that_it_is_complete_and_another_is_refused(by_inputs, probed, site):
    found, out = by_inputs
    before = contents(out)
    again = made(probed, site[0], out)
    assert again.complete
    assert (again.record, again.preference, again.seconds) == (found.record, found.preference, {})
    with pytest.raises(InputError, match="already exists: choose another output, or pass overwrite"):
        made(probed, site[0], out, scale=0.5)
    assert contents(out) == before
    replaced = made(probed, site[0], out, output={"overwrite": True})
    assert not replaced.complete
    assert contents(out) == before


@pytest.mark.parametrize("moment", ["_Work.files", "prior_warnings"])
def test_killed_and_started_again_it_gives_the_same_bytes(by_inputs, probed, site, tmp_path, moment):
    out = tmp_path / "site-model"
    code = f"""
import os, torch
from pathlib import Path
from tunable_magmax.workflows import tailor
from tunable_magmax.workflows.target import TargetReading, TargetSources
torch.set_num_threads(1)
tailor.{moment} = lambda *given: os._exit(9)
tailor.tailor({str(probed.path)!r}, TargetSources(inputs=Path({str(site[0].inputs)!r})), {str(out)!r},
    reading=TargetReading(device="cpu"))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=100).returncode == 9
    assert not out.exists()
    assert (tmp_path / "site-model.partial").exists() == (moment == "_Work.files")
    made(probed, site[0], out)
    assert contents(out) == contents(by_inputs[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site-model", "site-model.log"]


def interrupted(*_):
    raise KeyboardInterrupt


def test_killed_and_estimated_a_little_differently_the_merge_begins_anew(probed, site, tmp_path, monkeypatch):
    out, notes = tmp_path / "site-model", []
    with monkeypatch.context() as patch:
        patch.setattr(tailoring_, "card_section", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made(probed, site[0], out)
    assert (tmp_path / "site-model.partial/tailor.json").exists()
    assert plan_tailor(Run.open(probed.path), site[0], out, Tailoring(), CPU).problems == ()
    usual = tailoring_.prefer_for

    def other_bits(*given):
        found = usual(*given)
        first, second = found.preference.weights
        weights = (first + 1e-15, second - 1e-15)
        return dataclasses.replace(found, preference=dataclasses.replace(found.preference, weights=weights))

    monkeypatch.setattr(tailoring_, "prefer_for", other_bits)
    with pytest.raises(InputError, match="holds unfinished work of another merge"):  # that of another site
        made(probed, TargetSources(labels=site[1].pairs), out)
    found = tailor(probed.path, site[0], out, Tailoring(), CPU, notify=notes.append)
    assert notes == ["the estimate differs a little from that of the interrupted call, so the merge begins anew"]
    assert found.notes[:1] == tuple(notes)
    assert verify_checkpoint(out).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site-model", "site-model.log"]


def test_a_changed_head_or_classifier_is_noticed(probed, tmp_path):
    head = shutil.copy(probed.path / "head.safetensors", tmp_path / "given.safetensors")
    reading = dataclasses.replace(CPU, classifier=head)
    sources = TargetSources(equal=True)
    made(probed, sources, tmp_path / "out", reading)
    assert made(probed, sources, tmp_path / "out", reading).complete
    save_head(dataclasses.replace(load_head(head), logit_scale=3.0), head)
    with pytest.raises(InputError, match="already exists"):
        made(probed, sources, tmp_path / "out", reading)
    encoder = shutil.copytree(probed.path / "base", tmp_path / "encoder")
    reading = dataclasses.replace(CPU, classifier_checkpoint=encoder)
    made(probed, sources, tmp_path / "other", reading)
    assert made(probed, sources, tmp_path / "other", reading).complete
    shutil.copy(probed.path / "first/model.safetensors", encoder)
    with pytest.raises(InputError, match="already exists"):
        made(probed, sources, tmp_path / "other", reading)


def test_a_line_of_the_log_that_was_cut_short_is_skipped(probed, tmp_path):
    out, sources = tmp_path / "out", TargetSources(alpha=0.0)
    found = made(probed, sources, out)
    assert found.preference.weights == (0.0, 1.0)
    assert found.record["merge"]["why"] == "only one task matters"
    with open(tmp_path / "out.log", "a") as log:
        log.write('{"time": "2026-0')
    assert made(probed, sources, out).complete
    plan = plan_tailor(Run.open(probed.path), sources, None, Tailoring(), CPU)
    assert (plan.preference, plan.problems) == ("given as alpha", ())
    with pytest.raises(InputError, match="--preference holds weights already: leave out --alpha"):
        tailor(probed.path, sources, tmp_path / "new", Tailoring(), CPU, preference=Preference((1, 1)))


def test_without_the_prior_the_head_has_no_bias(probed, site, tmp_path):
    sources = TargetSources(labels=site[1].pairs)
    found = made(probed, sources, tmp_path / "out", estimation=Estimation(prior="none"))
    assert load_head(tmp_path / "out/head.safetensors").bias is None
    assert (found.preference.prior, found.record["prior"], found.record["warnings"]) == (None, None, [])
    assert "The head has no site prior" in (tmp_path / "out/README.md").read_text()


# -- method and scale ------------------------------------------------------------------------------------------------


def test_the_rule_for_the_method():
    assert effective_tasks([2, 2, 0]) == 2
    few, many = int(MANY_TASKS), int(MANY_TASKS) + 1
    assert default_method([1 / few] * few) == "tunable_magmax"
    assert default_method([1 / many] * many) == "tsv"
    with pytest.raises(InputError, match=r"unknown method 'tvs' .did you mean 'tsv'"):
        Tailoring(method="tvs")


@pytest.mark.parametrize("method", [name for name in METHODS if name != "tunable_magmax"])
def test_every_method_can_be_asked_for(probed, tmp_path, method):
    found = made(probed, TargetSources(weights=(3, 1)), tmp_path / "out", method=method)
    assert (found.report.method, found.record["merge"]["why"]) == (method, "asked for")


def test_the_scale_is_given_or_the_preferences_or_the_default(probed, tmp_path):
    preference = Preference((3, 1), scale=0.25)
    cases = {"given": 0.5, "the preference's": None}
    for whence, scale in cases.items():
        out = tmp_path / f"{scale}"
        found = tailor(probed.path, TargetSources(), out, Tailoring(scale=scale), CPU, preference=preference)
        assert (found.record["merge"]["scale"], found.record["merge"]["scale_from"]) == (scale or 0.25, whence)
    by_hand = TargetSources(weights=(3, 1))
    usual = made(probed, by_hand, tmp_path / "usual")
    assert usual.record["merge"]["scale_from"] == "the default with a site prior"
    assert (usual.report.scale, usual.report.options["scale"]) == (1.0, 1.0)
    plain = made(probed, by_hand, tmp_path / "plain", estimation=Estimation(prior="none"))
    assert plain.record["merge"]["scale_from"] == "the default of tunable_magmax"
    assert plain.report.options["scale"] == "matched"
    assert plain.report.scale != 1.0
    average = made(probed, by_hand, tmp_path / "average", method="average")
    assert average.record["merge"]["scale_from"] == "the default of average"
    assert average.report.options["scale"] == "matched"


@pytest.mark.parametrize("prior", ["auto", "none"])
def test_a_dry_run_says_the_scale_that_is_used(probed, prior):
    estimation, run = Estimation(prior=prior), Run.open(probed.path)

    def rule(preference=None, sources=TargetSources(weights=(3, 1)), **options):  # noqa: B008
        plan = plan_tailor(run, sources, None, Tailoring(estimation=estimation, **options), CPU, preference)
        return plan.scale

    informed = prior == "auto"
    default = "1, the default with a site prior" if informed else "matched, the default of tunable_magmax"
    assert rule() == default
    assert rule(method="tsv") == "1, the default of tsv"
    assert rule(scale=0.5) == "0.5, as given"
    assert rule(Preference((3, 1), scale=0.25), TargetSources()) == "0.25, the preference's"
    unknown = "1, the default with a site prior" if informed else "the method's default: matched, 1 for tsv"
    assert rule(sources=TargetSources(labels=None, pairs=None, inputs=probed.path)) == unknown


def test_a_stored_preference_is_used_as_it_is(by_inputs, probed, tmp_path):
    stored = by_inputs[0].preference
    tailor(probed.path, TargetSources(), tmp_path / "out", Tailoring(), CPU, preference=stored)
    for name in ("model.safetensors", "head.safetensors", "preference.json"):
        assert contents(tmp_path / "out")[name] == contents(by_inputs[1])[name]
    sources = TargetSources(inputs=tmp_path)
    with pytest.raises(InputError, match="--preference holds weights already: leave out --inputs"):
        tailor(probed.path, sources, tmp_path / "more", Tailoring(), CPU, preference=stored)


def test_a_head_that_is_too_flat_is_sharpened_for_the_prior_everywhere_alike(probed, site, tmp_path):
    flat = LabelledRun(shutil.copytree(probed.path, tmp_path / "run"), "vit")
    head = load_head(flat.path / "head.safetensors")
    save_head(dataclasses.replace(head, logit_scale=head.logit_scale / 100), flat.path / "head.safetensors")
    found = made(flat, site[0], tmp_path / "out")
    factor = found.record["prior"]["logit_factor"]
    assert factor > 2
    sharper = load_head(tmp_path / "out/head.safetensors")
    assert sharper.logit_scale == pytest.approx(factor * head.logit_scale / 100)
    np.testing.assert_array_equal(sharper.bias, found.preference.prior.bias(head.classes))
    words = f"its logit scale is {factor:g} times as large"
    assert words in (tmp_path / "out/README.md").read_text()
    # What tailor wrote, what eval merges and what compare calls the tailored model are one and the same.
    compared = compare(flat.path, found.preference, site[1].pairs, reading=Reading(device="cpu"))
    assert (compared.prior.source, compared.prior.logit_factor) == ("preference", factor)
    written = evaluate(tmp_path / "out", site[1].pairs, reading=Reading(device="cpu"))
    run = Run.open(flat.path)
    recipe = Recipe(run.base, run.tasks, {"weights": list(found.preference.weights), "scale": 1.0}, run.names)
    merged = evaluate(recipe, site[1].pairs, run=run.path, prior=found.preference, reading=Reading(device="cpu"))
    assert written.accuracy.overall == merged.accuracy.overall == compared.tailored.share
    plain = made(flat, site[0], tmp_path / "plain", estimation=Estimation(prior="none"))
    assert plain.record["prior"] is None
    assert load_head(tmp_path / "plain/head.safetensors").logit_scale == head.logit_scale / 100


def test_a_head_that_is_sharp_enough_is_left_alone(by_inputs, probed):
    assert by_inputs[0].record["prior"]["logit_factor"] == 1.0
    scales = [load_head(path / "head.safetensors").logit_scale for path in (probed.path, by_inputs[1])]
    assert scales[0] == scales[1]


def test_a_given_eps_replaces_that_of_a_stored_prior_only(by_pairs, probed, tmp_path):
    stored = by_pairs[0].preference
    assert stored.prior.source == "labels"
    options = Tailoring(estimation=Estimation(prior=0.02))
    found = tailor(probed.path, TargetSources(), tmp_path / "out", options, CPU, preference=stored)
    assert found.preference.prior == dataclasses.replace(stored.prior, eps=0.02)
    run = Run.open(probed.path)
    assert with_site_prior(stored, run, "auto") == stored
    assert with_site_prior(stored, run, "none").prior is None
    plain = dataclasses.replace(stored, prior=None)
    assert with_site_prior(plain, run, 0.1).prior.eps == 0.1
    assert with_site_prior(plain, run, "auto").prior.source == "tasks"


def test_a_seed_is_no_matter_for_methods_without_a_lottery(probed, tmp_path):
    found = made(probed, TargetSources(equal=True), tmp_path / "out", method="tsv", seed=7)
    assert not [text for text in found.warnings if "seed" in text]
    tunable = made(probed, TargetSources(equal=True), tmp_path / "tunable", seed=7)
    assert tunable.report.seed == 7
    run = Run.open(probed.path)
    plan = plan_tailor(run, TargetSources(equal=True), None, Tailoring(method="tsv", seed=7), CPU)
    assert not [text for text in plan.merge.warnings if "seed" in text]


def sparse_run(folder, rows, columns):
    """A run whose one matrix takes no room on the disk."""
    folder.mkdir()
    for name in ("base", "first", "second"):
        size = 4 * rows * columns
        header = json.dumps({"words": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, size]}}).encode()
        with open(folder / f"{name}.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)
    tasks = [{"name": name, "checkpoint": f"{name}.safetensors"} for name in ("first", "second")]
    (folder / "run.json").write_text(json.dumps({"version": 1, "base": "base.safetensors", "tasks": tasks}))
    return Run.open(folder)


def test_whether_tsv_can_be_merged(tmp_path):
    run = sparse_run(tmp_path / "run", 30522, 768)
    why = "tsv needs 1288 MiB for its largest matrix; --memory 2GiB lets it"
    assert why_not_tsv(run, {}) == why
    assert why_not_tsv(run, {"memory": "2GiB"}) is None
    assert why_not_tsv(sparse_run(tmp_path / "small", 30, 20), {}) is None
    assert why_not_tsv(run, {"engine": "ray"}) == "tsv does not run with engine 'ray'"
    assert why_not_tsv(run, {"device": "cuda"}) == "tsv does not run with device 'cuda'"
    plan = plan_tailor(run, TargetSources(equal=True), None, Tailoring(), CPU)
    assert plan.method == "tunable_magmax"  # two tasks
    plan = plan_tailor(run, TargetSources(labels=tmp_path), None, Tailoring(), CPU)
    assert plan.method == f"tunable_magmax ({why})"


def test_where_tsv_does_not_fit_the_other_method_is_taken(probed, site, tmp_path, monkeypatch):
    monkeypatch.setattr(tailoring_, "default_method", lambda weights: "tsv")
    monkeypatch.setattr(tailoring_, "why_not_tsv", lambda run, output: "tsv needs much")
    found = made(probed, TargetSources(equal=True), tmp_path / "out")
    assert found.record["merge"]["method"] == "tunable_magmax"
    assert (
        found.record["merge"]["why"]
        == "many tasks matter: the weights amount to 2 equal ones, more than 3.2, but tsv needs much"
    )
    by_pairs = made(probed, site[1], tmp_path / "pairs")
    assert "tsv" not in [model["name"] for model in by_pairs.record["choice"]["tried"]]


# -- the check without labels ----------------------------------------------------------------------------------------


def test_a_step_that_overshoots_is_warned_of(by_inputs, probed, site, tmp_path):
    fine = by_inputs[0].record["check"]
    assert (fine["overshoots"], fine["samples"]) == (False, 24)
    assert fine["base"] > 12
    found = made(probed, site[0], tmp_path / "far", scale=FAR)
    check = found.record["check"]
    assert check["overshoots"]
    assert check["tailored"] < check["base"] == fine["base"]
    [warning] = [text for text in found.warnings if "the merged step may overshoot: " in text]
    assert "try --scale 0.5, or give --pairs" in warning
    assert "on 24 inputs the tailored model agrees with a simple classifier on the base's embeddings on " in warning
    assert f" on {check['tailored'] / 24:.0%}, the base itself on {check['base'] / 24:.0%}; " in warning
    assert (tmp_path / "far/README.md").read_text().count("agrees with a simple classifier") == 1
    assert made(probed, site[0], tmp_path / "unchecked", scale=FAR, check="none").record["check"] is None


# -- the choice by pairs ---------------------------------------------------------------------------------------------


def test_folds_are_even_in_size_and_class():
    labels = np.repeat(np.arange(10), [3, 1, 1, 1, 1, 7, 1, 1, 1, 13])
    folds = deal(labels, seed=3)
    assert sorted(np.bincount(folds)) == [6] * 5
    assert (np.bincount(folds[labels == 9], minlength=5) >= 2).all()
    assert (deal(labels, seed=3) == folds).all()
    assert deal(labels[:8], seed=0).max() == 1


def test_the_likeliest_task_and_the_last_are_resolved():
    scales = {"tunable_magmax": 1.0, "tsv": 1.0, "magmax": "matched"}
    models = {model.name: model for model in rivals(choosing.Candidate("tsv", "tsv", weighted=True), scales.get)}
    assert [models[name].scale for name in ("tunable", "magmax", "average")] == [1.0, "matched", 1.0]
    assert [*models] == ["tsv", "tunable", "magmax", "average", LIKELIEST, "last", "base"]
    places = [resolved(models[name], [0.1, 0.7, 0.2]).checkpoint for name in (LIKELIEST, "last", "base")]
    assert places == [2, 3, 0]


def test_the_highest_count_wins_and_the_procedure_is_scored_on_other_folds():
    folds = np.repeat([0, 1], 10)
    right = np.zeros((3, 20), dtype=bool)
    right[0, :10] = True  # best on fold 0, useless on fold 1
    right[1, 10:] = True
    right[2, ::2] = True
    found = choosing._decided(["tunable", "average", "base"], right, folds)
    assert found.chosen.name == "tunable"  # all have 10: the first
    assert found.procedure.right == 0  # each fold's model is the best of the other fold
    assert found.as_good.name == "base"
    apart = "the base cannot be told apart from it on these 20 pairs"
    assert found.simpler == f"{apart} (50% against 50%); it needs no merge"
    right[0, 10:12] = True
    found = choosing._decided(["tunable", "average", "base"], right, folds)
    needed = paired(right[0], right[2]).needed()
    assert found.simpler == f"{apart} (50% against 60%); about {needed} would tell; it needs no merge"


@pytest.fixture(scope="module")
def by_pairs(probed, site, tmp_path_factory):
    out = tmp_path_factory.mktemp("pairs") / "site-model"
    return made(probed, site[1], out), out


def test_pairs_choose_by_cross_validation(by_pairs, probed):
    found, out = by_pairs
    choice = found.record["choice"]
    assert choice["tried"][0]["name"] == "tunable"
    assert {model["samples"] for model in choice["tried"]} == {24}
    counts = {model["name"]: model["right"] for model in choice["tried"]}
    assert counts[choice["chosen"]] == max(counts.values())
    assert found.record["merge"]["why"].startswith("chosen by pairs")
    assert found.record["check"] is None
    assert verify_checkpoint(out, Run.open(probed.path).base, Run.open(probed.path).tasks).ok
    assert choice["sentence"][1:] in (out / "README.md").read_text()
    assert " folds, each with weights and prior from the others' labels; choosing like this" in choice["sentence"]


def test_folds_of_a_preference_that_was_given_have_nothing_of_their_own(by_pairs, probed, site, tmp_path):
    given = tailor(
        probed.path,
        TargetSources(pairs=site[1].pairs),
        tmp_path / "out",
        reading=CPU,
        preference=by_pairs[0].preference,
    )
    assert " folds; choosing like this" in given.record["choice"]["sentence"]


def test_paths_are_shown_as_they_were_given_and_are_names_in_the_record(probed, tmp_path):
    folder = probed.pairs(tmp_path / "data", {"red": 6, "green": 4})
    found = made(probed, TargetSources(inputs=folder), tmp_path / "out")
    text = "holds labels as well, which say more than inputs; --labels in place of --inputs uses them"
    assert f"{folder} {text}" in found.warnings
    assert f"{folder.name} {text}" in found.record["warnings"]


@pytest.mark.parametrize("name", [LIKELIEST, "last", "base"])
def test_a_checkpoint_that_wins_is_written_as_it_is(probed, site, tmp_path, monkeypatch, name):
    def won(*_, **__):
        best = choosing.Tried(name, 24, 24)
        return choosing.Choice(5, (best,), best, best)

    monkeypatch.setattr(tailoring_, "choose", won)
    found = made(probed, site[1], tmp_path / "out")
    run = Run.open(probed.path)
    path = {LIKELIEST: run.tasks[0], "last": run.tasks[-1], "base": run.base}[name]
    own, written = load_file(path / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    for tensor, value in own.items():
        torch.testing.assert_close(written[tensor], value, atol=1e-6, rtol=1e-5)
    assert name != "base" or all(torch.equal(written[tensor], value) for tensor, value in own.items())
    assert found.record["scale_by_pairs"] is None
    assert verify_checkpoint(tmp_path / "out").ok


def test_pairs_that_nothing_may_choose_by(probed, site, tmp_path):
    found = made(probed, site[1], tmp_path / "kept", choose="none")
    assert (found.record["choice"], found.record["merge"]["method"]) == (None, "tunable_magmax")
    assert found.preference.scale is None
    assert found.record["scale_by_pairs"]["chosen"] is None
    far = made(probed, site[1], tmp_path / "far", choose="none", scale=FAR)
    assert far.record["scale_by_pairs"]["used"] == FAR
    assert any("the merged step has the wrong length" in text for text in far.warnings)
    few = TargetSources(pairs=probed.pairs(tmp_path / "few", {"red": 2, "green": 1}))
    found = made(probed, few, tmp_path / "rough")
    assert "3 samples are few: the weights are rough; look at their intervals" in found.warnings
    assert "3 pairs are too few to choose a model or a scale by; 8 are needed" in found.warnings


def test_unsure_weights_of_many_tasks_are_told(probed):
    def told(error, weights=(1, 1, 1, 1, 1)):
        found = Preference(weights, "label", expected_error=error, prior=SitePrior({"red": 1.0}, eps=0.1))
        warned = prior_warnings(Run.open(probed.path), found, ["red"], unwanted=False)
        return [text for text in warned if "spread over many tasks" in text]

    assert told(0.28) == [
        "the weights are spread over many tasks and unsure (expected error 0.28). If the site wants all tasks alike, "
        "the prior costs accuracy, and --equal is better; more samples, or labels, tell"
    ]
    assert told(0.05) == []
    assert told(None) == []
    assert told(0.28, (3, 1, 0, 0, 0)) == []


def test_one_sample_is_no_plural(probed, tmp_path):
    one = TargetSources(pairs=probed.pairs(tmp_path / "one", {"red": 1}))
    found = made(probed, one, tmp_path / "out")
    assert "1 sample is little: the weights are rough; look at their intervals" in found.warnings
    assert "1 pair is too few to choose a model or a scale by; 8 are needed" in found.warnings


def test_with_a_given_preference_pairs_score_the_model_that_is_written(probed, site, tmp_path, monkeypatch):
    monkeypatch.setattr("tunable_magmax.preference.calibration.logit_factor", lambda *_: 1.0)  # so that the prior rules
    flat = LabelledRun(shutil.copytree(probed.path, tmp_path / "run"), "vit")
    head = load_head(flat.path / "head.safetensors")
    save_head(dataclasses.replace(head, logit_scale=5.0), flat.path / "head.safetensors")
    tables = [dict.fromkeys(classes, 1) for classes in TASKS.values()]
    wrong = Preference((0.02, 0.98)).with_prior(tables, eps=0.002)  # most pairs are of the first task
    found = tailor(flat.path, site[1], tmp_path / "out", Tailoring(scale=1.0), CPU, preference=wrong)
    assert found.preference == wrong
    counts = {model["name"]: model["right"] for model in found.record["choice"]["tried"]}
    written = evaluate(tmp_path / "out", site[1].pairs, reading=Reading(device="cpu"))
    assert counts[found.record["choice"]["chosen"]] == written.accuracy.overall.right < 12


def scale_choice(**changes):
    usual = {
        "samples": 20,
        "scales": (0.5, 1.0),
        "right": (8, 10),
        "default": 1.0,
        "default_right": 10,
        "tuned_right": 10,
        "scale": None,
        "used": 1.0,
        "interval": (0.5, 1.0),
        "base_right": 18,
    }
    return ScaleChoice(**{**usual, **changes})


@pytest.mark.parametrize(
    ("found", "options", "text"),
    [
        (
            scale_choice(better=("the base", 18)),
            {"method": "tsv"},
            "the base is better than the merged model: 50% of 20 pairs are right at the scale 1, and 90% with the "
            "base; leave out --method, so that pairs choose the model, or try a smaller --scale",
        ),
        (
            scale_choice(better=("the base", 18), right=(12, 10)),
            {"choose": "none"},
            "with the base; leave out --choose none, so that pairs choose the model, or try --scale 0.5",
        ),
        (
            scale_choice(better=("the scale 0.5", 18), right=(18, 10)),
            {"method": "tsv"},
            "the merged step has the wrong length: 50% of 20 pairs are right at the scale 1, and 90% with the scale "
            "0.5; try --scale 0.5",
        ),
    ],
)
def test_the_advice_is_never_what_was_done(found, options, text):
    assert tailoring_.better_warning(found, *found.better, Tailoring(**options)).endswith(text)


@pytest.mark.parametrize(("method", "stored"), [("tunable_magmax", 0.5), ("tsv", None), ("magmax", None)])
def test_only_the_scale_of_a_tunable_merge_is_kept_in_the_preference(
    probed, site, tmp_path, monkeypatch, method, stored
):
    monkeypatch.setattr(tailoring_, "choose_scale", lambda *_, **__: scale_choice(scale=0.5, used=0.5))
    found = made(probed, site[1], tmp_path / "out", method=method)
    assert (found.record["merge"]["scale"], found.record["scale_by_pairs"]["chosen"]) == (0.5, 0.5)
    assert (found.preference.scale, "scale_by_pairs" in found.preference.provenance) == (stored, stored is not None)


def test_a_scale_of_0_is_the_base_and_a_negative_one_is_refused(probed, site, tmp_path):
    found = made(probed, site[1], tmp_path / "out", scale=0.0)
    facts = found.record["scale_by_pairs"]
    assert (found.report.scale, facts["used"], facts["chosen"]) == (0.0, 0.0, None)
    assert facts["right"][facts["scales"].index(0.0)] == facts["base_right"]
    own, written = (load_file(path / "model.safetensors") for path in (Run.open(probed.path).base, tmp_path / "out"))
    assert all(torch.equal(written[name], value) for name, value in own.items())
    with pytest.raises(InputError, match=r"scale is -1.0, a step away from what the tasks learned: give a number"):
        Tailoring(scale=-1.0)


def test_the_scale_by_pairs_is_that_of_prefer(probed, site):
    found = prefer(probed.path, site[1], Estimation(choose_scale=True), CPU).preference
    facts = found.provenance["scale_by_pairs"]
    assert found.scale == facts["chosen"]
    assert 9 <= len(facts["scales"]) <= 12
    assert {1.0, facts["default"]} <= set(facts["scales"])
    low, high = facts["not_clearly_worse"]
    assert low <= facts["scales"][int(np.argmax(facts["right"]))] <= high
    with pytest.raises(InputError, match="--choose-scale scores scales on inputs with labels: give --pairs"):
        prefer(probed.path, site[0], Estimation(choose_scale=True), CPU)


# -- bad input -------------------------------------------------------------------------------------------------------


def changed_run(probed, folder, change):
    shutil.copytree(probed.path, folder)
    record = json.loads((folder / "run.json").read_text())
    change(record)
    (folder / "run.json").write_text(json.dumps(record))
    return LabelledRun(folder, "vit")


def refused(run, sources, tmp_path, match, **options):
    with pytest.raises(InputError, match=match):
        made(run, sources, tmp_path / "out", **options)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("out")]


def test_a_run_without_a_head(probed, site, tmp_path):
    run = changed_run(probed, tmp_path / "run", lambda record: record.pop("classifier"))
    refused(
        run, site[0], tmp_path, "needs a classifier head, and the run names none: give one with --classifier, or enter"
    )
    head = dataclasses.replace(CPU, classifier=probed.path / "head.safetensors")
    assert made(run, TargetSources(equal=True), tmp_path / "out", head).report.elements


def test_a_head_of_another_width(probed, tmp_path):
    run = changed_run(probed, tmp_path / "run", lambda record: record)
    head = {"classes": json.dumps(["red", "blue"])}
    save_file({"weight": torch.eye(2, 5)}, run.path / "head.safetensors", head)
    refused(run, TargetSources(equal=True), tmp_path, "the head has width 5, and the run's encoders have width 16")


def test_classes_that_no_profile_knows(probed, tmp_path):
    run = changed_run(probed, tmp_path / "run", lambda record: record)
    weight = load_file(run.path / "head.safetensors")["weight"]
    classes = {"classes": json.dumps(["red", "blue", "pink", "grey"])}
    save_file({"weight": weight}, run.path / "head.safetensors", classes)
    found = made(run, TargetSources(equal=True), tmp_path / "out")
    assert "1 class of the head belongs to no task, and the prior makes it unlikely: 'pink'" in " ".join(found.warnings)
    assert "which cannot predict it: 'green'" in " ".join(found.warnings)
    strangers = {"classes": json.dumps(["a", "b", "c", "d"])}
    save_file({"weight": weight}, run.path / "head.safetensors", strangers)
    with pytest.raises(InputError, match=r"no class of the prior .* is a class of the head"):
        made(run, TargetSources(equal=True), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_run_without_profiles(probed, site, tmp_path):
    run = changed_run(probed, tmp_path / "run", lambda record: [task.pop("profile") for task in record["tasks"]])
    refused(run, site[0], tmp_path, "needs the tasks' profiles; missing: 'first', 'second'")
    found = made(run, TargetSources(equal=True), tmp_path / "out")
    assert "there is no site prior, because the classes of the tasks are not known" in " ".join(found.warnings)
    assert load_head(tmp_path / "out/head.safetensors").bias is None


def test_labels_of_no_task_an_empty_folder_and_pictures_that_cannot_be_read(probed, site, tmp_path):
    (tmp_path / "labels.txt").write_text("zebra\nlion\n")
    refused(probed, TargetSources(labels=tmp_path / "labels.txt"), tmp_path, "zebra")
    (tmp_path / "empty").mkdir()
    refused(probed, TargetSources(inputs=tmp_path / "empty"), tmp_path, "empty")
    shutil.copytree(site[0].inputs, tmp_path / "broken")
    for k, file in enumerate(sorted((tmp_path / "broken").iterdir())):
        if k < 2:
            file.write_bytes(b"no picture")
    found = made(probed, TargetSources(inputs=tmp_path / "broken"), tmp_path / "out")
    [text] = [text for text in found.record["warnings"] if "could not be read" in text]
    assert text.startswith("broken: 2 of 24 samples could not be read and were left out")
    for file in (tmp_path / "broken").iterdir():
        file.write_bytes(b"no picture")
    with pytest.raises(InputError, match="24 of 24 samples cannot be read"):
        made(probed, TargetSources(inputs=tmp_path / "broken"), tmp_path / "none")


def test_adapters_are_refused_before_anything_is_scored(probed, site, tmp_path):
    run = LabelledRun(shutil.copytree(probed.path, tmp_path / "run"), "vit")
    base = load_file(run.path / "base/model.safetensors")
    name = next(name for name, value in base.items() if value.ndim == 2 and name.endswith("query.weight"))
    for task in TASKS:
        shutil.rmtree(run.path / task)
        factors = adapters.factors(*base[name].shape, 2, 1)
        adapters.save_adapter(run.path / task, {name.removesuffix(".weight"): factors})
    text = (
        "first is a LoRA adapter, and only whole checkpoints can be scored on labelled samples: give --choose none "
        "--check none, and pairs are used by their labels only, or make checkpoints of the adapters"
    )
    refused(run, site[1], tmp_path, text)
    [problem] = plan_tailor(Run.open(run.path), site[1], tmp_path / "out", Tailoring(), CPU).problems
    assert text in problem
    found = made(run, site[1], tmp_path / "out", choose="none", check="none")
    assert found.record["preference"]["method"] == "label"
    for scored in (compare, plan_comparison):
        with pytest.raises(InputError, match=r"scored on labelled samples: make checkpoints of the adapters and a run"):
            scored(run.path, Preference((1, 1)), site[1].pairs, reading=Reading(device="cpu"))
    with pytest.raises(InputError, match="leave out --choose-scale, or make checkpoints"):
        prefer(run.path, site[1], Estimation(choose_scale=True), CPU)


def test_an_output_that_is_one_file(probed, tmp_path):
    with pytest.raises(InputError, match="is one file, but a tailored model is a directory"):
        made(probed, TargetSources(equal=True), tmp_path / "out.safetensors")


def test_a_plan_says_what_would_be_done_and_every_problem(probed, site, tmp_path):
    run = Run.open(probed.path)
    plan = plan_tailor(run, site[0], tmp_path / "out", Tailoring(), CPU)
    assert (plan.preference, plan.samples, plan.problems) == ("probe", 24, ())
    assert plan.method.startswith("tunable_magmax, or tsv if many tasks matter")
    assert plan.merge.bytes_to_write > 0
    assert plan_tailor(run, TargetSources(equal=True), None, Tailoring(), CPU).method == "tunable_magmax"
    assert plan_tailor(run, site[1], None, Tailoring(), CPU).method.startswith("chosen by cross-validation")
    bare = changed_run(probed, tmp_path / "run", lambda record: record.pop("classifier"))
    (tmp_path / "taken").mkdir()
    empty = tmp_path / "nothing"
    plan = plan_tailor(Run.open(bare.path), TargetSources(inputs=empty), tmp_path / "taken", Tailoring(), CPU)
    for part in ("names none", "already exists", "nothing does not exist"):
        assert any(part in problem for problem in plan.problems), part
    assert not (tmp_path / "out").exists()
