"""`tmx demo`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tunable_magmax.cli.merge import Json
from tunable_magmax.cli.progress import progress_bars

if TYPE_CHECKING:
    from tunable_magmax.demo import Row


def demo(*, out: Annotated[Path, Parameter(name=["--out", "-o"])] = Path("demo-out"), as_json: Json = False) -> None:
    """Train a small model through eight tasks, merge it for two sites, compare: on the CPU, offline, in seconds.

    Parameters
    ----------
    out
        A directory for everything it makes.
    """
    from tunable_magmax.demo import SITES, run_demo

    with progress_bars(quiet=as_json) as progress:
        rows = run_demo(out, progress=progress)
    if as_json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    else:
        sys.stdout.write(_table(rows, list(SITES)) + _story(SITES, out))


def _table(rows: list[Row], sites: list[str]) -> str:
    tasks = "".join(f"{f't{t}':>5}" for t in range(1, len(rows[0].tasks) + 1))
    lines = [f"accuracy in %        {tasks}  |" + "".join(f"{site:>9}" for site in sites)]
    for row in rows:
        scores = "".join(f"{100 * score:5.0f}" for score in row.tasks)
        lines.append(f"{row.model:<21}{scores}  |" + "".join(f"{100 * score:9.1f}" for score in row.sites))
    return "\n".join(lines) + "\n"


def _story(sites: Mapping[str, tuple[float, ...]], out: Path) -> str:
    mixes = "; ".join(
        f"{site} sees " + ", ".join(f"{w:.0%} task {t}" for t, w in enumerate(weights, start=1) if w)
        for site, weights in sites.items()
    )
    program = "tmx" if shutil.which("tmx") else sys.argv[0]
    weights = ",".join(f"{weight:g}" for weight in next(iter(sites.values())))
    return (
        f"\n{mixes}.\n"
        f"The tunable merges were made from those shares alone, without training. The run is in {out}/run; try\n"
        f"  {program} merge {out}/run --weights {weights} -o {out}/mine\n  {program} inspect {out}/mine\n"
    )
