"""The page in one file: measured points of a sweep over the simplex, with script and style inside; no server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress, write_atomic
from tunable_magmax.studio.points import PointRequest, Preset, commands
from tunable_magmax.studio.server import STATIC
from tunable_magmax.studio.session import Studio
from tunable_magmax.studio.state import state_of

VERSION = 1
NEAREST, POWER = 8, 2
METHOD = f"inverse distance, power {POWER}, nearest {NEAREST}"
LINE_STEPS = (0.25, 0.5, 0.75)
CONCENTRATIONS = (1.0, 0.3)
"""Of the Dirichlet draws: some points in the middle of the simplex, some near its sides, where a site's mix is."""
_LINK = re.compile(r'<link rel="stylesheet" href="/static/([\w.-]+)">')
_SCRIPT = re.compile(r'<script src="/static/([\w.-]+)"(?: defer)?></script>')


def sweep_weights(presets: Mapping[str, Preset], tasks: int, count: int) -> list[tuple[float, ...]]:
    """Returns `count` different weights: presets, the lines between those that are no corners, then the simplex.

    The same presets give the same weights, and more of them begin with the fewer ones.
    """
    ends = [preset.preference.weights for name, preset in presets.items() if not name.startswith("only-")]
    corners = [tuple(float(k == t) for k in range(tasks)) for t in range(tasks)]
    known: dict[tuple[float, ...], None] = dict.fromkeys([*ends, *corners])
    lines = [*combinations(ends, 2), *((ends[0], corner) for corner in corners)]
    for step in LINE_STEPS[1:2] + LINE_STEPS[::2]:
        for one, other in lines:
            mixed = [(1 - step) * a + step * b for a, b in zip(one, other, strict=True)]
            known[tuple(round(weight, 6) for weight in mixed)] = None
    draws = np.random.default_rng(0)
    while len(known) < count:
        concentration = CONCENTRATIONS[len(known) % len(CONCENTRATIONS)]
        known[tuple(round(float(w), 4) for w in draws.dirichlet([concentration] * tasks))] = None
    return list(known)[:count]


def export_page(studio: Studio, file: Path, count: int, progress: Progress | None = None) -> dict[str, Any]:
    """Measures so many points, with and without the prior, and writes the page; returns what it holds.

    Points that were measured before, by the output folder's file, are not measured again.
    """
    if count < 1:
        raise InputError(f"--points is {count}, expected at least 1")
    if file.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{file}: a page's name must end in .html")
    studio.open_all()
    if not studio.data:
        raise InputError("there is nothing to measure on: give labelled samples with --data")
    state = _without_places(state_of(studio), studio)
    start, priors = state["start"], [True, False] if state["prior"]["possible"] else [False]
    weights, tasks = sweep_weights(studio.presets, len(studio.run.tasks), count), len(studio.run.tasks)
    points: list[dict[str, Any]] = []
    shown: dict[str, dict[str, str]] = {}
    for done, point in enumerate(weights, 1):
        for prior in priors:
            asked = PointRequest(point, start["scale"], prior, start["method"], None, start["data"], (1.0,) * tasks)
            found = studio.measure_now(asked)
            points.append({**found, "seconds": {}})
            setting, preset = studio.setting(asked)
            out = Path(f"{studio.out.name}/site-model")
            shown[found["id"]] = commands(setting, preset, Path(state["run"]["path"]), out, studio.options.seed)
        if progress is not None:
            progress("measuring", done, len(weights))
    error = cross_validated([point for point in points if point["prior"] == points[0]["prior"]])
    about = {"method": METHOD, "error": error, "points": len(weights)}
    data = {"version": VERSION, "state": state, "points": points, "interpolation": about, "commands": shown}
    write_atomic(file, one_file(data).encode())
    return data


def _without_places(state: dict[str, Any], studio: Studio) -> dict[str, Any]:
    """Returns the state without paths of this machine: the page goes to others."""
    places = [studio.run.path.resolve(), studio.run.path, studio.out, *filter(None, [studio.options.data])]
    text = json.loads(without_paths(json.dumps(state, ensure_ascii=False), places))
    run = {**text["run"], "path": studio.run.path.resolve().name}
    data = [{**part, "title": Path(part["title"]).name} for part in text["data"]]
    empty: dict[str, Any] = {"models": [], "samples": None, "writing": None}
    return {**text, "run": run, "out": studio.out.name, "data": data, **empty}


# -- interpolation ----------------------------------------------------------------------------------------------------


def interpolated(weights: Sequence[float], points: NDArray[np.float64], values: NDArray[np.float64]) -> Any:
    """Returns values [k] at some weights, from values [n, k] at points [n, T], as the page does it.

    >>> interpolated([0.5, 0.5], np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[0.2], [0.6]])).tolist()
    [0.4]
    """
    distances = np.abs(points - np.asarray(weights)).sum(axis=1) / 2
    nearest = np.argsort(distances, kind="stable")[:NEAREST]
    if distances[nearest[0]] == 0:
        return values[nearest[0]]
    shares = 1 / distances[nearest] ** POWER
    return shares @ values[nearest] / shares.sum()


def cross_validated(points: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the mean error of a task's accuracy when each point is left out and interpolated from the others."""
    rows = [point for point in points if point["tasks"] is not None]
    if len(rows) < 2:
        return None
    places = np.array([point["weights"] for point in rows])
    values = np.array([[task["accuracy"] for task in point["tasks"]] for point in rows], dtype=np.float64)
    values = values[:, ~np.isnan(values).any(axis=0)]  # tasks without samples
    others = [np.arange(len(rows)) != k for k in range(len(rows))]
    errors = [np.abs(interpolated(places[k], places[kept], values[kept]) - values[k]) for k, kept in enumerate(others)]
    return round(float(np.mean(errors)), 6)


# -- one file ---------------------------------------------------------------------------------------------------------


def one_file(data: Mapping[str, Any]) -> str:
    """Returns the page with its styles, scripts and data inside, and a policy that allows nothing else."""
    digests: dict[str, list[str]] = {"script": [], "style": []}

    def inside(tag: str, name: str) -> str:
        content = (STATIC / name).read_text(encoding="utf-8")
        if tag == "script":
            content = content.replace("</script", r"<\/script").replace("<!--", r"<\!--")
        elif "</style" in content:
            raise InputError(f"{name}: a style cannot hold </style")
        digests[tag].append(base64.b64encode(hashlib.sha256(content.encode()).digest()).decode())
        return f"<{tag}>{content}</{tag}>"

    page = (STATIC / "index.html").read_text(encoding="utf-8")
    page = _LINK.sub(lambda match: inside("style", match[1]), page)
    # In JSON, < is never needed outside of texts, and there it can be written otherwise.
    text = json.dumps(data, allow_nan=False).replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
    embedded = f'<script type="application/json" id="tmx-data">{text}</script>\n'
    first = _SCRIPT.search(page)
    place = page.rindex("</body>") if first is None else first.start()
    head, rest = page[:place], _SCRIPT.sub(lambda match: inside("script", match[1]), page[place:])
    sources = {tag: " ".join(f"'sha256-{digest}'" for digest in found) or "'none'" for tag, found in digests.items()}
    policy = f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; img-src data: blob:"
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return (head + embedded + rest).replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}', 1)


def without_paths(text: str, paths: Sequence[Path | None]) -> str:
    """Returns a text in which paths are only names, so that equal inputs elsewhere give equal bytes.

    >>> without_paths("/data/site/images: 1 of 3 samples", [Path("/data/site"), Path("/data/site/images")])
    'images: 1 of 3 samples'
    >>> without_paths("/data/site-2/a.png is no image", [Path("/data/site")])
    '/data/site-2/a.png is no image'
    """
    named = {str(path): path.name for path in paths if path is not None and path.name}
    if not named:
        return text
    longest_first = "|".join(map(re.escape, sorted(named, key=len, reverse=True)))
    # Whole paths only: neither the end of another one, nor the beginning of a longer name.
    whole = rf"(?<![\w./-])(?:{longest_first})(?![\w-]|\.\w)"
    return re.sub(whole, lambda match: named[match[0]], text)
