"""The two sites of the demonstration: which tasks' characters each of them sees, and pictures of them as files."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.lottery import derived_seed

if TYPE_CHECKING:
    from tunable_magmax.data.samples import Samples

Progress = Callable[[str, int, int], None]

# Five characters each, in the order in which the alphabet brings them.
TASKS = ("digits-1", "latin-1", "greek-1", "cyrillic", "signs", "digits-2", "latin-2", "greek-2")
EACH = 5
SITES: dict[str, dict[str, float]] = {
    "post office": {"digits-1": 0.25, "cyrillic": 0.5, "digits-2": 0.25},
    "maths class": {"greek-1": 0.3, "signs": 0.4, "greek-2": 0.3},
}
KNOWN, UNSEEN = 100, 1000  # pictures of a site: for the preference, and for the evaluation


def slug(name: str) -> str:
    """A name for folders.

    >>> slug("post office")
    'post-office'
    """
    return name.replace(" ", "-")


def characters() -> tuple[str, ...]:
    """Those of each task."""
    from tunable_magmax.data.glyphs import alphabets

    drawn = "".join(alphabets()[0].characters)
    return tuple(drawn[EACH * t : EACH * (t + 1)] for t in range(len(TASKS)))


def write_site(place: Path, shares: Mapping[str, float], seed: int, number: int, report: Progress) -> None:
    """Pictures of a site: `inputs` and their `labels.txt`, which are known of it, and `test`, which is not."""
    from tunable_magmax.data.glyphs import SITE, glyph_pictures

    draw = random.Random(derived_seed(seed, "site", number))
    tasks = draw.choices(list(shares), weights=list(shares.values()), k=KNOWN + UNSEEN)
    labels = [EACH * TASKS.index(task) + draw.randrange(EACH) for task in tasks]
    pictures = glyph_pictures(labels, EACH * len(TASKS), seed, SITE + number)
    (place / "inputs").mkdir(parents=True)
    names = [pictures.classes[label] for label in labels]
    (place / "labels.txt").write_text("\n".join(names[:KNOWN]) + "\n", encoding="utf-8")
    for position, picture in enumerate(pictures.load(range(len(labels)))):
        folder = place / "inputs" if position < KNOWN else place / "test" / names[position]
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / f"{position:04}.png")
        report("drawing the sites", number * len(labels) + position + 1, len(SITES) * len(labels))


def known_pictures(place: Path, classes: tuple[str, ...]) -> Samples:
    """The pictures that are known of a site, with their labels."""
    from tunable_magmax.data.samples import Samples
    from tunable_magmax.data.source import open_samples

    loose = open_samples(place / "inputs")
    names = (place / "labels.txt").read_text(encoding="utf-8").splitlines()
    return Samples(loose.origin, "image", len(loose), loose.load, classes, tuple(map(classes.index, names)))
