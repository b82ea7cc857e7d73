"""The documentation: no dead link, every command exists with its options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tunable_magmax.cli.app import app

ROOT = Path(__file__).parents[1]
GENERATED = {"commands.md"}  # made by `make docs`
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / name for name in GENERATED})
REPOSITORY = "https://github.com/tunable-magmax/tunable-magmax/blob/main/"


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title).lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_link_is_dead(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        target = link.removeprefix(REPOSITORY) if link.startswith(REPOSITORY) else link
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        place = (ROOT if link.startswith(REPOSITORY) else page.parent) / file if file else page
        assert place.name in GENERATED or place.exists(), f"{page.name}: {link}"
        if anchor and place.suffix == ".md" and place.name not in GENERATED:
            assert anchor in anchors(place), f"{page.name}: {link}"


def command_lines(page: Path) -> list[str]:
    """The lines of code that call tmx, without comments; those with gaps for the reader to fill are left out."""
    text = re.sub(r" \\\n\s*", " ", page.read_text(encoding="utf-8"))
    lines = [line.strip().removeprefix("$ ").removeprefix(".venv/bin/") for line in text.splitlines()]
    calls = [re.sub(r"\s+#.*", "", line) for line in lines if line.startswith("tmx ")]
    return [
        call for call in calls if not re.search(r"\.\.\.|[\[\]<>|]", call) and not re.match(r"tmx \w+( \w+)*$", call)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists_with_its_options(page: Path) -> None:
    for line in command_lines(page):
        tokens = shlex.split(line)[1:]
        if "--help" in tokens or "--version" in tokens or tokens[0].startswith("-"):
            continue
        app.parse_args([token for token in tokens if token != "--debug"], exit_on_error=False, print_error=False)


def test_the_commands_of_the_site_are_found() -> None:
    assert sum(len(command_lines(page)) for page in PAGES) > 60


def test_the_house_names_every_workflow() -> None:
    table = (ROOT / "docs" / "house.md").read_text().partition("| command |")[2].partition("## ")[0]
    modules = {path.stem for path in (ROOT / "src" / "tunable_magmax" / "workflows").glob("*.py")} - {"__init__"}
    assert modules <= set(re.findall(r"`(\w+)`", table))
