"""Labels and probabilities are those of encoder and head, from any input; `tmx predict` shows and writes them."""

import csv
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tunable_magmax
from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import Head, load_head, save_head
from tunable_magmax.models.prepared import embed_inputs
from tunable_magmax.workflows.options import PredictOptions, Reading, from_flat
from tunable_magmax.workflows.predict import load_classifier, predict

CPU = PredictOptions(reading=Reading(device="cpu"))
BIAS = np.array([0.0, 3.0, -2.0, 100.0])


@pytest.fixture(scope="module")
def model(image_run, tmp_path_factory):
    """A model directory as a tailored one: encoder, processor, and a head with a bias."""
    return site_model(image_run, tmp_path_factory.mktemp("images") / "model")


@pytest.fixture(scope="module")
def text_model(text_run, tmp_path_factory):
    return site_model(text_run, tmp_path_factory.mktemp("texts") / "model")


def site_model(run, folder):
    shutil.copytree(run.path / "base", folder)
    shutil.copy(run.path / "first" / "model.safetensors", folder)
    head = load_head(run.path / "head.safetensors")
    save_head(Head.of(head.weight, head.classes, 1.0, BIAS), folder / "head.safetensors")
    return folder


def expected(model, inputs):
    return load_head(model / "head.safetensors").probabilities(embed_inputs(load_encoder(model, "cpu"), inputs))


def test_images_and_their_paths(image_run, model, tmp_path):
    images = image_run.inputs("red", 3, 0) + image_run.inputs("green", 2, 7)
    for k, image in enumerate(images):
        image.save(tmp_path / f"{k}.png")
    paths = [tmp_path / f"{k}.png" for k in range(5)]
    loaded = tunable_magmax.load_classifier(model, "cpu")
    assert (loaded.classes, loaded.kind) == (("red", "blue", "green", "grey"), "image")
    shares = expected(model, images)
    for inputs in (images, paths, [*map(str, paths)], [images[0], *paths[1:]]):
        np.testing.assert_allclose(loaded.probabilities(inputs), shares, atol=1e-6)
    found = loaded.predict(paths, top=9)
    assert [one.label for one in found] == [loaded.classes[k] for k in shares.argmax(axis=1)]
    for one, row in zip(found, shares, strict=True):
        assert sum(share for _, share in one.top) == pytest.approx(1, abs=1e-5)
        assert [share for _, share in one.top] == sorted(row.tolist(), reverse=True) == pytest.approx(sorted(row)[::-1])
    assert [one.label for one in loaded.predict(images[0])] == [found[0].label]  # one alone
    assert loaded.probabilities([]).shape == (0, 4)


def test_files_folders_and_order(image_run, model, tmp_path):
    data = image_run.pairs(tmp_path / "site", {"red": 2, "blue": 1})
    shutil.copy(data / "red" / "0.png", data / "loose.png")
    shutil.copy(data / "red" / "0.png", tmp_path / "no_suffix")
    found = predict(model, [data / "red" / "1.png", data, tmp_path / "no_suffix"], options=CPU)
    names = [Path(one.input).relative_to(tmp_path).as_posix() for one in found.predictions]
    assert names == [
        "site/red/1.png",
        "site/blue/0.png",
        "site/loose.png",
        "site/red/0.png",
        "site/red/1.png",
        "no_suffix",
    ]
    assert sum(found.counts().values()) == 6
    by_name = dict(zip(names, found.predictions, strict=True))
    assert by_name["no_suffix"].probability == by_name["site/red/0.png"].probability


def test_tables_of_texts(text_model, tmp_path):
    (tmp_path / "lines.txt").write_text("hello\n\nmy card\n")
    (tmp_path / "table.csv").write_text("id,query\n7,my card\n")
    (tmp_path / "rows.jsonl").write_text('{"words": "pay", "text": "hello"}\n')
    files = [tmp_path / name for name in ("lines.txt", "table.csv", "rows.jsonl")]
    found = predict(text_model, files, replace(CPU, text=["my card"])).predictions
    assert [one.text for one in found] == ["hello", "my card", "my card", "hello", "my card"]
    assert [one.input for one in found][1:] == [f"{files[0]}:2", f"{files[1]}:1", f"{files[2]}:1", "text 1"]
    other = predict(text_model, files[2:], options=from_flat(PredictOptions, device="cpu", text_column="words"))
    assert other.predictions[0].text == "pay"


def test_inputs_are_read_a_batch_at_a_time(image_run, model, monkeypatch):
    """Never more images in memory than a batch: decoded ones are counted when a batch is done."""
    image, read, seen = image_run.inputs("red", 1, 0)[0], [], []

    def load(positions):
        for position in positions:
            read.append(position)
            yield image

    loaded = load_classifier(model, "cpu")
    monkeypatch.setattr("tunable_magmax.workflows.predict.READ_AT_ONCE", 4)
    samples = Samples("many", "image", 10, load)
    loaded.predict_samples(samples, progress=lambda done: seen.append((done, len(read))))
    assert seen == [(4, 4), (8, 8), (10, 10)]


def test_unreadable_ones_get_no_label(image_run, model, tmp_path):
    data = image_run.pairs(tmp_path / "site", {"red": 2})
    (data / "red" / "0.png").write_text("?")
    with pytest.warns(
        UserWarning, match=r"1 of 2 inputs could not be read and got no label: .*0\.png \(not an image\)"
    ):
        found = predict(model, [data], options=CPU)
    first, second = found.predictions
    assert (first.label, first.probability, first.top, first.error) == (None, None, (), "not an image")
    assert second.label is not None
    assert first.to_dict()["label"] is None
    with pytest.raises(InputError, match=r"0\.png \(not an image\)"):
        load_classifier(model, "cpu").predict([data / "red" / "0.png"])
    with pytest.raises(InputError, match=r"^none of 1 inputs can be read: .*0\.png \(not an image\)"):
        predict(model, [data / "red" / "0.png"], options=CPU)
    (data / "red" / "1.png").write_text("?")
    with pytest.raises(InputError, match=r"^none of 2 inputs can be read: .*0\.png \(not an image\), "):
        predict(model, [data], options=CPU)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda model, _: predict(model), r"what should be classified\? Give image files"),
        (lambda model, _: predict(model, options=replace(CPU, text=["hi", " "])), "a text is empty"),
        (lambda model, new: predict(model, [new / "no.png"]), r"no\.png does not exist"),
        (lambda model, new: predict(model, [new / "b"], replace(CPU, text=["a"])), "each takes a --text of its own"),
        (
            lambda model, new: predict(model, [new / "a.csv"], replace(CPU, out=new / "." / "a.csv")),
            r"a\.csv holds the inputs: choose another file",
        ),
        (lambda model, new: predict(model, [new]), r"holds no images \(.*\) and no parquet files"),
        (
            lambda model, _: predict(model, options=replace(CPU, text=["hi"])),
            r"text holds texts, but .*model classifies images",
        ),
        (lambda _, new: predict(new / "none", [new]), r"none"),
        (lambda model, new: predict(model, [new], options=replace(CPU, out=new)), r"labels go to a file"),
        (
            lambda model, _: load_classifier(model, "cpu").predict([3]),
            r"input 1 is a int, expected a PIL image, an array",
        ),
        (lambda model, _: load_classifier(model, "cpu").predict(5), r"samples are a int"),
        (lambda model, _: load_classifier(model, "cpu").predict([], top=0), r"top is 0, expected at least 1"),
    ],
)
def test_refused(model, tmp_path, call, says):
    with pytest.raises(InputError, match=says):
        call(model, tmp_path)


def test_models_that_are_refused(image_run, model, tmp_path):
    with pytest.raises(InputError, match=r"run is a run directory with several models: .*tmx tailor"):
        load_classifier(image_run.path)
    headless = shutil.copytree(image_run.path / "base", tmp_path / "headless")
    with pytest.raises(InputError, match=r"which head turns its embeddings into classes\? Give head, a file"):
        load_classifier(headless)
    save_head(Head.of(np.eye(4), ["a", "b", "c", "d"], 1.0), headless / "head.safetensors")
    with pytest.raises(InputError, match=r"the head has width 4 and the encoder .* do not belong together"):
        load_classifier(headless, "cpu")
    broken = shutil.copytree(model, tmp_path / "broken")
    from safetensors.torch import load_file, save_file

    state = load_file(broken / "model.safetensors")
    save_file({name: tensor * np.nan for name, tensor in state.items()}, broken / "model.safetensors")
    with pytest.raises(InputError, match=r"broken, or .* hold NaN or infinity"):
        load_classifier(broken, "cpu").predict(image_run.inputs("red", 1, 0))


# -- the command -----------------------------------------------------------------------------------------------------

ON_CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def photos(image_run, tmp_path_factory):
    folder = image_run.pairs(tmp_path_factory.mktemp("site") / "photos", {"red": 2, "blue": 2})
    (folder / "blue" / "1.png").write_text("?")
    return folder


def test_a_table(tmx, image_run, photos):
    result = tmx("predict", image_run.path / "first", photos, "--top", "2", *ON_CPU)
    assert result.code == 0
    assert result.err == (
        f"warning: 1 of 4 inputs could not be read and got no label: {photos}/blue/1.png (not an image)\n"
    )
    lines = iter(result.out.splitlines())
    assert next(lines).split() == ["label", "probability"]
    found = json.loads(tmx("predict", image_run.path / "first", photos, "--top", "2", *ON_CPU, "--json").out)
    for one in found["predictions"]:
        cells = [[pair["label"], f"{pair['probability']:.1%}"] for pair in one["top"]] or [[]]
        assert [next(lines).split() for _ in cells] == [[one["input"], *cells[0]], *cells[1:]]
    assert list(lines) == []


def test_files_of_labels(tmx, image_run, photos, tmp_path):
    command = ("predict", image_run.path / "first", photos, *ON_CPU)
    shown = json.loads(tmx(*command, "--json").out)
    result = tmx(*command, "-o", tmp_path / "new" / "labels.csv")
    assert "4 inputs classified: " in result.out
    assert f"written to {tmp_path / 'new' / 'labels.csv'}\n" in result.out
    with (tmp_path / "new" / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == [one["label"] or "" for one in shown["predictions"]]
    assert tmx(*command, "-q", "-o", tmp_path / "a.jsonl").out == ""
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == shown["predictions"]


def test_names_that_are_not_utf_8(tmx, image_run, photos, tmp_path):
    (tmp_path / "in").mkdir()
    try:
        shutil.copy(photos / "red" / "0.png", os.fsencode(tmp_path / "in") + b"/caf\xe9.png")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    command = ("predict", image_run.path / "first", tmp_path / "in", *ON_CPU)
    for name in ("a.csv", "a.jsonl"):
        assert tmx(*command, "-o", tmp_path / name).code == 0
        assert "caf\\udce9.png" in (tmp_path / name).read_text().replace("\\\\", "\\")
    assert "caf\\udce9.png" in tmx(*command).out
    assert json.loads(tmx(*command, "--json").out)["predictions"][0]["input"].endswith("caf\udce9.png")
