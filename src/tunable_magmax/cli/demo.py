"""`tmx demo`."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tunable_magmax.cli.merge_options import Json
from tunable_magmax.cli.terminal import progress_bars

if TYPE_CHECKING:
    from tunable_magmax.experiments.demo import Demonstration, Scores

NAMES, SITE, WIDTH = 34, 8, 110  # columns of the names, of a site, and of the text


def demo(
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])] = Path("demo-out"),
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """The whole story on the CPU, offline, in about two minutes: train, forget, prefer, merge for two sites, compare.

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
        story = run_demo(out, seed=seed, progress=progress)
    sys.stdout.write(story.to_json() if as_json else _table(story) + _story(story, out))


def _table(story: Demonstration) -> str:
    numbers = "".join(f"{f't{t}':>4}" for t in range(1, len(story.tasks) + 1))
    sites = "".join(f"{site.split()[0]:>{SITE}}" for site in story.sites)
    scales = "".join(f"  |{title:>{len(sites)}}" for title in ("scale matched", "scale 0.5"))
    lines = [f"{'':<{NAMES + len(numbers)}}{scales}", f"{'accuracy in %':<{NAMES}}{numbers}  |{sites}  |{sites}"]
    lines += [_line(row, row.model) for row in story.rows if row.own is None]
    for site in story.sites:
        lines.append(f"for the {site}")
        lines += [_line(row, f"  {row.model}") for row in story.rows if row.own == site]
    return "\n".join(lines) + "\n"


def _line(row: Scores, name: str) -> str:
    tasks = "".join(f"{100 * score:4.0f}" for score in row.tasks)
    matched, half = ("".join(f"{100 * score:{SITE}.1f}" for score in scores) for scores in (row.sites, row.half))
    return f"{name:<{NAMES}}{tasks}  |{matched}  |{half}"


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
        f"Lines with 'from' are merges, without training, by weights found from {story.known} pictures of the site "
        "or from their labels. The columns of the sites are measured on other pictures. The scale 'matched', the "
        "default, makes every merged step as long as the last task's; 0.5 is the paper's.",
        f"Look at {story.picture}, and try:",
    )
    site = out / "sites" / slug(next(iter(story.sites)))
    program = "tmx" if shutil.which("tmx") else sys.argv[0]
    commands = (
        f"eval {out}/run",
        f"prefer {out}/run --inputs {site}/inputs -o {out}/mine.json",
        f"merge {out}/run --preference {out}/mine.json -o {out}/mine",
        f"eval {out}/mine --data {site}/test",
    )
    text = "\n".join(textwrap.fill(sentence, WIDTH) for sentence in sentences)
    return f"\n{text}\n" + "".join(f"  {program} {command}\n" for command in commands)
