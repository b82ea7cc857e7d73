"""`tmx inspect`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import show_result, table, tell, working, wrapped
from tunable_magmax.errors import InputError, plural, some_of
from tunable_magmax.files import show_size
from tunable_magmax.workflows.options import InspectOptions

if TYPE_CHECKING:
    from tunable_magmax.checkpoints.tensors import TensorInfo
    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.workflows.inspect import Inspection
    from tunable_magmax.workflows.verify import Verification

FEW_TENSORS, FEW_TIES = 8, 5


def inspect(path: Path, /, *, options: InspectOptions = parsed(InspectOptions)) -> int:
    """Show what a checkpoint holds, and what each task gave to each layer of a merge; with --verify check it.

    tmx inspect merged/
    tmx inspect merged/ --verify
    tmx inspect merged/ --verify --base base/ --task task1/ --task task2/

    Of torch files only tensors are read: no code of theirs is run. Exit code of --verify: 0 all is well; 1 the merge is
    not what its report says; 2 it cannot be checked.

    Parameters
    ----------
    path
        A safetensors file, a torch file, a directory that holds one or several, or a hub name, org/name@revision.
    """
    if options.verify:
        return _verify(path, options)
    from tunable_magmax.workflows.inspect import inspect_checkpoint

    if options.checkpoints.base is not None or options.checkpoints.task or options.method is not None:
        raise InputError("--base, --task and --method are for merging again with --verify")
    inspection = inspect_checkpoint(path)
    merge = [] if inspection.report is None else _merge(inspection.report)
    show_result(inspection.to_dict(), [*_contents(inspection, options.tensors), *merge])
    return 0


def _verify(path: Path, options: InspectOptions) -> int:
    from tunable_magmax.engines.outputs import option_for_method
    from tunable_magmax.merging.methods import load_method
    from tunable_magmax.runs.recipe import read_tasks
    from tunable_magmax.workflows.verify import verify_checkpoint

    if options.method is not None:
        load_method(options.method)
    elif options.checkpoints.base is not None and (own := option_for_method(path)):
        raise InputError(f"{path} is by a method in a file, which only you can have run: add {shlex.join(own)}")
    paths, names = read_tasks(options.checkpoints.task)
    tasks = paths if names is None else dict(zip(names, paths, strict=True))
    with working() as progress:
        found = verify_checkpoint(path, options.checkpoints.base, tasks or None, progress=progress)
    show_result(found.to_dict(), _checks(path, found))
    if found.ok:
        return 0
    failed = sum(not check.ok for check in found.checks)
    inputs = ", or these are not its inputs in training order" if found.rederived else ""
    tell(
        f"error: {path} is not what its report says{inputs}: {failed} of {plural(len(found.checks), 'check')} failed\n"
    )
    return 1


def _checks(path: Path, found: Verification) -> Iterator[str]:
    from tunable_magmax.engines.outputs import option_for_method
    from tunable_magmax.workflows.merge import logged_inputs

    width = max(len(check.what) for check in found.checks)
    for check in found.checks:
        yield f"  {'ok    ' if check.ok else 'FAILED'}  {check.what:<{width}}  {check.detail}"
    if not found.ok:
        return
    yield f"{found.path} is what its report says"
    if not found.rederived and (known := logged_inputs(path)) is not None:
        names = [f"{name}=" for name in known.names or ()] or [""] * len(known.tasks)
        tasks = [part for name, place in zip(names, known.tasks, strict=True) for part in ("--task", f"{name}{place}")]
        yield "Its inputs are known; to merge them again and compare every byte:"
        own = option_for_method(path)
        yield shlex.join(["tmx", "inspect", str(path), "--verify", "--base", str(known.base), *tasks, *own])


def _contents(inspection: Inspection, everything: bool) -> Iterator[str]:
    yield f"{inspection.path}: {inspection.format}"
    yield from table([[name, show_size(size)] for name, size in inspection.files.items()])
    tensors, elements = plural(len(inspection.tensors), "tensor"), plural(inspection.elements, "element")
    yield f"{tensors}, {elements}, {show_size(inspection.bytes)}"
    kinds = [[code, f"{n:,}", f"{d:,}", show_size(b)] for code, (n, d, b) in inspection.dtypes().items()]
    if kinds:
        yield from table(kinds, ["type", "tensors", "elements", "size"])
    if inspection.aliases:
        yield plural(len(inspection.aliases), "tied name")
        ties = [f"  {alias} is {kept}" for alias, kept in inspection.aliases.items()]
        yield some_of(ties, len(ties) if everything else FEW_TIES, joint="\n")
    if everything or len(inspection.tensors) <= FEW_TENSORS:
        yield from _tensors("all tensors", inspection.tensors)
    else:
        yield from _tensors(f"the {FEW_TENSORS} largest tensors (--tensors lists all)", inspection.largest(FEW_TENSORS))


def _tensors(title: str, infos: Sequence[TensorInfo]) -> Iterator[str]:
    if infos:
        yield title
        shapes = [" x ".join(map(str, info.shape)) or "scalar" for info in infos]
        rows = [[i.name, i.dtype, shape, show_size(i.nbytes)] for i, shape in zip(infos, shapes, strict=True)]
        yield from table(rows, ["name", "type", "shape", "size"])


def _shown(value: Any) -> str:
    """Returns an option's value for people: few digits of a number, and how many entries a mapping has."""
    if isinstance(value, Mapping):
        return plural(len(value), "class", "classes")
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    from tunable_magmax.merging.budget import read_decimal

    try:  # weights are texts, which are exact
        return f"{float(read_decimal(value, 'it')):.4g}" if isinstance(value, float | str) else str(value)
    except InputError:
        return str(value)


def _merge(report: MergeReport) -> Iterator[str]:
    from tunable_magmax.workflows.inspect import layers

    yield ""
    yield f"a merge of {plural(report.tasks, 'task')} by {report.method}"
    facts = {} if report.names is None else {"names": ", ".join(report.columns)}
    facts |= {
        "merged": f"{plural(report.elements, 'element')} in {plural(len(report.tensors), 'tensor')}",
        "copied": f"{plural(len(report.copied), 'tensor')} as they are",
        "scale": f"{report.scale:g}{' (matched)' if report.options.get('scale') == 'matched' else ''}",
    }
    facts |= {name: _shown(value) for name, value in report.options.items() if name != "scale" and value is not None}
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        yield from wrapped(f"  {name:<{width}}{value}", width + 2)
    for warning in report.warnings:
        yield f"warning: {warning}"
    if not report.elements:
        return
    if report.leftovers:
        share = _percent(report.leftovers, report.elements)
        yield f"{report.leftovers:,} elements ({share}) were leftovers, given by lottery"
    if report.counts is None:
        yield f"elements have no owners: {report.method} mixes the tasks in each element"
        yield from table([[la.name, f"{la.elements:,}"] for la in layers(report)], ["layer", "elements"])
        return
    yield "elements by task" + (", each as its budget says" if report.counts == report.budget else "")
    counts = zip(report.labels(), report.counts, strict=True)
    rows = [[label, f"{n:,}", _percent(n, report.elements)] for label, n in counts]
    yield from table(rows, ["", "elements", "share"])
    yield "shares by layer and task"
    body = [
        [layer.name, f"{layer.elements:,}", *(_percent(n, layer.elements) for n in layer.counts or [0] * report.tasks)]
        for layer in layers(report)
    ]
    yield from table(body, ["layer", "elements", *report.columns], fixed=2)


def _percent(part: int, total: int) -> str:
    return f"{part / total:.2%}" if total else "-"
