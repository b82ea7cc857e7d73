"""`tmx prefer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import given_warnings, show_result, table, working, wrapped
from tunable_magmax.errors import plural
from tunable_magmax.workflows.options import PreferOptions

if TYPE_CHECKING:
    from tunable_magmax.preference.preference import Preference


def prefer(run_dir: Path, /, *, options: PreferOptions = parsed(PreferOptions)) -> None:
    """Find how much each task matters to a site, from what is known of it.

    tmx prefer RUN_DIR --inputs site/images -o site.json
    tmx prefer RUN_DIR --labels site.csv -o site.json
    tmx prefer RUN_DIR --labelled site/classes --method search -o site.json
    tmx prefer RUN_DIR --weights 3,1,0 -o site.json

    Labels and inputs are compared with the tasks' profiles, which `tmx init --data` makes.

    Parameters
    ----------
    run_dir
        The run directory, with run.json, checkpoints and profiles.
    """
    from tunable_magmax.workflows.prefer import prefer as find

    replaces = options.out is not None and options.out.exists()
    with working() as progress:
        preference = find(run_dir, options, progress)
    lines = [*_summary(preference), *_written(options, replaces)]
    show_result({"preference": preference.to_dict(), "warnings": given_warnings()}, lines)


def _summary(preference: Preference) -> Iterator[str]:
    """Yields how the weights were found, weights with intervals, and the likeliest classes."""
    facts: Mapping[str, Any] = preference.provenance
    samples, error = facts.get("samples"), preference.expected_error
    whence = f", from {plural(samples, 'sample')}" if isinstance(samples, int) else ""
    yield f"{preference.method}{whence}" + ("" if error is None else f"; expected error of these weights {error:.2f}")
    if preference.method == "search":
        starts = ", ".join(f"{start['source']} {start['accuracy']:.1%}" for start in facts["starts"])
        trials = plural(facts["trials"], "trial")
        yield f"  {facts['accuracy']:.1%} right in cross-validation after {trials}; {starts}"
    labels = preference.tasks or [f"task {t}" for t in range(1, len(preference.weights) + 1)]
    columns = [labels, [f"{weight:.4f}" for weight in preference.weights]]
    header = ["task", "weight"]
    if preference.intervals is not None:
        header.append("90% interval")
        columns.append([f"{low:.3f} to {high:.3f}" for low, high in preference.intervals])
    yield from table([*zip(*columns, strict=True)], header)
    if preference.prior is not None:
        shares = preference.prior.shares
        likely = ", ".join(f"{name} {shares[name]:.1%}" for name in sorted(shares, key=lambda name: -shares[name])[:3])
        yield from wrapped(f"site prior: {likely} ...; {preference.prior.eps:.1%} spread over all classes", 2)


def _written(options: PreferOptions, replaced: bool) -> Iterator[str]:
    """Yields which files were written."""
    if options.out is None:
        yield "nothing written; -o FILE keeps it for tmx merge --preference FILE"
    else:
        yield f"wrote {options.out}{', in place of the preference that was there' if replaced else ''}"
