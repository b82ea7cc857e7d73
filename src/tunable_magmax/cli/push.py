"""`tmx push`."""

from __future__ import annotations

import json
from pathlib import Path

from tunable_magmax.cli.merge_options import Json
from tunable_magmax.cli.terminal import show
from tunable_magmax.files import show_size
from tunable_magmax.showing import plural


def push(
    model: Path,
    repo: str,
    /,
    *,
    private: bool = False,
    revision: str = "main",
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Upload a model directory to the Hugging Face hub, in one commit.

    tmx push site-model/ org/name --private

    Log in once with `hf auth login`, or set HF_TOKEN; neither is stored or printed here.

    Parameters
    ----------
    model
        The directory of a model, as tmx merge, tailor or convert writes it.
    repo
        The name it gets on the hub, org/name; the repository is made if there is none.
    private
        Make the repository private, if it is a new one.
    revision
        Commit to this branch, which is made if there is none.
    dry_run
        Check the directory and list the files; send nothing.
    """
    from tunable_magmax.workflows.push import push_model

    pushed = push_model(model, repo, private=private, revision=revision, dry_run=dry_run)
    if as_json:
        show(json.dumps(pushed.to_dict(), indent=1) + "\n")
        return
    size = f"{plural(len(pushed.files), 'file')}, {show_size(sum(pushed.files.values()))}"
    if pushed.address is None:
        show("".join(f"{name}  {show_size(each)}\n" for name, each in pushed.files.items()))
        show(f"would go to {pushed.repo}, branch {pushed.revision}: {size}\n")
    else:
        show(f"{pushed.address}: {size}, commit {pushed.commit}\n")
