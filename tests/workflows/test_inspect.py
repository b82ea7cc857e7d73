"""`tmx inspect` shows who gave what to a merge; `--verify` finds any difference from its report and its inputs."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tunable_magmax.checkpoints.checkpoint import PositionedFile
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.workflows.inspect import inspect_checkpoint, layer_of
from tunable_magmax.workflows.merge import logged_inputs
from tunable_magmax.workflows.verify import verify_checkpoint

METHODS = ["tunable_magmax", "magmax", "ties", "last_task", "tsv"]


def failed(path, *inputs):
    return [check.what for check in verify_checkpoint(path, *inputs).checks if not check.ok]


def edit_report(path, change):
    place = path / "tmx-report.json" if path.is_dir() else path.with_name(f"{path.stem}.report.json")
    report = json.loads(place.read_text())
    change(report)
    place.write_text(json.dumps(report))


@pytest.fixture
def merge(tmx, sequence):
    """A sharded merge with weights that leave rational traces."""
    out = sequence.folder / "merged"
    options = ["--weights", "0.3,0.1,0.7", "--seed", 5, "--shard-size", "200B"]
    assert tmx("merge", *sequence.arguments, *options, "-o", out).code == 0
    return out


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_derived_again(tmx, sequence, method):
    out = sequence.folder / ("m.safetensors" if method in ("ties", "magmax") else "m")
    weights = [] if method in ("magmax", "last_task") else ["--weights", "0.1,2,0.7"]
    options = ["--exclude", "head.*", "--scale", "0.3", "--dtype", "bfloat16", "--scope", "tensor"]
    options = options if method == "tunable_magmax" else options[:-2]
    assert tmx("merge", *sequence.arguments, "--method", method, *weights, *options, "-o", out).code == 0
    found = verify_checkpoint(out, sequence.base, sequence.tasks)
    assert [check for check in found.checks if not check.ok] == []
    assert found.rederived


def test_one_flipped_bit(tmx, sequence, merge):
    shard = sorted(merge.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    result = tmx("inspect", "--verify", merge)
    assert result.code == 1
    assert shard.name in result.out
    assert result.err.startswith("error: ")
    assert failed(merge, sequence.base, sequence.tasks) == ["SHA-256 of the files", "values, derived again"]


def test_a_report_that_was_adjusted_to_other_weights(sequence, merge):
    """Digests can be forged; the merge itself cannot."""
    import hashlib

    shard = sorted(merge.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(iter(tensors))
    tensors[name] = tensors[name] + 1
    save_file(tensors, shard)
    edit_report(
        merge, lambda report: report["files"].update({shard.name: hashlib.sha256(shard.read_bytes()).hexdigest()})
    )
    assert failed(merge) == []
    assert failed(merge, sequence.base, sequence.tasks) == ["values, derived again"]


def test_a_cut_file(merge):
    shard = sorted(merge.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert failed(merge) == ["SHA-256 of the files", "the checkpoint can be opened"]


def test_a_weight_file_that_the_report_does_not_know(sequence, merge):
    shutil.copy(sequence.base, merge / "model.safetensors")  # which loaders would prefer to the shards
    assert failed(merge) == ["no other weight files"]


def shift(counts):
    counts[0], counts[1] = counts[0] + 1, counts[1] - 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda r: r["tensors"]["embed.weight"].update(shape=[4, 11]), "tensors"),
        (lambda r: r["tensors"]["embed.weight"].update(dtype="F16"), "tensors"),
        (lambda r: r.update(copied=[]), "tensors"),
        (lambda r: r.update(copied=["steps", "ghost"]), "tensors"),
        (lambda r: r.update(files={}), "no other weight files"),
        (lambda r: r["files"].update({"../x": "0"}), "SHA-256 of the files"),
        (lambda r: r["files"].update({"/etc/hostname": "0"}), "SHA-256 of the files"),
        (lambda r: r["files"].update({"1_Pooling/../config.json": "0"}), "SHA-256 of the files"),
    ],
)
def test_an_edited_report(merge, change, what):
    edit_report(merge, change)
    assert what in failed(merge)


@pytest.mark.parametrize(
    ("change", "whats"),
    [
        (lambda r: shift(r["counts"]), {"report, derived again"}),
        (lambda r: shift(r["tensors"]["embed.weight"]["counts"]), {"report, derived again"}),
        (lambda r: r.update(elements=1), {"report, derived again"}),
        (lambda r: r.update(scale=0.25), {"report, derived again"}),
        (lambda r: r["options"].update(seed=6), {"values, derived again"}),
        (lambda r: r["options"].update(weights=["1", "1", "1"]), {"values, derived again", "report, derived again"}),
        (lambda r: r["options"].update(exclude=["head.*"]), {"report, derived again"}),
    ],
)
def test_an_edited_report_against_the_inputs(sequence, merge, change, whats):
    edit_report(merge, change)
    assert failed(merge) == []
    assert whats <= set(failed(merge, sequence.base, sequence.tasks))


def test_another_base(sequence, merge):
    changed = dict(sequence.state_dicts[0])
    changed["steps"] = torch.tensor([5, 7])
    save_file(changed, sequence.folder / "other.safetensors")
    found = verify_checkpoint(merge, sequence.folder / "other.safetensors", sequence.tasks)
    assert [check.detail for check in found.checks if not check.ok] == ["'steps' (copied) differs"]


def test_unusable_input_is_exit_code_2(tmx, sequence, merge):
    no_report = tmx("inspect", "--verify", sequence.base)
    assert (no_report.code, no_report.out) == (2, "")
    assert tmx("inspect", "--verify", sequence.folder / "nowhere").code == 2
    few = tmx("inspect", "--verify", merge, "--base", sequence.base, "--task", sequence.tasks[0])
    assert few.code == 2
    assert tmx("inspect", "--verify", merge, "--base", sequence.base).code == 2
    assert tmx("inspect", merge, *sequence.arguments).code == 2
    (merge / "tmx-report.json").write_text("{}")
    assert tmx("inspect", "--verify", merge).code == 2


def test_a_merge_is_known_inside_its_own_directory(tmx, merge, monkeypatch):
    monkeypatch.chdir(merge)
    for result in (
        tmx("inspect", "--verify", "."),
        tmx("merge", "tmx-config.yaml", "-o", "../again", "--shard-size", "200B"),
    ):
        assert result.code == 0
    weights = sorted(path.name for path in merge.glob("*.safetensors"))
    assert weights
    assert all((merge / name).read_bytes() == (merge.parent / "again" / name).read_bytes() for name in weights)


def test_the_log_tells_how_to_merge_again(tmx, sequence, merge):
    out = tmx("inspect", "--verify", merge).out
    command = out.splitlines()[-1].split()
    assert tmx(*command[1:]).code == 0
    known = logged_inputs(merge)
    assert known is not None
    assert list(known.tasks) == sequence.tasks
    sequence.tasks[0].unlink()
    assert logged_inputs(merge) is None


def test_a_plain_checkpoint(tmx, sequence):
    result = tmx("inspect", sequence.base)
    assert result.code == 0
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines[0] == f"{sequence.base}: safetensors file"
    assert "10 tensors, 121 elements, 492 B" in lines
    assert "F32 9 119 476 B" in lines
    assert "I64 1 2 16 B" in lines
    assert "embed.weight F32 11 x 4 176 B" in lines
    assert "a merge of" not in result.out


def test_tied_names_and_torch_files(tmx, tmp_path):
    weight = torch.zeros(3, 2)
    torch.save({"wte.weight": weight, "head.weight": weight, "scalar": torch.tensor(1.5)}, tmp_path / "model.pt")
    result = tmx("inspect", tmp_path / "model.pt")
    assert "torch file" in result.out
    assert "head.weight is wte.weight" in result.out
    assert "scalar" in result.out
    found = json.loads(tmx("inspect", tmp_path / "model.pt", "--json").out)
    assert found["tied"] == {"head.weight": "wte.weight"}
    assert found["elements"] == 7


def test_headers_only(sequence, merge, monkeypatch):
    reads = []
    original = PositionedFile.read_into

    def spy(self, offset, buffer):
        reads.append((self.path, offset + buffer.nbytes))
        original(self, offset, buffer)

    monkeypatch.setattr(PositionedFile, "read_into", spy)
    inspect_checkpoint(merge)
    for path, end in reads:
        with open(path, "rb") as file:
            assert end <= max(64, 8 + int.from_bytes(file.read(8), "little"))


def test_a_merge_shows_what_each_task_gave_to_each_layer(tmx, merge):
    report = MergeReport.from_json((merge / "tmx-report.json").read_text())
    result = tmx("inspect", merge)
    assert "a merge of 3 tasks by tunable_magmax" in result.out
    words = [line.split() for line in result.out.splitlines()]
    for layer in ("embed", "layers.0", "layers.1", "layers.10", "head"):
        counts = [sum(report.tensors[n].counts[t] for n in report.tensors if layer_of(n) == layer) for t in range(3)]
        assert [layer, str(sum(counts)), *(f"{count / sum(counts):.2%}" for count in counts)] in words
    names = [line[0] for line in words if line]
    assert names.index("layers.1") < names.index("layers.10")


def test_a_single_merged_file_is_recognised_by_the_report_beside_it(tmx, sequence):
    out = sequence.folder / "merged.safetensors"
    assert tmx("merge", *sequence.arguments, "--method", "average", "-o", out).code == 0
    result = tmx("inspect", out)
    assert "a merge of 3 tasks by average" in result.out
    assert "elements have no owners" in result.out
