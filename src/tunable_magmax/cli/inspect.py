"""`tmx inspect`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tunable_magmax.cli.terminal import screen_width, show, table, wrapped_table
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import show_size
from tunable_magmax.showing import plural

if TYPE_CHECKING:
    from tunable_magmax.checkpoints.tensors import TensorInfo
    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.workflows.inspect import Inspection

FEW_TENSORS = 8
FEW_TIES = 5


def inspect(
    path: Path,
    /,
    *,
    tensors: bool = False,
    shares: bool = False,
    plot: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Show what a checkpoint holds; for a merge, also what each task gave to each layer.

    Only headers and the report are read. Torch files are opened weights-only: no code of theirs is run.

    Parameters
    ----------
    path
        A safetensors file, a torch file, a directory that holds one or several, or a hub name, org/name@revision.
    tensors
        List all tensors, in file order, not only the largest.
    shares
        Show the layers' elements in percent.
    plot
        Draw a merge's layers, divided among the tasks, into this file: .png, .svg or .pdf.
    as_json
        Print everything as JSON on stdout.
    """
    from tunable_magmax.workflows.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(path)
    if plot is not None:
        if inspection.report is None:
            raise InputError(f"{path} is not a merge with its report, so there are no tasks to draw: leave out --plot")
        from tunable_magmax.plots.bars import save_picture

        save_picture(inspection.report, plot)
    if as_json:
        show(json.dumps(inspection.to_dict(), indent=1) + "\n")
        return
    lines = [*_contents(inspection, tensors), *([] if inspection.report is None else _merge(inspection.report, shares))]
    if plot is not None:
        lines.append(f"picture: {plot}")
    show("".join(f"{line}\n" for line in lines))


def _contents(inspection: Inspection, everything: bool) -> Iterator[str]:
    yield f"{inspection.path}: {inspection.format}"
    yield from table([[name, show_size(size)] for name, size in inspection.files.items()])
    tensors, elements = plural(len(inspection.tensors), "tensor"), plural(inspection.elements, "element")
    yield f"{tensors}, {elements}, {show_size(inspection.bytes)}"
    kinds = [[code, f"{n:,}", f"{d:,}", show_size(b)] for code, (n, d, b) in inspection.dtypes().items()]
    if kinds:
        yield from table([["type", "tensors", "elements", "size"], *kinds])
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
        yield from table([["name", "type", "shape", "size"], *rows])


def _shown(value: Any) -> str:
    """Returns an option's value for people: six digits of a number, and how many entries a mapping has."""
    if isinstance(value, Mapping):
        return plural(len(value), "class", "classes")
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _merge(report: MergeReport, shares: bool) -> Iterator[str]:
    from tunable_magmax.workflows.inspect import layers

    yield ""
    yield f"a merge of {plural(report.tasks, 'task')} by {report.method}"
    named = {} if report.names is None else {"names": ", ".join(report.columns)}
    facts = {
        **named,
        "merged": f"{plural(report.elements, 'element')} in {plural(len(report.tensors), 'tensor')}",
        "copied": f"{plural(len(report.copied), 'tensor')} as they are",
        "scale": f"{report.scale:g}{' (matched)' if report.options.get('scale') == 'matched' else ''}",
    }
    for name, value in report.options.items():
        if name != "scale" and value is not None:
            facts[name] = _shown(value)
    width = max(map(len, facts)) + 2
    yield from (f"  {name:<{width}}{value}" for name, value in facts.items())
    for warning in report.warnings:
        yield f"warning: {warning}"
    if not report.elements:
        return
    if report.leftovers:
        share = _percent(report.leftovers, report.elements)
        yield f"{report.leftovers:,} elements ({share}) were leftovers, given by lottery"
    if report.counts is None:
        yield f"elements have no owners: {report.method} mixes the tasks in each element"
        yield from table([["layer", "elements"], *([la.name, f"{la.elements:,}"] for la in layers(report))])
        return
    yield "elements by task" + (", each as its budget says" if report.counts == report.budget else "")
    counts = zip(report.labels(), report.counts, strict=True)
    rows = [[label, f"{n:,}", _percent(n, report.elements)] for label, n in counts]
    yield from table([["", "elements", "share"], *rows])
    yield f"{'shares' if shares else 'elements'} by layer and task"
    header = ["layer", "elements", *report.columns]
    body = [
        [layer.name, f"{layer.elements:,}"]
        + [_percent(n, layer.elements) if shares else f"{n:,}" for n in layer.counts or [0] * report.tasks]
        for layer in layers(report)
    ]
    yield from wrapped_table([header, *body], fixed=2, width=screen_width())


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"
