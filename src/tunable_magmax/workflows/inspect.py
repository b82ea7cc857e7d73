"""What `tmx inspect` does: describes a checkpoint, and what each task gave to a merge; reads headers and the report."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.checkpoints.adapter import open_stored
from tunable_magmax.checkpoints.hub import located
from tunable_magmax.checkpoints.source import holds_adapter, open_checkpoint
from tunable_magmax.checkpoints.tensors import TensorInfo
from tunable_magmax.engines.outputs import read_report, report_place
from tunable_magmax.merging.report import MergeReport

# What is shown of a merge's report.
_SHOWN = "method tasks names elements scale seed options budget counts leftovers copied warnings".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Layer:
    """The merged tensors of one layer: their number and elements, and how many each task gave (if there are owners)."""

    name: str
    tensors: int
    elements: int
    counts: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint holds. `aliases` are further names of tied tensors; `report` is there if it is a merge."""

    path: Path
    format: str
    files: Mapping[str, int]
    """Weight files and their bytes."""
    tensors: tuple[TensorInfo, ...]
    aliases: Mapping[str, str]
    report: MergeReport | None

    @property
    def elements(self) -> int:
        return sum(info.numel for info in self.tensors)

    @property
    def bytes(self) -> int:
        """Bytes of data, without headers."""
        return sum(info.nbytes for info in self.tensors)

    def dtypes(self) -> dict[str, tuple[int, int, int]]:
        """Returns tensors, elements and bytes of each type, the type with most bytes first."""
        totals: dict[str, tuple[int, int, int]] = {}
        for info in self.tensors:
            tensors, elements, size = totals.get(info.dtype, (0, 0, 0))
            totals[info.dtype] = (tensors + 1, elements + info.numel, size + info.nbytes)
        return dict(sorted(totals.items(), key=lambda item: (-item[1][2], item[0])))

    def largest(self, limit: int) -> list[TensorInfo]:
        """Returns the tensors with most bytes, equal ones by name."""
        return sorted(self.tensors, key=lambda info: (-info.nbytes, info.name))[:limit]

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON data."""
        dtypes = self.dtypes().items()
        content: dict[str, Any] = {
            "path": str(self.path),
            "format": self.format,
            "files": dict(self.files),
            "elements": self.elements,
            "bytes": self.bytes,
            "dtypes": {code: {"tensors": n, "elements": d, "bytes": b} for code, (n, d, b) in dtypes},
            "tied": dict(self.aliases),
            "tensors": {info.name: {"dtype": info.dtype, "shape": list(info.shape)} for info in self.tensors},
        }
        if self.report is not None:
            merge = {name: getattr(self.report, name) for name in _SHOWN}
            content["merge"] = {**merge, "layers": [asdict(layer) for layer in layers(self.report)]}
        return content


def inspect_checkpoint(path: str | Path) -> Inspection:
    """Reads the headers of a safetensors or torch file, or of a directory, and the report of a merge if there is one.

    Of an adapter, this is what is stored: its factors, not the model that it makes of a base.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> save_file({"w": torch.zeros(2, 3), "step": torch.tensor(7)}, folder / "model.safetensors")
    >>> inspection = inspect_checkpoint(folder)
    >>> inspection.format, inspection.elements, inspection.dtypes()
    ('directory with a safetensors file', 7, {'F32': (1, 6, 24), 'I64': (1, 1, 8)})
    """
    path = located(path)
    adapter = holds_adapter(path)
    with open_stored(path) if adapter else open_checkpoint(path) as checkpoint:
        files = {file.name: file.stat().st_size for file in checkpoint.files}
        kind = f"{'adapter, a ' * adapter}{_kind(path, checkpoint.files)}"
        tensors, aliases = tuple(checkpoint.tensors.values()), dict(checkpoint.aliases)
    place = report_place(path)
    return Inspection(path, kind, files, tensors, aliases, read_report(path) if place.is_file() else None)


def _kind(path: Path, files: Sequence[Path]) -> str:
    with open(files[0], "rb") as file:
        what = "safetensors" if file.read(9)[8:] == b"{" else "torch"
    if not path.is_dir():
        return f"{what} file"
    return f"directory with {f'a {what} file' if len(files) == 1 else f'{len(files)} {what} files'}"


def layer_of(name: str) -> str:
    """Returns the layer that a tensor belongs to: its name up to the first number, or else its first two parts.

    >>> [layer_of(name) for name in ("encoder.layers.3.fc1.weight", "model.embeddings.word.weight", "head.bias", "w")]
    ['encoder.layers.3', 'model.embeddings', 'head', 'w']
    """
    parts = name.split(".")
    numbered = next((k for k, part in enumerate(parts) if part.isdecimal()), None)
    if numbered is not None:
        return ".".join(parts[: numbered + 1])
    return ".".join(parts[: max(1, min(2, len(parts) - 1))])


def layers(report: MergeReport) -> list[Layer]:
    """Groups the merged tensors of a report by layer, in the order people count in: layer 2 before layer 10.

    >>> import torch, tunable_magmax as tmx
    >>> base = {f"layers.{k}.weight": torch.zeros(2) for k in (2, 10)}
    >>> tasks = [{name: tensor + t for name, tensor in base.items()} for t in (1, 2)]
    >>> [(layer.name, layer.counts) for layer in layers(tmx.merge_state_dicts(base, tasks, method="magmax").report)]
    [('layers.2', (0, 2)), ('layers.10', (0, 2))]
    """
    groups: dict[str, list[str]] = {}
    for name in report.tensors:
        groups.setdefault(layer_of(name), []).append(name)
    result = []
    for layer, names in sorted(groups.items(), key=lambda item: _natural(item[0])):
        tensors = [report.tensors[name] for name in names]
        owned = [tensor.counts for tensor in tensors if tensor.counts is not None]
        counts = tuple(map(sum, zip(*owned, strict=True))) if len(owned) == len(tensors) else None
        result.append(Layer(layer, len(names), sum(math.prod(tensor.shape) for tensor in tensors), counts))
    return result


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]
