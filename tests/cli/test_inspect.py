"""`tmx inspect`: what a checkpoint holds, and who gave what to a merge."""

import json

import pytest
import torch

from tunable_magmax.checkpoints.checkpoint import PositionedFile
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.workflows.inspect import inspect_checkpoint, layer_of


@pytest.fixture
def merge(tmx, sequence):
    """A merge in a directory."""
    out = sequence.folder / "merged"
    assert tmx("merge", *sequence.arguments, "--weights", "3,1,0", "-o", out).code == 0
    return out


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
