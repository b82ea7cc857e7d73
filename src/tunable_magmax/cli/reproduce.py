"""`tmx reproduce`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from tunable_magmax.cli.terminal import plain_warnings, show, table, tell, training_bars
from tunable_magmax.showing import plural

if TYPE_CHECKING:
    from tunable_magmax.experiments.config import Experiment


def reproduce(
    config: Path,
    /,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])] = Path("results"),
    work: Path = Path("work"),
    change: Annotated[list[str] | None, Parameter(name="--set")] = None,
    device: str | None = None,
    engine: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
    dry_run: bool = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Run an experiment: train, prefer, merge and evaluate what is missing; then write tables, figures and a page.

    tmx reproduce glyphs/characters-5 -o glyphs-out
    tmx reproduce mini-clip/cifar100-20 --set run.model=DIR --set run.benchmark.data=DIR
    tmx reproduce paper/cifar100-20 --dry-run

    Started again, it goes on. docs/training.md describes the file.

    Parameters
    ----------
    config
        A YAML, or the name of an experiment that comes with this package, such as glyphs/characters-5.
    out
        Records, tables and figures go into a folder of it, named after the setting.
    work
        Checkpoints go there; they can be removed when the records are complete.
    change
        KEY=VALUE instead of what the file says; may be repeated. Relative paths count from the current directory here,
        and from the file's own inside the file.
    device
        Default: the GPU if there is one.
    engine
        ray: seeds are done side by side on a Ray cluster, each with a GPU if it has any: docs/scale.md.
    ray_address
        HOST:PORT of the cluster's head. Default: a cluster on this machine.
    dry_run
        Only say what would be done, which data and weights are missing for it, and which model would be fetched.
    quiet
        No progress bars, no summary.
    as_json
        Print what was written as JSON on stdout.
    """
    from tunable_magmax.engines.settings import check_jobs
    from tunable_magmax.experiments.config import read_experiment
    from tunable_magmax.experiments.reproduce import JobOptions, headlines_of, reproduce_all

    check_jobs(engine, ray_address, device)
    experiment = read_experiment(config, change or ())
    if dry_run:
        return _tell_plan(experiment, out, work, as_json, here=engine == "local")
    # Ray prints what it has to say of dying nodes to stdout, where the result goes.
    with training_bars(quiet or as_json) as (progress, watch), plain_warnings(), redirect_stdout(sys.stderr):
        options = JobOptions(device, engine, ray_address, progress, watch)
        written = reproduce_all(experiment, out, work, options)
    said = headlines_of(experiment, out)
    if as_json:
        show(json.dumps({"written": [str(path) for path in written], "headlines": said}, indent=1) + "\n")
    elif not quiet:
        page = next(path for path in written if path.suffix == ".html")
        show("".join(f"{line}\n" for line in (*written, *said, f"all of it on one page: {page}")))
    return 0


def _tell_plan(experiment: Experiment, out: Path, work: Path, as_json: bool, here: bool) -> int:
    from tunable_magmax.experiments.reproduce import Supplies, look_for_supplies

    # Nodes of a cluster may see what this machine does not.
    supplies = look_for_supplies(experiment, out, work) if here else Supplies()
    rows = _rows(experiment, out)
    if as_json:
        plan = {"jobs": rows, "problems": supplies.missing, "notes": supplies.notes}
        show(json.dumps(plan, indent=1) + "\n")
    else:
        cells = [[row["setting"], row["kind"], f"{row['jobs']:,}", f"{row['missing']:,}"] for row in rows]
        total = sum(row["missing"] for row in rows)
        lines = [f"{experiment.name}: {plural(total, 'job')} to do"]
        lines += table([["setting", "kind", "jobs", "missing"], *cells])
        show("".join(f"{line}\n" for line in lines))
        show("".join(f"note: {text}\n" for text in supplies.notes))
        tell("".join(f"problem: {text}\n" for text in supplies.missing))
    return 2 if supplies.missing else 0


def _rows(experiment: Experiment, out: Path) -> list[dict[str, Any]]:
    from tunable_magmax.experiments.jobs import missing_jobs, plan_jobs
    from tunable_magmax.experiments.reproduce import results_folder

    rows: list[dict[str, Any]] = []
    for part in experiment.parts or (experiment,):
        missing = Counter(job.kind for job in missing_jobs(part, results_folder(part, out)))
        for kind, planned in Counter(job.kind for job in plan_jobs(part)).items():
            rows.append({"setting": part.setting, "kind": kind, "jobs": planned, "missing": missing[kind]})
    return rows
