"""`tmx push`: a model directory becomes one commit on the hub, and can be used from there."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from adapters import factors, save_adapter
from hub_server import ROUTES

# A habit of huggingface_hub's own upload.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")


@pytest.fixture
def merged(sequence, tmx, tmp_path):
    (tmp_path / "base").mkdir()
    sequence.base.rename(tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text('{"model_type": "bert"}')
    tasks = [part for task in sequence.tasks for part in ("--task", task)]
    assert tmx("merge", "--base", tmp_path / "base", *tasks, "-o", tmp_path / "out").code == 0
    return tmp_path / "out"


def test_a_push_and_the_model_from_there(hub, merged, tmx):
    result = tmx("push", merged, "org/site", "--private", "--json")
    assert result.code == 0, result.err
    pushed = json.loads(result.out)
    assert pushed["address"] == f"{hub.address}/org/site"
    there = hub.repos["org/site"]["main"]
    assert there == {file.name: file.read_bytes() for file in merged.iterdir()}
    assert there.keys() == pushed["files"].keys()
    assert hub.private == {"org/site"}
    assert sum("/commit/" in request for request in hub.requests) == 1
    assert "hf_a_secret" not in result.out + result.err
    shown = json.loads(tmx("inspect", f"org/site@{pushed['commit']}", "--json").out)
    assert shown["merge"]["method"] == "tunable_magmax"
    assert tmx("inspect", "org/site", "--verify").code == 0


def test_what_should_be_private_never_becomes_public(hub, merged, tmx):
    hub.repos["org/site"] = {"main": {}}
    assert "org/site is there already and is public" in tmx("push", merged, "org/site", "--private").err
    assert hub.repos["org/site"]["main"] == {}


def test_a_dry_run_sends_nothing(hub, merged, tmx):
    result = tmx("push", merged, "org/site", "--dry-run")
    assert result.code == 0, result.err
    assert "model.safetensors" in result.out
    assert "org/site: 5 files" in result.out
    assert hub.requests == []


def test_an_adapter_whose_base_everybody_has(hub, tmx, tmp_path):
    for base, code in (("org/base", 0), ("gpt2", 0), ("/models/base", 2), (None, 2)):
        adapter = save_adapter(tmp_path / "adapter", {"q": factors(6, 4, 2, 0)}, base_model_name_or_path=base)
        result = tmx("push", adapter, "org/adapter", "--dry-run")
        assert result.code == code, result.err
        assert ("base_model_name_or_path" in result.err) == (code == 2)


def test_what_does_not_belong_is_refused_all_at_once(hub, merged, tmx, tmp_path):
    (tmp_path / "secret.txt").write_text("")
    (merged / "notes.txt").symlink_to(tmp_path / "secret.txt")
    (merged / "photo.jpg").write_text("")
    (merged / "inner").mkdir()
    (merged / "inner" / ".env").write_text("")
    (merged / "tmx-config.yaml").unlink()
    result = tmx("push", merged, "org/site")
    assert result.code == 2
    assert [line.strip(" -") for line in result.err.splitlines()[1:]] == [
        "inner/.env is no part of this model: move it elsewhere",
        "notes.txt is a link that leads out of the directory, or no file: put the file itself there",
        "photo.jpg is no part of this model: move it elsewhere",
        "tmx-config.yaml is missing, which tmx-report.json lists",
    ]
    assert hub.requests == []


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("embeddings.bin", b"x", "no part of this model"),
        ("training_args.bin", b"PK\3\4", "no part of this model"),
        ("modeling.py", b"x", "no part of this model"),
        ("tokenizer.pkl", b"x", "a pickle"),
        ("vocab.txt", b"\x80\4\x95", "a pickle"),
        ("tokenizer.model", b"PK\3\4", "a pickle"),
    ],
)
def test_files_that_happen_to_lie_there_do_not_travel(hub, merged, tmx, name, content, reason):
    (merged / name).write_bytes(content)
    result = tmx("push", merged, "org/site")
    assert result.code == 2
    assert f"{name} is {reason}" in result.err
    assert hub.requests == []


def test_a_model_of_pickles_is_not_pushed(hub, tmx, tmp_path):
    (tmp_path / "model").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "model" / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in tmx("push", tmp_path / "model", "org/site").err
    assert tmx("convert", tmp_path / "model", "-o", tmp_path / "safe").code == 0
    (tmp_path / "safe" / "tokenizer.json").write_text("{}")
    assert tmx("push", tmp_path / "safe", "org/site").code == 0
    assert set(hub.repos["org/site"]["main"]) == {"model.safetensors", "tokenizer.json"}


@pytest.mark.parametrize("step", ["create", "preupload", "batch", "store", "commit"])
def test_a_hub_that_fails_half_way_keeps_what_it_had(hub, merged, tmx, monkeypatch, step):
    hub.repos["org/site"] = {"main": {"old.txt": b"old"}}
    fail = [
        (m, p, (lambda s, *a: s.answer(400, {"error": "half-way"})) if h.__name__ == step else h) for m, p, h in ROUTES
    ]
    monkeypatch.setattr("hub_server.ROUTES", fail)
    result = tmx("push", merged, "org/site")
    assert result.code == 1
    assert "could not be uploaded to org/site (" in result.err
    assert hub.repos["org/site"]["main"] == {"old.txt": b"old"}
    monkeypatch.setattr("hub_server.ROUTES", ROUTES)
    assert tmx("push", merged, "org/site").code == 0
    assert "model.safetensors" in hub.repos["org/site"]["main"]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_a_push_that_is_stopped_changes_nothing_there(hub, merged, tmx, monkeypatch, stop):
    hub.repos["org/site"] = {"main": {"old.txt": b"old"}}
    sending, go_on = threading.Event(), threading.Event()

    def waits(handler, body, oid):
        sending.set()
        go_on.wait(20)

    slow = [(methods, path, waits if answer.__name__ == "store" else answer) for methods, path, answer in ROUTES]
    monkeypatch.setattr("hub_server.ROUTES", slow)
    command = [sys.executable, "-m", "tunable_magmax", "push", str(merged), "org/site"]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    ) as push:
        try:
            assert sending.wait(30)
            push.send_signal(stop)
            err = push.communicate(timeout=20)[1]
        finally:
            push.kill()
            go_on.set()
    assert push.returncode == {signal.SIGINT: 130, signal.SIGKILL: -9}[stop]
    assert "Traceback" not in err
    assert (len(err.splitlines()) == 1) == (stop != signal.SIGKILL)
    assert hub.repos["org/site"]["main"] == {"old.txt": b"old"}
    monkeypatch.setattr("hub_server.ROUTES", ROUTES)
    assert tmx("push", merged, "org/site").code == 0


def test_unfinished_and_misnamed(hub, merged, tmx):
    partial = merged.rename(merged.with_name("out.partial"))
    assert "is no finished model" in tmx("push", partial, "org/site").err
    assert "give org/name" in tmx("push", partial, "site").err
    assert "is no finished model" in tmx("push", Path("none"), "org/site").err


def test_a_run_on_the_hub_is_tailored_pushed_and_used_from_there(hub, image_run, tmx, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entries = {
        name: f"me/{name}@{hub.put(f'me/{name}', image_run.path / name)}" for name in ("base", "first", "second")
    }
    shutil.copytree(image_run.path, "run", ignore=lambda _, names: [name for name in names if name in entries])
    record = json.loads(Path("run/run.json").read_text())
    for task in record["tasks"]:
        task["checkpoint"] = entries[task["name"]]
    record |= {"base": entries["base"]}
    Path("run/run.json").write_text(json.dumps(record))
    data = image_run.pairs(tmp_path / "data", {"red": 2, "green": 2})
    result = tmx("tailor", "run", "--weights", "3,1", "-o", "site", "-q")
    assert result.code == 0, result.err
    assert json.loads(Path("site/tmx-report.json").read_text())["hub"]["task 2"] == entries["second"]
    assert tmx("push", "site", "me/site").code == 0
    shutil.rmtree("run")
    local, remote = (
        json.loads(tmx("predict", model, data / "red", "--device", "cpu", "--json").out)["predictions"]
        for model in ("site", "me/site")
    )
    assert remote == local
    accuracy = tmx("eval", "me/site", "--data", data, "--device", "cpu", "-q")
    assert accuracy.code == 0, accuracy.err
