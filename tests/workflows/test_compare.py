"""A comparison counts what `eval` counts, fits every model's head alike, and says what the samples can tell."""

import json
import shutil
from dataclasses import replace

import builtin_run
import numpy as np
import pytest
from labelled_run import keeping
from runs.keeping import keep_samples
from scipy.stats import binomtest

from tunable_magmax import Preference
from tunable_magmax.data.source import memory_samples
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation import bench as benches
from tunable_magmax.evaluation.bench import Bench
from tunable_magmax.evaluation.comparison import holm
from tunable_magmax.evaluation.run_models import MergeSpec
from tunable_magmax.models.head import Head, save_head
from tunable_magmax.preference.site import Site
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows import material as site_of_run
from tunable_magmax.workflows.compare import compare as compare_models
from tunable_magmax.workflows.compare import compared_rows
from tunable_magmax.workflows.evaluate import evaluate
from tunable_magmax.workflows.init import init_run
from tunable_magmax.workflows.options import CompareOptions, InitOptions, Reading, SiteSources, TailorOptions
from tunable_magmax.workflows.tailor import decide, tailor

CPU = Reading(device="cpu")
TABLES = [{"red": 5, "blue": 5}, {"green": 5, "grey": 5}]
LIKELY = Preference((3, 1), tasks=("first", "second")).with_prior(TABLES, eps=0.02)


def compare(run, preference, data, reading=CPU, **options):
    return compare_models(run, CompareOptions(preference, data, reading=reading, **options))


@pytest.fixture(scope="module")
def kept(image_run, tmp_path_factory):
    """The run with a frozen head, and eight kept samples of each class."""
    return keeping(image_run, tmp_path_factory.mktemp("kept") / "run", 8, "training").path


@pytest.fixture(scope="module")
def site(image_run, tmp_path_factory):
    return image_run.pairs(tmp_path_factory.mktemp("site") / "site", {"red": 6, "blue": 4, "green": 3})


@pytest.fixture(scope="module")
def compared(kept, site):
    return compare(kept, LIKELY, site, reading=CPU)


@pytest.fixture(scope="module")
def builtin(tmp_path_factory):
    """The run whose tasks have classifiers of their own, and samples that it keeps."""
    path = builtin_run.build_builtin(tmp_path_factory.mktemp("builtin"))
    for t, name in enumerate(builtin_run.TASKS):
        texts, labels = builtin_run.texts_of(path / f"{name}.csv")
        keep_samples(Run.open(path), t, memory_samples(texts, "text", labels), source="evaluation")
    return path


def shares(found, head):
    return {row.model: row.share for row in found.rows if row.head == head}


def made(run, out, data, preference=LIKELY, **options):
    """What `eval` measures of a model that `tailor` writes."""
    tailor(run, TailorOptions(out=out, preference=preference, reading=CPU, **options))
    return evaluate(out, data, reading=CPU).accuracy.overall


# -- the same numbers as tailor and eval ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "method", "scale"),
    [("base", "last_task", 0), ("last", "last_task", 1), ("tunable_magmax 0.5", "tunable_magmax", 0.5)],
)
def test_a_row_is_what_tailor_writes_and_eval_measures(kept, site, compared, tmp_path, title, method, scale):
    expected = made(kept, tmp_path / "out", site, method=method, scale=scale)
    assert shares(compared, "fitted")[title] == expected


def test_the_tailored_model_is_what_tailor_makes(kept, site, compared, tmp_path):
    expected = made(kept, tmp_path / "out", site)
    assert compared.tailored.share == expected
    assert compared.tailored.head == "fitted"


@pytest.mark.parametrize("options", [{}, {"head": "old"}, {"method": "magmax", "scale": 0.7, "seed": 3}, {"scale": 0}])
def test_the_directory_of_a_tailored_model_is_that_model(kept, site, tmp_path, options):
    expected = made(kept, tmp_path / "out", site, **options)
    found = compare(kept, tmp_path / "out", site, reading=CPU)
    assert (found.tailored.share, found.tailored.head) == (expected, "own")
    assert found.model == str(tmp_path / "out")
    assert {"base", "task first", "last"} < set(shares(found, "fitted"))


def test_classifiers_of_their_own(builtin, tmp_path):
    site, preference = builtin / "all.csv", Preference((1, 2))
    expected = made(builtin, tmp_path / "out", site, preference)
    assert not (tmp_path / "out" / "head.safetensors").exists()
    found = compare(builtin, tmp_path / "out", site, reading=CPU)
    assert found.tailored.share == expected
    assert shares(found, "fitted")["base"].right > 0


def test_a_head_that_was_entered_later(builtin, tmp_path):
    run, site = shutil.copytree(builtin, tmp_path / "run"), builtin / "all.csv"
    draws = np.random.default_rng(0).normal(size=(len(builtin_run.LABELS), 16))
    save_head(Head.of(draws, builtin_run.LABELS, 5.0), tmp_path / "head.safetensors")
    init_run(run, InitOptions(head=str(tmp_path / "head.safetensors")))
    expected = made(run, tmp_path / "out", site, Preference((1, 2)))
    assert expected.value > 0.5  # a head was fitted, since the random one knows nothing
    for preference in (tmp_path / "out", Preference((1, 2))):
        assert compare(run, preference, site, reading=CPU).tailored.share == expected


def test_the_command_prints_what_json_holds(tmx, kept, site, tmp_path):
    LIKELY.save(tmp_path / "site.json")
    given = ("compare", kept, "--preference", tmp_path / "site.json", "--data", site, "--device", "cpu")
    result, found = tmx(*given), json.loads(tmx(*given, "--json").out)
    assert (result.code, "warning" in result.err) == (0, False)
    lines = result.out.splitlines()
    assert all(len(line) <= 80 for line in lines[1:])  # the first names run and data
    table = {line[2:34].strip(): line for line in lines if "%" in line and line.startswith("  ")}
    for row in found["rows"]:
        star = " *" if row["verdict"] is None else ""
        line = next(line for start, line in table.items() if start.startswith(row["model"] + star))
        assert f"{row['accuracy']:.1%}" in line
    assert all(part in " ".join(result.out.split()) for part in found["summary"])


# -- what is compared -------------------------------------------------------------------------------------------------


def test_labels_of_the_compared_samples_change_no_answer(kept, image_run, tmp_path):
    one = image_run.pairs(tmp_path / "one", {"red": 9})
    shutil.copytree(one, tmp_path / "other")
    (tmp_path / "other" / "red").rename(tmp_path / "other" / "blue")
    found = [shares(compare(kept, LIKELY, data, reading=CPU), "fitted") for data in (one, tmp_path / "other")]
    assert found[0].keys() == found[1].keys()
    assert any(share.right for share in found[0].values())
    for model, share in found[0].items():
        assert share.right + found[1][model].right <= 9


# -- what samples can tell --------------------------------------------------------------------------------------------


def models(*answers):
    return [(f"model {k}", "fitted", MergeSpec(checkpoint=k), np.array(right, bool)) for k, right in enumerate(answers)]


def first(count, samples=100):
    """So many of the first samples are right."""
    return [k < count for k in range(samples)]


def test_rows_hold_exact_tests_corrected_for_their_number():
    draws = np.random.default_rng(0).random((5, 80)) < np.array([[0.5], [0.9], [0.6], [0.5], [0.2]])
    rows = compared_rows(models(*draws), 2)
    expected = {}
    for k in (0, 1, 3, 4):
        won, lost = int((draws[k] & ~draws[2]).sum()), int((draws[2] & ~draws[k]).sum())
        expected[f"model {k}"] = binomtest(won, won + lost).pvalue
    corrected = dict(zip(expected, holm(list(expected.values())), strict=True))
    assert [row.share.right for row in rows] == sorted((int(right.sum()) for right in draws), reverse=True)
    for row in rows:
        assert (row.pair is None) == (row.model == "model 2")
        if row.pair is not None:
            assert row.pair.p_value == pytest.approx(expected[row.model])
            assert row.p_value == pytest.approx(corrected[row.model])
            assert (row.verdict != "cannot tell") == (row.p_value <= 0.05)


@pytest.mark.parametrize(("mine", "other"), [(90, 10), (10, 90), (90, 88), (88, 90), (50, 50)])
def test_sentences_name_who_wins(compared, mine, other):
    rows = compared_rows(models(first(mine), first(other)), 0)
    told = " ".join(replace(compared, rows=rows, samples=100).summary())
    row = next(row for row in rows if row.pair is not None)
    assert f"has {mine}.0% and is clearly better than {int(mine - other > 50)} of 1" in told
    assert ("`model 1` is clearly better" in told) == (other - mine > 50)
    assert ("`model 1`" in told) == (row.verdict != "clearly worse")


def test_three_samples_have_no_verdict(kept, image_run, tmp_path):
    three = image_run.pairs(tmp_path / "three", {"red": 2, "green": 1})
    found = compare(kept, LIKELY, three, reading=CPU)
    assert {row.verdict for row in found.rows} == {"cannot tell", None}
    assert [sentence[:11] for sentence in found.summary()] == ["No verdict:"]


# -- bad input --------------------------------------------------------------------------------------------------------


def test_labels_that_no_task_has(kept, image_run, tmp_path):
    mostly = image_run.pairs(tmp_path / "mostly", {"red": 8, "blue": 4})
    shutil.copytree(mostly / "red", mostly / "zebra")
    for file in sorted((mostly / "zebra").iterdir())[2:]:
        file.unlink()
    with pytest.warns(UserWarning, match="2 of 14 labels .*'zebra'"):
        found = compare(kept, LIKELY, mostly, reading=CPU)
    assert (found.samples, found.unknown_labels) == (12, 2)
    shutil.rmtree(mostly / "red")
    shutil.rmtree(mostly / "blue")
    with pytest.raises(InputError, match="'zebra'"):
        compare(kept, LIKELY, mostly, reading=CPU)


def test_preferences_and_models_that_belong_to_nothing_here(kept, site, builtin, tmp_path):
    with pytest.raises(InputError, match="a, b"):
        compare(kept, Preference((1, 1), tasks=("a", "b")), site)
    with pytest.raises(InputError, match="3 weights"):
        compare(kept, Preference((1, 1, 1)), site)
    with pytest.raises(InputError, match=r"preference\.json"):
        compare(kept, tmp_path, site)
    (tmp_path / "old").mkdir()
    LIKELY.save(tmp_path / "old/preference.json")
    for record in ("{}", "[]", "no JSON"):
        (tmp_path / "old/tmx-tailor.json").write_text(record)
        with pytest.raises(InputError, match=r"tmx-tailor\.json"):
            compare(kept, tmp_path / "old", site)


@pytest.mark.parametrize(("total", "anchors"), [(10**6, 100), (480, 20), (8, 10)])
def test_where_embedding_is_dear_fewer_samples_show_how_features_moved(kept, monkeypatch, total, anchors):
    monkeypatch.setattr(site_of_run, "affordable", lambda *_: total)
    with Bench(Run.open(kept), device="cpu") as bench:
        assert site_of_run.open_material(bench, LIKELY).all.anchors == anchors


@pytest.mark.parametrize(("total", "same"), [(480, True), (1799, True), (1800, False), (10_000, False)])
def test_where_embedding_is_dear_no_model_embeds_a_sample_twice(kept, site, monkeypatch, total, same):
    seen, embed = [], benches.embed_prepared

    def embedded(encoder, prepared, **options):
        seen.extend((bench._filled, picture.numpy().tobytes()) for picture in prepared.inputs["pixels"])
        return embed(encoder, prepared, **options)

    monkeypatch.setattr(site_of_run, "affordable", lambda *_: total)
    monkeypatch.setattr(benches, "embed_prepared", embedded)
    known = Site(Run.open(kept), SiteSources(inputs=site), CPU)
    with Bench(Run.open(kept), device="cpu") as bench:
        material = site_of_run.open_material(bench, LIKELY, known)
        decide(bench, material, LIKELY)
        assert (material.few.kept is material.all.kept) == same
    assert len(seen) == len(set(seen)) > 0
