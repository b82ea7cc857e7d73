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

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.heads import FittedTensors
from tunable_magmax.checkpoints.hub import located
from tunable_magmax.checkpoints.source import WEIGHT_SUFFIXES, open_checkpoint
from tunable_magmax.checkpoints.tensors import torch_dtype
from tunable_magmax.checkpoints.views import read_tensor
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.engines.log import read_report
from tunable_magmax.errors import InputError, StorageError, closest, some_of
from tunable_magmax.files import Progress, is_plain_name
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.merging.report import MergeReport

_BLOCK = 1 << 22
# What a merge of the same inputs must find again. Warnings and file names may differ: paths have a say in them.
_DERIVED = ("elements", "budget", "counts", "leftovers", "scale", "last_length", "merged_length")
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
    """Checks a merged checkpoint against its report: digests, files, tensors, sums of counts.

    With `base` and `tasks` (in training order, or by name) the merge is done again as the report says, in the folder
    for temporary files, and every byte is compared; merged values of `tsv` are compared within a tolerance. What does
    not fit is a failed check; no report, or inputs that cannot be merged, an `InputError`.

    >>> import tempfile, torch, tunable_magmax as tmx
    >>> from safetensors.torch import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> for k in range(3):
    ...     save_file({"w": torch.full((4,), float(k))}, folder / f"{k}.safetensors")
    >>> inputs = folder / "0.safetensors", [folder / "1.safetensors", folder / "2.safetensors"]
    >>> report = tmx.merge_checkpoints(*inputs, folder / "merged.safetensors")
    >>> verify_checkpoint(folder / "merged.safetensors", *inputs).ok
    True
    """
    path = located(path)
    report = read_report(path)
    if (base is None) != (not tasks):
        raise InputError("to merge again, the base and all tasks are needed: give both or neither")
    if tasks and len(tasks) != report.tasks:
        raise InputError(f"{path} is a merge of {report.tasks} tasks, but {len(tasks)} were given")
    checks = [*_files(path, report, progress), _sums(report)]
    try:
        checkpoint = open_checkpoint(path)
    except InputError as error:
        checks.append(Check("the checkpoint can be opened", False, str(error)))
        return Verification(str(path), tuple(checks), False)
    with checkpoint:
        checks += _tensors(checkpoint, report)
        if base is not None and tasks:
            checks += _derived_again(checkpoint, report, base, _in_order(tasks, report), progress)
    return Verification(str(path), tuple(checks), base is not None)


def _in_order(tasks: Sequence[str | Path] | Mapping[str, str | Path], report: MergeReport) -> list[str | Path]:
    """Returns tasks by name in the order of the report's names."""
    if not isinstance(tasks, Mapping):
        return list(tasks)
    if report.names is None:
        return list(tasks.values())
    for name in tasks:
        if name not in report.names:
            hint = closest(name, report.names)
            raise InputError(f"the merge has no task {name!r}{hint}; its tasks are {', '.join(report.columns)}")
    return [tasks[name] for name in report.names]


# -- from the files alone ---------------------------------------------------------------------------------------------


def _files(path: Path, report: MergeReport, progress: Progress | None) -> Iterator[Check]:
    files = {name: path / name for name in report.files} if path.is_dir() else dict.fromkeys(report.files, path)
    faults = [] if files else ["the report lists none"]
    faults += [f"{name!r} is not the name of a file in it" for name in files if not is_plain_name(name, depth=2)]
    faults += [f"the report lists {len(files)}, found one"] if not path.is_dir() and len(files) > 1 else []
    total, done = sum(file.stat().st_size for file in files.values() if file.is_file()), 0
    for name, file in () if faults else files.items():
        try:
            digest = hashlib.sha256()
            with open(file, "rb") as stream:
                while block := stream.read(_BLOCK):
                    digest.update(block)
                    done += len(block)
                    if progress is not None:
                        progress("digest", done, total)
        except OSError as error:
            faults.append(f"{name} cannot be read ({error.strerror or error})")
        else:
            if digest.hexdigest() != report.files[name]:
                faults.append(f"{name} has {digest.hexdigest()}, the report says {report.files[name]}")
    yield _check("SHA-256 of the files", faults, f"{len(files)} as reported")
    if path.is_dir():
        present = sorted(item.name for item in path.iterdir() if item.suffix in WEIGHT_SUFFIXES)
        extra = [f"{name} is not in the report" for name in present if name not in files]
        yield _check("no other weight files", extra, f"{len(present)} there, all reported")


def _sums(report: MergeReport) -> Check:
    """Checks that the numbers of a report fit together."""
    sizes = {name: math.prod(tensor.shape) for name, tensor in report.tensors.items()}
    counts = [tensor.counts for tensor in report.tensors.values() if tensor.counts is not None]
    faults = []
    if sum(sizes.values()) != report.elements:
        faults.append(f"the tensors have {sum(sizes.values())} elements, the report says {report.elements}")
    if len(counts) != (0 if report.counts is None else len(sizes)):
        faults.append(f"{len(counts)} of {len(sizes)} tensors have counts")
    if report.counts is not None:
        faults += [
            f"{name!r} has {tensor.counts}, which should add up to {sizes[name]}"
            for name, tensor in report.tensors.items()
            if tensor.counts is None or min(tensor.counts, default=0) < 0 or sum(tensor.counts) != sizes[name]
        ]
        sums = tuple(map(sum, zip(*counts, strict=True))) or (0,) * report.tasks
        others = {"the tensors' counts": sums, "the budget": report.budget or sums}
        faults += [
            f"counts are {report.counts}, {what} {them}" for what, them in others.items() if them != report.counts
        ]
    if not 0 <= (report.leftovers or 0) <= report.elements:
        faults.append(f"{report.leftovers} of {report.elements} elements are leftovers")
    return _check("numbers of the report", faults, f"{report.elements} elements in {len(sizes)} tensors")


def _tensors(checkpoint: Checkpoint, report: MergeReport) -> Iterator[Check]:
    held, reported = checkpoint.tensors, {*report.tensors, *report.copied}
    faults = [f"{name!r} is not in the report" for name in held if name not in reported]
    faults += [f"{name!r} is in the report, not in the files" for name in sorted(reported - held.keys())]
    both = report.tensors.keys() & set(report.copied)
    faults += [f"{name!r} is both merged and copied in the report" for name in sorted(both)]
    for name, tensor in report.tensors.items():
        info = held.get(name)
        if info is not None and (info.dtype, info.shape) != (tensor.dtype, tensor.shape):
            faults.append(f"{name!r} is {info.dtype} {list(info.shape)}, not {tensor.dtype} {list(tensor.shape)}")
    yield _check("tensors", faults, f"{len(held)} of the names, types and shapes that are reported")
    if report.options.get("fitted_head") is not None:
        fitted = _fitted(checkpoint, report)
        if fitted is None:
            yield Check("the fitted head", False, "tensors of it are not in the files")
        elif all(held[name].dtype == "F32" for name in fitted.tensors):  # else it was rounded
            faults = [] if fitted.digest == report.options["fitted_head"] else [f"it is {fitted.digest}"]
            yield _check("digest of the fitted head", faults, fitted.digest)


def _fitted(checkpoint: Checkpoint, report: MergeReport) -> FittedTensors | None:
    """Reads the head that was fitted to a merge, which cannot be made again from its inputs; None if it lacks some."""
    told = (report.heads or {}).get("fitted")
    names = told.get("tensors") if isinstance(told, Mapping) else None
    if not isinstance(names, list) or not names or not all(name in checkpoint.tensors for name in names):
        return None
    return FittedTensors({name: read_tensor(checkpoint, name).float().numpy() for name in names})


# -- by merging again -------------------------------------------------------------------------------------------------


def _derived_again(
    checkpoint: Checkpoint, report: MergeReport, base: str | Path, tasks: list[str | Path], progress: Progress | None
) -> Iterator[Check]:
    options = {"method": report.method, "seed": report.seed, **report.options}
    if options.get("fitted_head") is not None:
        options["fitted_head"] = _fitted(checkpoint, report)
    varies = report.method in METHODS and METHODS[report.method].merges_matrices
    with tempfile.TemporaryDirectory(prefix="tmx-verify-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are in the report
        out = Path(folder) / "again.safetensors"
        try:
            again = merge_checkpoints(base, tasks, out, names=report.names, progress=progress, **options)
        except TypeError as error:
            raise InputError(f"the options in the report are not those of a merge: {error}") from None
        with open_checkpoint(out) as derived:
            yield _values(checkpoint, derived, again, varies)
    faults = [] if not report.inputs or dict(again.inputs) == dict(report.inputs) else ["the inputs' bytes differ"]
    for name in _DERIVED:
        one, other = getattr(again, name), getattr(report, name)
        close = varies and name in ("scale", "merged_length") and math.isclose(one, other, rel_tol=LENGTH_SHARE)
        faults += [] if close or one == other else [f"{name.replace('_', ' ')}: {one}, the report says {other}"]
    differ = [k for k in {**again.tensors, **report.tensors} if again.tensors.get(k) != report.tensors.get(k)]
    faults += [f"{name!r} differs" for name in [*differ, *sorted(set(again.copied) ^ set(report.copied))]]
    yield _check("report, derived again", faults, f"scale, lengths and counts of {len(again.tensors)} tensors")


def _values(stored: Checkpoint, derived: Checkpoint, again: MergeReport, varies: bool) -> Check:
    """Compares all values with those of a merge done again: to the bit, or merged ones within a tolerance."""
    tolerance = STEP_SHARE * abs(again.scale) * again.merged_length / math.sqrt(max(again.elements, 1))
    differing: list[str] = []
    for name, info in derived.tensors.items():
        held, dtype = stored.tensors.get(name), torch_dtype(info.dtype)
        kind = "merged" if name in again.tensors else "copied"
        if held is None or (held.dtype, held.shape) != (info.dtype, info.shape):
            differing.append(f"{name!r} ({kind}) differs")
        elif varies and kind == "merged" and dtype is not None:
            distance = max([_distance(*pair, dtype) for pair in _blocks(stored, derived, name)], default=0.0)
            if not distance <= tolerance:
                differing.append(f"{name!r} ({kind}) differs by up to {distance:.2g}, the tolerance is {tolerance:.2g}")
        elif any(one != other for one, other in _blocks(stored, derived, name)):
            differing.append(f"{name!r} ({kind}) differs")
    total = sum(info.numel for info in derived.tensors.values())
    fine = f"merged ones within {tolerance:.2g}, others equal to the bit" if varies else "equal to the bit"
    return _check("values, derived again", differing, f"all {total:,}: {fine}")


def _blocks(stored: Checkpoint, derived: Checkpoint, name: str) -> Iterator[tuple[memoryview, memoryview]]:
    """Yields a tensor of two checkpoints block by block; a block that cannot be read has no bytes."""
    size = derived.tensors[name].nbytes
    for start in range(0, size, _BLOCK):
        one, other = (memoryview(bytearray(min(_BLOCK, size - start))) for _ in range(2))
        derived.read_into(name, start, other)
        try:
            stored.read_into(name, start, one)
        except StorageError:
            one = memoryview(b"")
        yield one, other


def _distance(one: memoryview, other: memoryview, dtype: torch.dtype) -> float:
    """Returns how far two blocks of values are apart at most, beyond the rounding of their type."""
    if one.nbytes != other.nbytes:
        return math.inf
    left, right = (torch.frombuffer(block, dtype=dtype).double() for block in (one, other))
    apart = (left - right).abs() - torch.finfo(dtype).eps * torch.maximum(left.abs(), right.abs())
    return float(apart.nan_to_num(nan=math.inf).max().clamp(min=0))


def _check(what: str, faults: Sequence[str], fine: str) -> Check:
    """Returns a check that passes if there are no faults."""
    return Check(what, not faults, some_of(faults, limit=3, joint="; ") or fine)
