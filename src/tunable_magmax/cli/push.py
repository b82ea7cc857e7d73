"""`tmx push`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import show_result, table, working
from tunable_magmax.errors import plural
from tunable_magmax.files import show_size
from tunable_magmax.workflows.options import PushOptions


def push(model: Path, repo: str, /, *, options: PushOptions = parsed(PushOptions)) -> None:
    """Upload a model directory to the Hugging Face hub, in one commit.

    tmx push site-model/ org/name --private

    Log in once with `hf auth login`, or set HF_TOKEN; neither is stored or printed here.

    Parameters
    ----------
    model
        The directory of a model, as tmx merge, tailor or convert writes it.
    repo
        The name it gets on the hub, org/name; the repository is made if there is none.
    """
    from tunable_magmax.workflows.push import push_model

    with working():
        pushed = push_model(model, repo, options)
    size = f"{plural(len(pushed.files), 'file')}, {show_size(sum(pushed.files.values()))}"
    if pushed.address is None:
        files = table([[name, show_size(each)] for name, each in pushed.files.items()])
        lines = [*files, f"would go to {pushed.repo}: {size}"]
    else:
        lines = [f"{pushed.address}: {size}, commit {pushed.commit}"]
    show_result(asdict(pushed), lines)
