"""What `tmx push` does: uploads a model directory to the Hugging Face hub, in one commit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tunable_magmax.checkpoints.adapter import open_stored
from tunable_magmax.checkpoints.companions import CONFIG, REPORT, is_module_folder, is_usual
from tunable_magmax.checkpoints.hub import hide_bars_unseen, hub_name, refusal
from tunable_magmax.checkpoints.safetensors_file import INDEX
from tunable_magmax.checkpoints.source import ADAPTER_CONFIG, holds_adapter, open_checkpoint
from tunable_magmax.engines.outputs import read_report
from tunable_magmax.errors import InputError, StorageError, required, some_of
from tunable_magmax.files import is_plain_name, read_json
from tunable_magmax.runs.run import is_run
from tunable_magmax.version import __version__
from tunable_magmax.workflows.evaluate import HEAD_FILES
from tunable_magmax.workflows.options import PushOptions
from tunable_magmax.workflows.tailored import PREFERENCE, RECORD

PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz"})
MOST_LISTED = 20


@dataclass(frozen=True, slots=True)
class Pushed:
    """A model that was uploaded, or would be: `address` and `commit` are None if nothing was sent."""

    path: str
    repo: str
    address: str | None
    commit: str | None
    files: dict[str, int]
    """The sizes of the files by name."""


def push_model(path: Path, repo: str, options: PushOptions) -> Pushed:
    """Uploads a model directory to `repo`, `org/name` on the Hugging Face hub, which is made if there is none.

    All files go in one commit: the weights of a model or of a LoRA adapter, what the report of a merge lists, and files
    with the names of a model's configuration and tokenizer. Everything else in the directory is refused, so that
    nothing private is published by accident; so are pickles, which run code where they are loaded, links that lead out
    of the directory, and unfinished outputs.
    """
    name = hub_name(f"hf://{repo.removeprefix('hf://')}")
    if name is None or "/" not in name.repo or "@" in repo:
        raise InputError(f"{repo!r} is no name for a model on the hub: give org/name")
    sizes = {file: (path / file).stat().st_size for file in _files(path)}
    if options.dry_run:
        return Pushed(str(path), name.repo, None, None, sizes)
    hub = required("huggingface_hub")
    api = hub.HfApi(library_name="tunable-magmax", library_version=__version__)
    added = [hub.CommitOperationAdd(file, str(path / file)) for file in sizes]
    try:
        hide_bars_unseen()
        api.create_repo(name.repo, private=options.private or None, exist_ok=True)
        if options.private and not api.model_info(name.repo).private:
            raise InputError(f"{name.repo} is there already and is public: choose another name, or leave out --private")
        message = f"A model made with tunable-magmax {__version__}"
        made = api.create_commit(name.repo, added, commit_message=message)
    except InputError:
        raise
    # What a failed upload raises differs between versions: errors of requests, of httpx, of the hub itself.
    except Exception as error:
        raise StorageError(
            f"{path} could not be uploaded to {name.repo} ({refusal(error)}); what was sent is no part of the model "
            "before the commit: put that right (`hf auth login` makes you known to the hub) and push again"
        ) from None
    return Pushed(str(path), name.repo, f"{api.endpoint}/{name.repo}", made.oid, sizes)


def _files(folder: Path) -> list[str]:
    """Returns the names of a model's files; everything that prevents a push is one `InputError`."""
    if not folder.is_dir() or is_run(folder) or folder.name.endswith(".partial"):
        raise InputError(f"{folder} is no finished model: give the directory that tmx merge or tmx tailor wrote")
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir())
    # What commands of this package write beside weights, also a head that came later than the report.
    own = {INDEX, REPORT, CONFIG, RECORD, PREFERENCE, ADAPTER_CONFIG, *HEAD_FILES}
    problems: list[str] = []
    if REPORT in names:
        listed = read_report(folder).files
        own.update(name for name in listed if is_plain_name(name, depth=2))
        problems += [f"{name} is missing, which {REPORT} lists" for name in listed if name not in names]
    is_adapter = holds_adapter(folder)
    try:
        with open_stored(folder) if is_adapter else open_checkpoint(folder) as checkpoint:
            own.update(file.name for file in checkpoint.files)
    except InputError as error:
        problems.append(str(error))
    if is_adapter:
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        if not isinstance(base, str) or hub_name(f"hf://{base}") is None:
            problems.append(f"base_model_name_or_path is {base!r}, which others lack: write its name on the hub")
    problems = [*filter(None, (_why_not(folder, name, own) for name in names)), *problems]
    if problems:
        shown = some_of(problems, limit=MOST_LISTED, joint="\n  - ")
        raise InputError(f"{folder} cannot be pushed:\n  - {shown}", problems=problems)
    return names


def _why_not(folder: Path, name: str, own: Collection[str]) -> str | None:
    """Returns why a file must not be published: it is no part of the model, a link that leads out, or a pickle."""
    file = folder / name
    if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file():
        return f"{name} is a link that leads out of the directory, or no file: put the file itself there"
    if not (name in own or is_usual(name) or ("/" in name and is_module_folder(file.parent))):
        return f"{name} is no part of this model: move it elsewhere"
    with file.open("rb") as opened:
        head = opened.read(4)
    # A zip archive is what torch.save writes; a bare pickle starts with its protocol.
    pickled = head == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5")
    if pickled or file.suffix.lower() in PICKLES:
        return f"{name} is a pickle, which runs code where it is loaded: make safetensors of it with tmx convert"
    return None
