"""The documentation: no dead link, every command exists with its options."""

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
    assert sum(len(command_lines(page)) for page in PAGES) > 45


def test_the_page_on_the_architecture_names_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "src" / "tunable_magmax").glob("*/__init__.py")}
    assert packages == set(re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE))


def test_every_file_that_the_architecture_names_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", page)) - {"workflows/NAME.py", "cli/NAME.py", "tests/naive.py"}
    assert {name for name in named if not (ROOT / "src" / "tunable_magmax" / name).exists()} == set()


def test_the_documentation_stays_within_its_size() -> None:
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES)
    assert len([page for page in PAGES if page.parent == ROOT / "docs"]) <= 14
    assert words <= 20_000
