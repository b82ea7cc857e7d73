"""`tmx init`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import note, show_result, table, working
from tunable_magmax.errors import plural
from tunable_magmax.workflows.options import InitOptions

if TYPE_CHECKING:
    from tunable_magmax.workflows.init import InitResult


def init(run_dir: Path, /, *, options: InitOptions = parsed(InitOptions)) -> None:
    """Make a run directory of checkpoints that were trained elsewhere, or add data or a head to one.

    tmx init run/ --base bert/ --task travel=out/travel --task bank=out/bank
    tmx init run/ --base bert/ --task out/travel --task out/bank --data travel=travel.csv --data bank=bank.csv
    tmx init run/ --data travel=travel.csv
    tmx init run/ --head cat,dog

    Checkpoints stay where they are.

    Parameters
    ----------
    run_dir
        The directory to make, or a run without --base and --task: then data and head are added to it.
    """
    from tunable_magmax.workflows.init import init_run

    with working() as progress:
        made = init_run(run_dir, options, progress)
    record = {**made.to_dict(), "written": not options.dry_run}
    show_result(record, _lines(made, options.dry_run))
    if not options.dry_run:
        for line in (*made.notes, *_kept(made)):
            note(line)


def _lines(made: InitResult, dry_run: bool) -> Iterator[str]:
    given = made.inputs
    yield f"{given.path}: {'would be ' * dry_run}a run of {plural(len(given.tasks), 'task')} on {given.base}"
    width, rows, missing = max(map(len, given.tasks)), [], []
    for name, found in given.tasks.items():
        profile, data = made.task(name)[0], ""
        if profile is None:
            missing.append(name)
        if name in given.data and profile is not None:
            classes = sum(count > 0 for count in profile.label_counts)
            data = f"{plural(profile.samples, 'sample')} of {plural(classes, 'class', 'classes')}"
        elif name in given.data:
            data = f"profile of {given.data[name].origin}"
        rows.append([f"{name:<{width}}  {found}", data])
    yield from table(rows)
    if dry_run:
        return
    run, first = shlex.quote(str(given.path)), shlex.quote(next(iter(given.tasks)))
    yield "next:"
    if missing:
        yield f"  tmx init {run} --data {shlex.quote(missing[0])}=DATA  # {plural(len(missing), 'task')} to go"
        yield f"  tmx tailor {run} --weights {first}=1 -o site-model  # or by opinion, without data"
    else:
        yield f"  tmx tailor {run} --inputs SITE -o site-model  # SITE: unlabelled samples"


def _kept(made: InitResult) -> Iterator[str]:
    kept = [entry for name in made.inputs.data if (entry := made.task(name)[1]) is not None]
    if not kept:
        return
    samples = plural(sum(entry.samples for entry in kept), "sample")
    each = f"at most {max(entry.per_class for entry in kept)} of each class"
    yield f"kept {samples}, {each}, in {made.inputs.path / 'kept'}: they stay in the run; --keep 0 keeps none"
