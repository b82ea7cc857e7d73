"""What an installed package holds: built here without the network by the declared backend."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tunable_magmax.errors import EXTRAS, InputError, required
from tunable_magmax.version import __version__

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(out)], cwd=ROOT, check=True)
    return out


def test_the_wheel_holds_configs_page_templates_and_kernels(built: Path) -> None:
    names = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    for folder in ("glyphs", "mini-clip", "minilm", "paper"):
        for config in (ROOT / "configs" / folder).glob("*.yaml"):
            assert f"tunable_magmax/configs/{folder}/{config.name}" in names
    for file in (ROOT / "src").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts and ".egg-info" not in str(file):
            assert file.relative_to(ROOT / "src").as_posix() in names
    assert {name.split("/")[0] for name in names} == {"tunable_magmax", f"tunable_magmax-{__version__}.dist-info"}


def test_the_source_distribution_holds_tests_docs_and_changelog(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    here = Path(__file__).relative_to(ROOT).as_posix()
    wanted = {here, "CHANGELOG.md", "docs/method.md", "configs/glyphs/characters-5.yaml", "Makefile", "constraints.txt"}
    assert wanted <= names


def test_on_an_index_every_link_and_picture_of_readme_is_a_whole_address(built: Path) -> None:
    wheel = zipfile.ZipFile(next(built.glob("*.whl")))
    text = wheel.read(f"tunable_magmax-{__version__}.dist-info/METADATA").decode()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


@pytest.mark.parametrize("package", EXTRAS)
def test_what_a_core_installation_lacks_is_told_with_the_extra_that_brings_it(monkeypatch, package: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    listed = " ".join(extras[EXTRAS[package]])
    assert {"PIL": "pillow"}.get(package, package) in listed
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf'{package}.* pip install "tunable-magmax\[{EXTRAS[package]}\]"'):
        required(package)


def test_the_version_stands_in_one_place_and_its_papers_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == __version__
    latest = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert latest
    assert latest[1] in ("Unreleased", __version__)


def test_workflows_do_what_ci_does_and_nothing_of_their_own() -> None:
    workflows = ROOT / ".github" / "workflows"
    if not workflows.is_dir():
        pytest.skip("a source distribution has no workflows")
    jobs = yaml.safe_load((workflows / "test.yml").read_text(encoding="utf-8"))["jobs"]
    assert [step["run"] for step in jobs["test"]["steps"] if "run" in step] == [".ci/run"]
    release = yaml.safe_load((workflows / "release.yml").read_text(encoding="utf-8"))["jobs"]["build"]["steps"]
    assert ".ci/run" in [step.get("run") for step in release]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for file in workflows.glob("*.yml"):
        assert set(re.findall(r"\bmake ([a-z]+)", file.read_text(encoding="utf-8"))) <= targets
