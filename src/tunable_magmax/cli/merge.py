"""`tmx merge`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import note, show_result, table, warn, working, wrapped
from tunable_magmax.errors import plural, some_of
from tunable_magmax.files import show_size
from tunable_magmax.workflows.options import MergeOptions

if TYPE_CHECKING:
    from tunable_magmax.merging.report import MergeReport


def merge(source: Path | None = None, /, *, options: MergeOptions = parsed(MergeOptions)) -> None:
    """Merge a base and its task checkpoints into one checkpoint.

    tmx merge --base B --task A1 --task A2 --weights 3,1 -o OUT
    tmx merge RUN_DIR --preference site.json -o OUT
    tmx merge config.yml -o OUT

    An output appears whole or not at all.

    Parameters
    ----------
    source
        A run directory, or a YAML configuration.
    """
    from tunable_magmax.workflows.merge import check_merge
    from tunable_magmax.workflows.merge import merge as run

    if options.dry_run:
        with working():
            facts = check_merge(source, options, note)
        show_result(facts, fact_lines(facts))
        return
    notes: list[str] = []

    def hear(text: str) -> None:
        notes.append(text)
        note(text)

    with working() as progress:
        report = run(source, options, progress, hear)
    for warning in report.warnings:
        warn(warning)
    # Notes are not in the report beside the weights: they name paths, and equal merges must give equal bytes.
    show_result(replace(report, warnings=(*report.warnings, *notes)).to_json(), _summary(report, options))


def _summary(report: MergeReport, options: MergeOptions) -> Iterator[str]:
    total = max(report.elements, 1)
    if report.options["scale"] == "matched":
        source = "matched"
    else:
        source = "given" if options.merging.scale is not None else "as the configuration or the method says"
    yield f"{options.out}: {report.elements:,} elements merged by {report.method}, scale {report.scale:g} ({source})"
    if report.counts is not None:
        rows = [
            [name, f"{count:,} elements", f"{count / total:.2%}"]
            for name, count in zip(report.columns, report.counts, strict=True)
        ]
        yield from table(rows)
    if report.leftovers:
        yield f"  {report.leftovers:,} of them ({report.leftovers / total:.2%}) by lottery"
    if report.reduction:
        yield f"  {report.reduction}"


def fact_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yields what a dry run found."""
    yield from (f"warning: {text}" for text in facts["warnings"])
    yield f"method    {facts['method']}, {plural(len(facts['tasks']), 'task')}"
    yield f"merges    {facts['elements']:,} elements in {plural(len(facts['merged']), 'tensor')}, if tasks changed them"
    copied = f": {some_of(facts['copied'], limit=3)}" if facts["copied"] else ""
    yield from wrapped(f"copies    {plural(len(facts['copied']), 'tensor')}{copied}", 10)
    if facts["budget"] is not None:
        pairs = zip(facts["tasks"], facts["budget"], strict=True)
        yield from wrapped(f"budget    {', '.join(f'{name} {count:,}' for name, count in pairs)}", 10)
    yield f"writes    {show_size(facts['bytes'])} in {plural(facts['files'], 'file')}"
    yield f"memory    {show_size(facts['memory'])} beyond the interpreter"
    yield from (f"note: {text}" for text in facts["notes"])
