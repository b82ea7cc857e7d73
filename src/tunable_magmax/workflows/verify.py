"""Checks that a merged checkpoint is what its report says, also by merging its inputs again: `tmx inspect --verify`."""

from __future__ import annotations

import hashlib
import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.checkpoints.checkpoint import Checkpoint, read_tensor
from tunable_magmax.checkpoints.heads import FittedTensors
from tunable_magmax.checkpoints.hub import located
from tunable_magmax.checkpoints.source import WEIGHT_SUFFIXES, open_checkpoint
from tunable_magmax.checkpoints.tensors import torch_dtype
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.engines.outputs import read_report
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import Progress, is_plain_name
from tunable_magmax.merging.budget import in_order
from tunable_magmax.merging.methods import method_class
from tunable_magmax.merging.report import MergeReport

# What a merge of the same inputs must find again. Warnings and file names may differ: paths have a say in them.
_DERIVED = ("elements", "budget", "counts", "leftovers", "scale", "last_length", "merged_length", "tensors", "inputs")
STEP_SHARE = 1e-3
"""For methods without the same bits everywhere: merged values may differ by this share of the model's mean step (the
root of its mean square), beside the rounding of the output's type."""
LENGTH_SHARE = 1e-4
"""Likewise for the length of the merged vector, and for a scale matched to it: by this share of them."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check; `detail` says what was found."""

    what: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Verification:
    """The checks of a merged checkpoint; `ok` if all of them passed, `rederived` if its inputs were merged again."""

    path: str
    checks: tuple[Check, ...]
    rederived: bool

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result for JSON."""
        return {"ok": self.ok, **asdict(self)}


def verify_checkpoint(
    path: str | Path,
    base: str | Path | None = None,
    tasks: Sequence[str | Path] | Mapping[str, str | Path] | None = None,
    *,
    progress: Progress | None = None,
) -> Verification:
    """Checks the files of a merged checkpoint, and the tensors in them, against its report.

    With `base` and `tasks` (in training order, or by name) the merge is done again as the report says, in the folder
    for temporary files, and every byte is compared; merged values of `tsv` are compared within a tolerance. What does
    not fit is a failed check; no report, or inputs that cannot be merged, an `InputError`.

    >>> verify_checkpoint("merged", "base", ["travel", "bank"]).ok  # doctest: +SKIP
    True
    """
    path = located(path)
    report = read_report(path)
    if (base is None) != (not tasks):
        raise InputError("to merge again, the base and all tasks are needed: give both or neither")
    if tasks and len(tasks) != report.tasks:
        raise InputError(f"{path} is a merge of {report.tasks} tasks, but {len(tasks)} were given")
    checks = list(_files(path, report, progress))
    if report.reduced is not None:
        if base is not None:
            raise InputError(
                f"{path} is an adapter, whose factors no other merge has to the bit: leave out base and tasks"
            )
        return Verification(str(path), tuple(checks), False)
    try:
        checkpoint = open_checkpoint(path)
    except InputError as error:
        checks.append(Check("the checkpoint can be opened", False, str(error)))
        return Verification(str(path), tuple(checks), False)
    with checkpoint:
        checks += _tensors(checkpoint, report)
        if base is not None and tasks:
            ordered = in_order(tasks, report.names or tuple(map(str, tasks)), "tasks")
            checks += _derived_again(checkpoint, report, base, ordered, progress)
    return Verification(str(path), tuple(checks), base is not None)


def _files(path: Path, report: MergeReport, progress: Progress | None) -> Iterator[Check]:
    files = {name: path / name for name in report.files} if path.is_dir() else dict.fromkeys(report.files, path)
    faults = [] if files else ["the report lists none"]
    faults += [f"{name!r} is not the name of a file in it" for name in files if not is_plain_name(name, depth=2)]
    for done, (name, file) in enumerate(() if faults else files.items(), start=1):
        try:
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            faults.append(f"{name} cannot be read ({error.strerror or error})")
        else:
            faults += [] if digest == report.files[name] else [f"{name} has {digest}, not {report.files[name]}"]
        if progress is not None:
            progress("digest", done, len(files))
    yield _check("SHA-256 of the files", faults, f"{len(files)} as reported")
    if path.is_dir():
        present = sorted(item.name for item in path.iterdir() if item.suffix in WEIGHT_SUFFIXES)
        extra = [f"{name} is not in the report" for name in present if name not in files]
        yield _check("no other weight files", extra, f"{len(present)} there, all reported")


def _tensors(checkpoint: Checkpoint, report: MergeReport) -> Iterator[Check]:
    held = checkpoint.tensors
    faults = [f"{name!r} is not in one of both" for name in sorted(held.keys() ^ {*report.tensors, *report.copied})]
    faults += [
        f"{name!r} is {held[name].dtype} {list(held[name].shape)}, not {tensor.dtype} {list(tensor.shape)}"
        for name, tensor in report.tensors.items()
        if name in held and (held[name].dtype, held[name].shape) != (tensor.dtype, tensor.shape)
    ]
    yield _check("tensors", faults, f"{len(held)} as reported")
    if report.options.get("fitted_head") is not None:
        fitted = _fitted(checkpoint, report)
        if fitted is None:
            yield Check("digest of the fitted head", False, "tensors of it are not in the files")
        elif all(held[name].dtype == "F32" for name in fitted.tensors):  # else it was rounded
            faults = [] if fitted.digest == report.options["fitted_head"] else [f"it is {fitted.digest}"]
            yield _check("digest of the fitted head", faults, fitted.digest)


def _fitted(checkpoint: Checkpoint, report: MergeReport) -> FittedTensors | None:
    """Reads the head that was fitted to a merge, which cannot be made again from its inputs; None if it lacks some."""
    head = (report.heads or {}).get("fitted")
    names = head.get("tensors") if isinstance(head, Mapping) else None
    if not isinstance(names, list) or not names or not all(name in checkpoint.tensors for name in names):
        return None
    return FittedTensors({name: read_tensor(checkpoint, name).float().numpy() for name in names})


def _derived_again(
    checkpoint: Checkpoint, report: MergeReport, base: str | Path, tasks: list[str | Path], progress: Progress | None
) -> Iterator[Check]:
    options = {"method": report.method, "seed": report.seed, **report.options}
    if options.get("fitted_head") is not None:
        options["fitted_head"] = _fitted(checkpoint, report)
    varies = method_class(report.method).merges_matrices
    with tempfile.TemporaryDirectory(prefix="tmx-verify-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are in the report
        out = Path(folder) / "again.safetensors"
        try:
            again = merge_checkpoints(base, tasks, out, names=report.names, progress=progress, **options)
        except TypeError as error:
            raise InputError(f"the options in the report are not those of a merge: {error}") from None
        tolerance = STEP_SHARE * abs(again.scale) * again.merged_length / math.sqrt(max(again.elements, 1))
        with open_checkpoint(out) as derived:
            faults = [
                f"{name!r} ({'merged' if name in again.tensors else 'copied'}) differs"
                for name in derived.tensors
                if not _same(checkpoint, derived, name, tolerance if varies and name in again.tensors else None)
            ]
    fine = f"merged ones within {tolerance:.2g}, others equal to the bit" if varies else "equal to the bit"
    yield _check("values, derived again", faults, f"all of {len(derived.tensors)} tensors: {fine}")
    faults = ["tensors that are copied differ"] if set(again.copied) != set(report.copied) else []
    for name in _DERIVED:
        one, other = getattr(again, name), getattr(report, name)
        close = varies and name in ("scale", "merged_length") and math.isclose(one, other, rel_tol=LENGTH_SHARE)
        faults += [] if close or one == other else [f"{name.replace('_', ' ')} differ from those reported"]
    yield _check("report, derived again", faults, f"scale, lengths and counts of {len(again.tensors)} tensors")


def _same(stored: Checkpoint, derived: Checkpoint, name: str, tolerance: float | None) -> bool:
    """Says whether two checkpoints hold the same tensor: to the bit, or within a tolerance beside rounding."""
    held, info = stored.tensors.get(name), derived.tensors[name]
    if held is None or (held.dtype, held.shape) != (info.dtype, info.shape):
        return False
    dtype = torch_dtype(info.dtype)
    if tolerance is None or dtype is None:
        return _bytes(stored, name) == _bytes(derived, name)
    one, other = (read_tensor(checkpoint, name).double() for checkpoint in (stored, derived))
    rounding = torch.finfo(dtype).eps * torch.maximum(one.abs(), other.abs())
    return bool(((one - other).abs() <= tolerance + rounding).all())


def _bytes(checkpoint: Checkpoint, name: str) -> bytearray:
    data = bytearray(checkpoint.tensors[name].nbytes)
    checkpoint.read_into(name, 0, memoryview(data))
    return data


def _check(what: str, faults: Sequence[str], fine: str) -> Check:
    """Returns a check that passes if there are no faults."""
    return Check(what, not faults, some_of(faults, limit=3, joint="; ") or fine)
