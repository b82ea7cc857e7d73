"""`tmx demo`."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import note, show_result, working

if TYPE_CHECKING:
    from tunable_magmax.experiments.demo import SiteStory, Story

NAMES, SITE = 44, 18  # columns of the models' names, and of a site


@dataclass(frozen=True)
class DemoOptions:
    """The options of `tmx demo`."""

    out: Path = Path("demo-out")
    """Write everything here. Started again, it goes on with the training there."""
    seed: int = 0
    """Other seeds give other pictures and another encoder."""


def demo(*, options: DemoOptions = parsed(DemoOptions)) -> None:
    """The whole story on the CPU, offline, in about two minutes: train, forget, tailor to two sites, compare.

    A small encoder is pre-trained on the spot and learns characters in eight tasks. Needs the extras train and report.
    """
    from tunable_magmax.experiments.demo import run_demo

    note(f"everything goes to {options.out}; this takes about two minutes")
    with working() as progress:
        story = run_demo(options.out, seed=options.seed, progress=progress)
    show_result(story.to_json(), story_lines(story, options.out))


def story_lines(story: Story, out: Path) -> Iterator[str]:
    """Yields what came out, in at most 20 lines of 80 columns."""
    learnt, left = (sum(shares) / len(shares) for shares in (story.learnt, story.left))
    characters = sum(map(len, story.characters))
    yield f"A small encoder learned {characters} characters in {len(story.tasks)} tasks, one after the other."
    yield f"Right after its training a task is {learnt:.0%} right, in the last checkpoint {left:.0%}."
    yield ""
    yield f"{f'% right of {story.unseen:,} unseen pictures':<{NAMES}}" + "".join(
        f"{s.site:>{SITE}}" for s in story.sites
    )
    for model in story.sites[0].accuracy:
        yield f"{model:<{NAMES}}" + "".join(f"{100 * site.accuracy[model]:{SITE}.0f}" for site in story.sites)
    yield f"{'  as it said beforehand':<{NAMES}}" + "".join(f"{_expected(site):>{SITE}}" for site in story.sites)
    yield ""
    seconds = max(site.seconds for site in story.sites)
    yield f"Each tailored model was made in {seconds:.0f} s, without training, from {story.known} unlabelled"
    yield "pictures of its site:"
    for site in story.sites:
        yield f"  {site.site} (% found/true): {_weights(site)}"
        yield f"  {'':{len(site.site)}}  {site.merge}, with a head fitted to it"
    yield f"picture: {story.picture}"
    folder = f"{out}/sites/{story.sites[0].site.replace(' ', '-')}"
    yield f"next: {program_name(sys.argv[0])} tailor {out}/run --inputs {folder}/inputs -o mine"


def _expected(site: SiteStory) -> str:
    value, low, high = (f"{100 * share:.0f}" for share in site.expected)
    return f"{value} [{low}, {high}]"


def _weights(site: SiteStory) -> str:
    """Returns the tasks of largest weight, found and true."""
    order = sorted(site.weights, key=lambda task: -site.weights[task])[: len(site.shares)]
    return ", ".join(f"{task} {100 * site.weights[task]:.0f}/{100 * site.shares.get(task, 0):.0f}" for task in order)


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
