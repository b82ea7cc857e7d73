"""`tmx verify`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tunable_magmax.cli.terminal import progress_bars, show, tell
from tunable_magmax.showing import plural

if TYPE_CHECKING:
    from tunable_magmax.runs.recipe import Recipe
    from tunable_magmax.workflows.verify import Verification


def verify(
    path: Path,
    /,
    *,
    base: Path | None = None,
    task: list[str] | None = None,
    memory: str = "1GiB",
    threads: int | None = None,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Check that a merged checkpoint is what its report says.

    Digests, files, tensors and counts are checked. With --base and --task the merge is done again as the report says,
    and every byte is compared (values merged by tsv: within a tolerance, docs/method.md). Exit code 0: all is well; 1:
    it is not what its report says; 2: it cannot be checked.

    Parameters
    ----------
    path
        A merged checkpoint: a directory, or a .safetensors file with its .report.json beside it.
    base
        The base of the merge, to merge again.
    task
        A task checkpoint of the merge, as PATH or NAME=PATH; give one --task for each, in training order or by name.
    memory
        Use at most this much working memory while merging again.
    threads
        Use this many threads. Default: all cores.
    quiet
        Print failed checks only.
    as_json
        Print all checks as JSON on stdout.
    """
    from tunable_magmax.runs.recipe import read_tasks
    from tunable_magmax.workflows.merge import logged_inputs
    from tunable_magmax.workflows.verify import verify_checkpoint

    paths, names = read_tasks(task or ())
    tasks = paths if names is None else dict(zip(names, paths, strict=True))
    with progress_bars(quiet or as_json) as progress:
        verification = verify_checkpoint(path, base, tasks or None, memory=memory, threads=threads, progress=progress)
    if as_json:
        show(json.dumps(verification.to_dict(), indent=1) + "\n")
        return 0 if verification.ok else 1
    failed = [check for check in verification.checks if not check.ok]
    if not quiet:
        show(_checks(verification))
        if not failed and not verification.rederived and (known := logged_inputs(path)) is not None:
            show(_again(path, known))
    if failed:
        inputs = ", or these are not its inputs in training order" if verification.rederived else ""
        details = f": {'; '.join(f'{check.what}: {check.detail}' for check in failed)}" if quiet else ""
        count = f"{len(failed)} of {plural(len(verification.checks), 'check')} failed"
        tell(f"error: {path} is not what its report says{inputs}: {count}{details}\n")
    return 1 if failed else 0


def _checks(verification: Verification) -> str:
    width = max(len(check.what) for check in verification.checks)
    lines = [
        f"  {'ok    ' if check.ok else 'FAILED'}  {check.what:<{width}}  {check.detail}"
        for check in verification.checks
    ]
    if verification.ok:
        lines.append(f"{verification.path} is what its report says")
    return "".join(f"{line}\n" for line in lines)


def _again(path: Path, known: Recipe) -> str:
    parts = ["tmx", "verify", str(path), "--base", str(known.base)]
    names = [f"{name}=" for name in known.names or ()] or [""] * len(known.tasks)
    parts += [part for name, place in zip(names, known.tasks, strict=True) for part in ("--task", f"{name}{place}")]
    return f"Its inputs are known; to merge them again and compare every byte:\n{shlex.join(parts)}\n"
