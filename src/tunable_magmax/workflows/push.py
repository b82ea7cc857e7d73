"""What `tmx push` does: uploads a model directory to the Hugging Face hub, in one commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.checkpoints.companions import CARD, CONFIG, REPORT, is_companion, is_module_folder
from tunable_magmax.checkpoints.hub import bars_on_terminals, hub_name, needed_files, refusal
from tunable_magmax.checkpoints.source import WEIGHT_SUFFIXES, open_checkpoint
from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.files import read_json
from tunable_magmax.version import __version__


@dataclass(frozen=True, slots=True)
class Pushed:
    """A model that was uploaded, or would be."""

    path: str
    repo: str
    revision: str
    address: str | None
    """Where the model is; None if nothing was sent."""
    commit: str | None
    files: dict[str, int]
    """The sizes of the files by name."""

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON data."""
        return asdict(self)


def push_model(
    path: str | Path, repo: str, *, private: bool = False, revision: str = "main", dry_run: bool = False
) -> Pushed:
    """Uploads a model directory to `repo`, `org/name` on the Hugging Face hub, which is made if there is none.

    All files go in one commit, to the branch `revision`. Unfinished outputs, links that lead out of the directory and
    files that are not part of a model are refused. With `dry_run` nothing is sent.
    """
    folder = Path(path)
    name = hub_name(f"hf://{repo.removeprefix('hf://')}")
    if name is None or "/" not in name.repo or "@" in repo:
        raise InputError(f"{repo!r} is no name of a model on the hub: give org/name; --revision names another branch")
    files = _files(folder)
    sizes = {file: (folder / file).stat().st_size for file in files}
    if dry_run:
        return Pushed(str(folder), name.repo, revision, None, None, sizes)
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
    except ImportError:
        raise InputError('the hub needs huggingface_hub: pip install "tunable-magmax[hub]"') from None
    api = HfApi(library_name="tunable-magmax", library_version=__version__)
    try:
        with bars_on_terminals():
            api.create_repo(name.repo, private=private or None, exist_ok=True)
            if private and not api.model_info(name.repo).private:
                raise InputError(
                    f"{name.repo} is there already and is public: choose another name, or leave out --private"
                )
            if revision != "main":
                api.create_branch(name.repo, branch=revision, exist_ok=True)
            made = api.create_commit(
                name.repo,
                [CommitOperationAdd(file, str(folder / file)) for file in files],
                commit_message=f"A model made with tunable-magmax {__version__}",
                revision=revision,
            )
    except InputError:
        raise
    # What a failed upload raises differs between versions: errors of requests, of httpx, of the hub itself.
    except Exception as error:
        raise StorageError(
            f"{folder} could not be uploaded to {name.repo} ({refusal(error)}); what was sent is no part of the model "
            "before the commit: put that right (`hf auth login` makes you known to the hub) and push again"
        ) from None
    address = f"{api.endpoint}/{name.repo}" + ("" if revision == "main" else f"/tree/{revision}")
    return Pushed(str(folder), name.repo, revision, address, made.oid, sizes)


def _files(folder: Path) -> list[str]:
    """Returns the names of a model's files; everything that prevents a push is one `InputError`."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no directory: give a model's, as tmx merge or tmx tailor writes it")
    if folder.name.endswith(".partial"):
        raise InputError(f"{folder} is unfinished: run the command that makes it again, and push its output")
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir())
    problems = [*_strange(folder, names), *_missing(folder)]
    if not problems:
        try:
            open_checkpoint(folder).close()
        except InputError as error:
            problems.append(str(error))
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise InputError(f"{folder} cannot be pushed:\n{lines}", problems=problems)
    return names


def _strange(folder: Path, names: list[str]) -> Iterator[str]:
    """Yields what is in a directory and does not belong to a model."""
    needed = set(needed_files(names))
    for name in names:
        file = folder / name
        weights = "/" not in name and file.suffix in WEIGHT_SUFFIXES
        own = name in needed or name in (CARD, CONFIG, REPORT, ".gitattributes") or weights
        module = "/" in name and is_module_folder(file.parent)
        if file.is_symlink() and not file.resolve().is_relative_to(folder.resolve()):
            yield f"{name} is a link that leads out of the directory: put the file itself there"
        elif not file.is_file():
            yield f"{name} is no file"
        elif not (own or module or is_companion(name)):
            yield f"{name} is no part of a model: move it elsewhere"


def _missing(folder: Path) -> Iterator[str]:
    """Yields the files that a merge's report lists and that are not there."""
    if (folder / REPORT).is_file():
        listed = read_json(folder / REPORT).get("files")
        for name in listed if isinstance(listed, dict) else ():
            if not (folder / name).is_file():
                yield f"{name} is missing, which {REPORT} lists"
