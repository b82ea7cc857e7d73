"""Records what anybody's training loop makes into a run directory: the base, then a checkpoint and a profile a task."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError
from tunable_magmax.files import locked, write_folder
from tunable_magmax.runs.profile import ROWS
from tunable_magmax.runs.run import BASE, Run, is_run
from tunable_magmax.training.task_data import task_samples

TASKS = "tasks"
RunPath = str | os.PathLike[str]


def recorded(run: RunPath) -> dict[str, Path]:
    """Returns the tasks that a run directory has, in training order, each with its checkpoint; none if it is new."""
    path = Path(run)
    return dict(Run.open(path, begun=True).checkpoints) if is_run(path) else {}


def record_base(run: RunPath, base: Any, tokenizer: Any = None) -> Path:
    """Records the model that training begins with, before its first task; returns its checkpoint.

    `base` is a model, which is saved into the run directory with the tokenizer (or image processor), or the path of a
    checkpoint, which stays where it is. A run that has tasks keeps its base; before that, the base is replaced.
    """
    with _locked(run) as path:
        if is_run(path) and Run.open(path, begun=True).tasks:
            raise InputError(f"{path} has tasks already, so its base stays; choose another directory for another base")
        return _record_base(path, base, tokenizer).base


def record_task(
    run: RunPath,
    task: str,
    model: Any,
    data: Any = None,
    *,
    base: Any = None,
    tokenizer: Any = None,
    replace: bool = False,
    rows: int = ROWS,
    seed: int = 0,
) -> Path:
    """Records a model that was just trained on a task, with a profile of the task's data; returns its checkpoint.

    `data`: a path, pairs of a text and its label, or a data set of dicts; without, there is no profile. The base must
    have been recorded before (`record_base`), or is `base`, a path. A task that is recorded already is refused, or
    with `replace` replaced. All is complete or not there: a process that is killed can record the task again.

    >>> record_base("run", model)  # doctest: +SKIP
    >>> record_task("run", "travel", model, "travel.csv")  # doctest: +SKIP
    """
    with _locked(run) as path:
        _refuse_recorded(path, task, replace)
        opened = Run.open(path, begun=True) if is_run(path) else None
        if opened is None and base is None:
            raise InputError(
                f"{path} has no base yet: call record_base({os.fspath(run)!r}, model) before the first task is "
                "trained, or give base=, the path of the checkpoint that training began with"
            )
        opened = opened or _record_base(path, base, tokenizer)
        old = recorded(run).get(task)
        checkpoint = _free_folder(opened, task)
        write_folder(checkpoint, lambda folder: _save(model, folder))
        samples = None if data is None else _samples(data, model, tokenizer, task, path)
        profiled = samples is not None and _write_profile(opened, task, checkpoint, samples, rows, seed)
        classes = None
        if samples is not None and samples.labels is not None:
            used = set(samples.labels)
            classes = [name for k, name in enumerate(samples.classes) if k in used]
        opened.enter(task, checkpoint, classes, profiled)
        opened.save()
        if old is not None and old != checkpoint and old.is_relative_to(path / TASKS):
            shutil.rmtree(old, ignore_errors=True)
        return checkpoint


def callback(
    run: RunPath, task: str, data: Any = None, *, replace: bool = False, rows: int = ROWS, seed: int = 0
) -> Any:
    """Returns a `transformers.TrainerCallback` that records the task when its training ends, and before it the base.

    `data`, for the profile: as of `record_task`; by default what the Trainer trains on. A training that is interrupted
    records nothing, and can be done again. A task that is recorded already is refused at once, so that it is not
    trained in vain; `recorded(run)` says which are, and where their checkpoints are.

    >>> Trainer(model, args, train_dataset=data, callbacks=[callback("run/", task="travel")])  # doctest: +SKIP
    """
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise InputError('a callback needs transformers: pip install "tunable-magmax[train]"') from None
    _refuse_recorded(Path(run), task, replace)
    if isinstance(data, str | os.PathLike) and not Path(data).exists():
        raise InputError(f"{os.fspath(data)} does not exist: give the data of {task}")
    options: dict[str, Any] = {"replace": replace, "rows": rows, "seed": seed}

    class RecordTask(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            known = Run.open(Path(run), begun=True) if is_run(Path(run)) else None
            given = known is not None and (bool(known.tasks) or known.base != Path(run) / BASE)
            if given or not state.is_world_process_zero:
                return
            if state.global_step == 0:
                record_base(run, parts["model"], _tokenizer(parts))
            elif known is None:
                raise InputError(
                    f"training goes on from step {state.global_step}, and {os.fspath(run)} does not know where it "
                    f"began: call record_base({os.fspath(run)!r}, BASE) with the path of the pre-trained checkpoint"
                )

        def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            if state.is_world_process_zero:
                used = parts["train_dataloader"].dataset if data is None else data
                record_task(run, task, parts["model"], used, tokenizer=_tokenizer(parts), **options)

    return RecordTask()


def _tokenizer(parts: Any) -> Any:
    """Returns what prepares the Trainer's inputs, which older versions of transformers call tokenizer."""
    return parts.get("processing_class") or parts.get("tokenizer")


@contextmanager
def _locked(run: RunPath) -> Iterator[Path]:
    path = Path(run)
    path.mkdir(parents=True, exist_ok=True)
    with locked(path / "recording.lock", f"another process records into {path}: wait until it is done"):
        yield path


def _refuse_recorded(path: Path, task: str, replace: bool) -> None:
    if not isinstance(task, str) or not task.strip():
        raise InputError(f"a task's name must be a text, not {task!r}")
    known = recorded(path)
    if task in known and not replace:
        raise InputError(
            f"{path} has the task {task!r} already, as {known[task]}: leave its training out where "
            f"tmx.training.recorded({str(path)!r}) has it, or pass replace=True"
        )
    if task in known and task != list(known)[-1]:
        warnings.warn(f"{task!r} is replaced, and later tasks were trained on from what it was", stacklevel=3)


def _record_base(path: Path, base: Any, tokenizer: Any) -> Run:
    if isinstance(base, str | os.PathLike):
        place = Path(base)
        if not place.exists():
            raise InputError(f"{place} does not exist: give the checkpoint that training began with")
    else:
        place = path / BASE
        shutil.rmtree(place, ignore_errors=True)
        write_folder(place, lambda folder: _save(base, folder, tokenizer))
    run = Run.begin(path, place)
    run.save()
    return run


def _save(model: Any, folder: Path, tokenizer: Any = None) -> None:
    """Saves a model as transformers does, or the tensors of any other module."""
    if hasattr(model, "peft_config"):
        raise InputError(
            "the model is a LoRA adapter on a base: save it with save_pretrained, and make the run by "
            "`tmx init run/ --base BASE --task NAME=ADAPTER`"
        )
    if hasattr(model, "save_pretrained"):
        from tunable_magmax.models.pretrained import quiet

        with quiet():
            model.save_pretrained(folder)
            if hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(folder)
        return
    from safetensors.torch import save_model

    save_model(model, str(folder / "model.safetensors"))


def _free_folder(run: Run, task: str) -> Path:
    """Returns the place of a task's checkpoint, which the run names not yet; what a killed process left is removed."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", task)
    used = {path.absolute() for path in run.tasks}
    place = stem
    number = 2
    while (run.path / TASKS / place).absolute() in used:
        place, number = f"{stem}-{number}", number + 1
    return run.empty_folder(f"{TASKS}/{place}")


def _samples(data: Any, model: Any, tokenizer: Any, task: str, run: Path) -> Samples | None:
    try:
        return task_samples(data, model, tokenizer)
    except InputError as error:
        _warn_unprofiled(task, run, error)
        return None


def _write_profile(run: Run, task: str, checkpoint: Path, samples: Samples, rows: int, seed: int) -> bool:
    """Writes the profile; a training must not be lost because its data or model does not allow one."""
    from tunable_magmax.models.encoder import load_encoder
    from tunable_magmax.models.profiling import make_profile

    try:
        encoder, base = load_encoder(checkpoint, assets=run.base), load_encoder(run.base)
        profile = make_profile(task, samples, encoder, base=base, rows=rows, seed=seed)
    except InputError as error:
        _warn_unprofiled(task, run.path, error)
        return False
    profile.save(run.profile_path(task))
    return True


def _warn_unprofiled(task: str, run: Path, error: InputError) -> None:
    warnings.warn(
        f"{task} is recorded without a profile ({error}); make it by `tmx init {run} --data {task}=DATA`",
        stacklevel=4,
    )
