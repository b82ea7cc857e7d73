"""`open_run`: what the commands do with a run directory, in Python, with samples as files or in memory."""

import gc
import warnings

import pytest
import torch
from safetensors.torch import load_file

import tunable_magmax as tmx

SITE = {"green": 14, "red": 8}
LABELS = [name for name, count in SITE.items() for _ in range(count)]


def inputs_of(made):
    return [value for name, count in SITE.items() for value in made.inputs(name, count, 500)]


@pytest.fixture
def calm():
    """Small samples are worth warnings, which other tests are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_a_run_says_what_it_consists_of(any_run):
    run = tmx.open_run(any_run.path)
    assert repr(run) == f"Run({str(any_run.path)!r}: 2 tasks: first, second; 4 classes; profiles; a head)"
    assert (run.names, list(run.checkpoints)) == (("first", "second"), ["first", "second"])
    assert repr(run.profiles[1]).startswith("Profile('second': 16 samples of 2 classes; 16 embeddings")


def test_samples_in_memory_give_what_files_give(any_run, tmp_path, calm):
    run, inputs = tmx.open_run(any_run.path), inputs_of(any_run)
    files = any_run.pairs(tmp_path / "site", SITE)
    (tmp_path / "labels.txt").write_text("\n".join(LABELS))
    assert run.prefer(labels=LABELS).weights == run.prefer(labels=tmp_path / "labels.txt").weights
    by_files, in_memory = run.prefer(labelled=files), run.prefer(labelled=zip(inputs, LABELS, strict=True))
    assert in_memory.weights == by_files.weights
    assert in_memory.prior == by_files.prior
    assert run.prefer(inputs=inputs, device="cpu").weights == pytest.approx(run.prefer(inputs=files).weights, abs=1e-4)
    compared = run.compare(in_memory, list(zip(inputs, LABELS, strict=True)))
    assert [row.share for row in compared.rows] == [row.share for row in run.compare(by_files, files).rows]


def test_a_merge_in_memory_is_the_one_in_files(text_run, tmp_path):
    run = tmx.open_run(text_run.path)
    site = run.prefer(weights=[3, 1])
    merged, report = run.merge(site, seed=7), run.merge(site, out=tmp_path / "out", seed=7)
    assert merged.report.counts == report.counts
    assert merged.report.names == report.names == ("first", "second")
    written = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(tensor, merged.state_dict[name]) for name, tensor in written.items())
    with run.session() as session:
        assert session.merge(weights=site, seed=7).report == merged.report


@pytest.mark.parametrize("given", [[1, 2, 3], {"first": 1}])
def test_plain_weights_are_no_preference(text_run, given):
    with pytest.raises(tmx.InputError, match="weights="):
        tmx.open_run(text_run.path).merge(given)


def test_tailored_from_pairs_in_memory_then_used(any_run, tmp_path, calm):
    run, inputs = tmx.open_run(any_run.path), inputs_of(any_run)
    pairs = list(zip(inputs, LABELS, strict=True))
    model = run.tailor(tmp_path / "model", labelled=pairs)
    assert repr(model).startswith(f"Tailored({str(tmp_path / 'model')!r}: first ")
    assert model.record.sources == {
        "labelled": f"22 labelled {'image' if any_run.kind == 'vit' else 'text'}s in memory"
    }
    assert run.tailor(tmp_path / "model", labelled=iter(pairs)).complete
    with pytest.raises(tmx.InputError, match="exists"):  # one sample more is another model
        run.tailor(tmp_path / "model", labelled=[*pairs, pairs[0]])
    assert run.tailor(tmp_path / "model", labelled=pairs[:-1], overwrite=True).preference != model.preference

    classifier = tmx.load_classifier(model)
    assert "4 classes of " in repr(classifier)
    [alone] = classifier.predict(inputs[0])
    assert alone.label == classifier.predict(inputs)[0].label
    right = [found.label == label for found, label in zip(classifier.predict(inputs), LABELS, strict=True)]
    measured = run.evaluate(model, pairs)
    assert measured.accuracy.overall.right == sum(right)
    assert run.compare(model, pairs).tailored.share.right == sum(right)


def test_a_model_without_a_place_predicts_and_goes_with_its_object(text_run, calm):
    run = tmx.open_run(text_run.path)
    model = run.tailor(inputs=inputs_of(text_run))
    place = model.out
    assert {each.label for each in model.predict(inputs_of(text_run), top=2)} <= set(run.classes["first"]) | set(
        run.classes["second"]
    )
    assert (place / "model.safetensors").is_file()
    del model
    gc.collect()
    assert not place.exists()


def test_every_form_of_model_is_evaluated(text_run):
    run = tmx.open_run(text_run.path)
    pairs, site = list(zip(inputs_of(text_run), LABELS, strict=True)), run.prefer(weights=[1, 3])
    merged = run.evaluate(run.merge(site), pairs)
    assert merged.accuracy == run.evaluate(site, pairs).accuracy
    found = run.evaluate("all", pairs)
    assert found.accuracies["second"] == run.evaluate("last", pairs).accuracy
    assert found.accuracies["base"] == run.evaluate(run.base, pairs).accuracy
    with pytest.raises(tmx.InputError, match=r"has no checkpoint 'frist' .did you mean 'first'"):
        run.evaluate("frist", pairs)
