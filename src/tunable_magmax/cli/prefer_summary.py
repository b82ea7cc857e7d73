"""What `tmx prefer` tells: weights with intervals, the reasons, and the budget for the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.cli.tables import number, table
from tunable_magmax.errors import TmxError, some_of

if TYPE_CHECKING:
    from tunable_magmax.preference.preference import Preference
    from tunable_magmax.runs.run import Run

# About 5% of a mixture of the tasks lie outside; few samples may show more by chance.
OUTSIDE = 0.2
FEW = 20
"""Samples below which a weight says little without its interval."""


def elements(run: Run) -> tuple[int | None, str | None]:
    """How many elements the run's checkpoints could merge, by their headers; or why that is not known."""
    from contextlib import ExitStack

    from tunable_magmax.checkpoints.layout import build_layout
    from tunable_magmax.checkpoints.lora.adapter import open_task
    from tunable_magmax.checkpoints.source import open_checkpoint
    from tunable_magmax.checkpoints.tensors import Signature

    try:
        with ExitStack() as opened:
            base = opened.enter_context(open_checkpoint(run.base))
            tasks = [opened.enter_context(open_task(path, base)) for path in run.tasks]
            signatures = [Signature(checkpoint.tensors, checkpoint.aliases) for checkpoint in (base, *tasks)]
            return build_layout(signatures, ["base", *run.labels]).elements, None
    except TmxError as error:
        return None, f"the budget is not known, for the run's checkpoints cannot be read: {str(error).splitlines()[0]}"


def starved(labels: Sequence[str], preference: Preference, budget: Sequence[int], elements: int) -> list[str]:
    """A warning about tasks with a weight but no element."""
    without = [
        label
        for label, weight, share in zip(labels, preference.weights, budget, strict=True)
        if weight > 0 and not share
    ]
    if not without:
        return []
    shown = some_of(without)
    return [
        f"the weight of {shown} is above 0 but too small for one of {elements:,} elements: the budget is 0, and the "
        "merge takes nothing from there; --shrink raises small weights"
    ]


def summary(
    labels: Sequence[str], preference: Preference, elements: int | None, budget: Sequence[int] | None
) -> Iterator[str]:
    """Lines for the terminal."""
    samples = preference.provenance.get("samples")
    yield preference.method + (f", from {number(samples, 'sample')}" if isinstance(samples, int) else "")
    yield from (f"  {reason}" for reason in _reasons(preference))
    if isinstance(samples, int) and samples < FEW and preference.intervals is not None:
        yield f"  {samples} are few: trust the intervals more than the weights, or even these out with --shrink auto"
    header = ["task", "weight"]
    columns = [list(labels), [f"{weight:.4f}" for weight in preference.weights]]
    if preference.intervals is not None:
        header.append(f"{_level(preference):.0%} interval")
        columns.append([f"{low:.3f} to {high:.3f}" for low, high in preference.intervals])
    if budget is not None:
        header.append("elements")
        columns.append([f"{share:,}" for share in budget])
    yield from table([header, *(list(row) for row in zip(*columns, strict=True))])
    if elements is not None:
        yield (
            f"budget of {elements:,} elements, counted from headers: approximate, since tensors that no task changed "
            "drop out of the merge"
        )


def _reasons(preference: Preference) -> Iterator[str]:
    if preference.method == "search":
        yield from _search_reasons(preference.provenance)
    facts = preference.provenance.get("auto")
    if isinstance(facts, dict):
        yield f"auto chose {facts['chosen']}: {facts['reason']}"
        fit = facts.get("fit")
        if isinstance(fit, float) and fit < 0.05:
            yield (
                f"fit {fit:.2f}: no mixture of the tasks explains well what the classifier sees; the target may hold "
                "something that no task held"
            )
    outside = preference.provenance.get("outside")
    if isinstance(outside, float) and outside > OUTSIDE:
        yield (
            f"{outside:.0%} of the samples are farther from every class than 95% of the tasks' own samples: the target "
            "may hold something that no task held"
        )
    parts = preference.provenance.get("sources")
    if isinstance(parts, list):
        for part in parts:
            count = part["samples"]
            told = f", {number(count, 'sample')}" if isinstance(count, int) else ""
            yield f"{part['share']:.0%} {part['method']}{told} ({preference.provenance['rule']})"


def _search_reasons(facts: Mapping[str, Any]) -> Iterator[str]:
    ended = "nothing better in the last ones" if facts["stopped"] == "patience" else "no more were asked for"
    yield f"{facts['accuracy']:.1%} right after {number(facts['trials'], 'trial')} ({ended})"
    starts = [
        f"{start['source']} {start['accuracy']:.1%}" for start in facts["starts"] if start["accuracy"] is not None
    ]
    if starts:
        yield f"started from {', '.join(starts)}"


def _level(preference: Preference) -> float:
    parts = preference.provenance.get("sources")
    record = parts[0]["provenance"] if isinstance(parts, list) else preference.provenance
    facts = record.get("bootstrap")
    return float(facts["level"]) if isinstance(facts, dict) else 0.9


def written(out: Path | None, plot: Path | None, preference: Preference) -> Iterator[str]:
    """What is where now, and what to do with it."""
    if plot is not None:
        yield f"chart: {plot}"
    yield f"wrote {out}" if out is not None else "nothing written; -o FILE keeps it for tmx merge --preference FILE"
    scale = preference.provenance.get("scale")
    if preference.method == "search" and isinstance(scale, float):
        yield f"the scale is not part of a preference: merge with --preference {out or 'FILE'} --scale {scale!r}"
