"""How long the studio's page works on a frame while a slider is dragged, as a share of the 16 ms that a frame has.

PYTHONPATH=src python benchmarks/studio_page.py

Needs Playwright and a Chromium. The points are made up; the page is the exported one, without a server.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tunable_magmax.studio.export import one_file

FRAME = 16.0
SIZES = ((8, 60), (50, 60), (50, 500))
DRAG = """async () => {
  const slider = document.getElementById("weight-1"), times = [];
  for (let k = 0; k < 120; k += 1) {
    slider.value = 20 + 6 * k;
    slider.dispatchEvent(new Event("input"));
    await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)));
    times.push(studio.frame);
  }
  return times.slice(20);
}"""


def made_up(tasks: int, points: int) -> dict:
    """Returns the data of a page: random accuracies at random weights."""
    draws, equal = random.Random(0), [1 / tasks] * tasks

    def share(accuracy: float) -> dict:
        return {"right": round(50 * accuracy), "samples": 50, "accuracy": accuracy, "interval": [0.1, 0.9]}

    def line(name: str) -> dict:
        mix = {"accuracy": 0.5, "interval": [0.4, 0.6]}
        return {"name": name, "title": name, "tasks": [draws.random() for _ in equal], "mix": mix}

    def point(number: int) -> dict:
        parts = [draws.random() ** 4 for _ in equal]
        setting = {
            "scale": 1.0,
            "scale_used": 1.0,
            "prior": True,
            "method": "tunable_magmax",
            "head": "fitted",
            "preset": None,
        }
        return {
            **setting,
            "id": str(number),
            "data": "heldout",
            "weights": [part / sum(parts) for part in parts],
            "tasks": [share(draws.random()) for _ in equal],
            "overall": share(0.5),
            "mix": {"weights": equal, "accuracy": 0.5, "interval": [0.4, 0.6]},
            "lines": [line(name) for name in ("base", "last", "best", "magmax")],
            "sentence": None,
        }

    facts = {"intervals": None, "expected_error": None, "samples": None, "method": "equal", "scale": None}
    state = {
        "run": {
            "name": "run",
            "path": "run",
            "tasks": [f"task {t}" for t in range(tasks)],
            "classes": None,
            "elements": 1,
        },
        "out": "out",
        "methods": [{"name": "tunable_magmax", "weights": "shares", "default_scale": 1.0, "why_not": None}],
        "prior": {"possible": True, "why_not": None},
        "scale": {"matched": 1.5, "default": 1.0, "default_without_prior": "matched", "most": 100},
        "data": [{"id": "heldout", "title": "made up", "samples": 50 * tasks, "of": 50 * tasks, "mixed": False}],
        "presets": [{"id": "equal", "title": "equal", "weights": equal, **facts}],
        "start": {"weights": equal, "scale": 1.0, "prior": True, "method": "tunable_magmax", "preset": "equal"},
        "lines": {"ready": True, "done": 0, "total": 0},
        "models": [],
        "samples": None,
        "writing": None,
        "warnings": [],
    }
    state["start"]["data"] = "heldout"
    measured = [point(number) for number in range(points)]
    return {"state": state, "points": measured, "interpolation": {"error": 0.02}, "commands": {}}


def main() -> None:
    """Prints the median and the slowest tenth for each size."""
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for tasks, points in SIZES:
            file = Path(folder) / "page.html"
            file.write_text(one_file(made_up(tasks, points)), encoding="utf-8")
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(file.as_uri())
            page.wait_for_selector("#tasks li")
            times = page.evaluate(DRAG)
            median, slow = statistics.median(times), statistics.quantiles(times, n=10)[-1]
            print(
                f"{tasks:3} tasks, {points:3} points: {median:5.1f} ms a frame, {median / FRAME:4.0%} of it; "
                f"one in ten takes more than {slow:5.1f} ms"
            )
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
