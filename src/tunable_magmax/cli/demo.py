"""`tmx demo`."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tunable_magmax.cli.merge_options import Json
from tunable_magmax.cli.terminal import note, progress_bars, screen_width, show

if TYPE_CHECKING:
    from tunable_magmax.experiments.demo import Demonstration, Scores

NAMES, SITE, WIDTH = 33, 7, 110  # columns of the names, of a site, and of the text


def demo(
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])] = Path("demo-out"),
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """The whole story on the CPU, offline, in about two minutes: train, forget, tailor to two sites, compare.

    A small encoder is pre-trained on the spot and learns characters in eight tasks. Needs the extras train and report.

    Parameters
    ----------
    out
        A directory for everything it makes. Started again, it goes on with the training there.
    seed
        Other seeds give other pictures and another encoder.
    """
    from tunable_magmax.experiments.demo import run_demo

    with progress_bars(quiet=as_json) as progress:
        story = run_demo(out, seed=seed, progress=progress, notify=None if as_json else note)
    show(story.to_json() if as_json else _table(story) + _story(story, out))


def _table(story: Demonstration) -> str:
    numbers = "".join(f"{f't{t}':>4}" for t in range(1, len(story.tasks) + 1))
    sites = "".join(f"{site.split()[0]:>{SITE}}" for site in story.sites)
    scales = "".join(f"  |{title:>{len(sites)}}" for title in ("old head", "site's head", "scale 0.5"))
    lines = [f"{'':<{NAMES + len(numbers)}}{scales}", f"{'accuracy in %':<{NAMES}}{numbers}" + 3 * f"  |{sites}"]
    lines += [_line(row, row.model) for row in story.rows if row.own is None]
    for site in story.sites:
        lines.append(f"for the {site}")
        lines += [_line(row, f"  {row.model}") for row in story.rows if row.own == site]
    return "\n".join(lines) + "\n"


def _line(row: Scores, name: str) -> str:
    tasks = "".join(f"{100 * score:4.0f}" for score in row.tasks)
    columns = (row.sites, row.prior, row.half or [None] * len(row.sites))
    shown = ["".join(f"{'-':>{SITE}}" if x is None else f"{100 * x:{SITE}.1f}" for x in scores) for scores in columns]
    return f"{name:<{NAMES}}{tasks}" + "".join(f"  |{scores}" for scores in shown)


def _choices(story: Demonstration) -> list[str]:
    """Says what labelled pictures chose."""
    chosen = [
        f"{made['labelled'].method} at scale {made['labelled'].scale:.2g} for the {site}"
        for site, made in story.made.items()
    ]
    return [f"With labelled pictures, tmx tailor chose {' and '.join(chosen)}."]


def program_name(started: str) -> str:
    """Returns how to call this program again: by its name, or as it was started if the shell would not find it so.

    >>> program_name(".venv/bin/tmx"), program_name("/opt/lib/tunable_magmax/__main__.py")
    ('.venv/bin/tmx', 'python -m tunable_magmax')
    """
    path = Path(started)
    if path.name == "__main__.py":
        return "python -m tunable_magmax"
    found = shutil.which(path.name)
    known = found is not None and path.exists() and path.samefile(found)
    return path.name if known or not path.parent.name else shlex.quote(started)


def _story(story: Demonstration, out: Path) -> str:
    from tunable_magmax.experiments.table import slug

    tasks = ", ".join(f"t{t} {task}" for t, task in enumerate(story.tasks, start=1))
    mixes = [
        f"The {site} sees " + ", ".join(f"{share:.0%} {task}" for task, share in shares.items())
        for site, shares in story.sites.items()
    ]
    learnt = sum(story.learnt) / len(story.learnt)
    sentences = (
        f"Tasks in training order: {tasks}.",
        f"Just after its training a task has {learnt:.0%} on average; in the end {100 * story.forgetting:.0f} points "
        "of a task's best are forgotten.",
        f"{'. '.join(mixes)}.",
        f"Lines with 'from' are models that tmx tailor made, without training, from {story.known} pictures of the "
        "site, from their labels, or from both. The columns of the sites are measured on other pictures: with the head "
        "that training used; with the site's head, which tmx tailor fits to its own model, and which for the others is "
        "the old one with the site's shares; and with the old head at the paper's scale 0.5.",
        *_choices(story),
        f"Look at {story.picture}, and try:",
    )
    site = out / "sites" / slug(next(iter(story.sites)))
    program = program_name(sys.argv[0])
    commands = (
        f"eval {out}/run",
        f"tailor {out}/run --inputs {site}/inputs -o {out}/mine",
        f"predict {out}/mine {site}/inputs",
        f"eval {out}/mine --data {site}/test",
        f"compare {out}/run --preference {out}/mine --data {site}/test",
        f"studio {out}/run --inputs {site}/inputs --data {site}/test",
    )
    text = "\n".join(textwrap.fill(sentence, min(WIDTH, screen_width())) for sentence in sentences)
    return f"\n{text}\n" + "".join(f"  {program} {command}\n" for command in commands)
