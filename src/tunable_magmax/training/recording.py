"""Records what a training loop makes into a run directory: the base, then for each task a checkpoint, a profile
and a few samples."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tunable_magmax.checkpoints.companions import ModelConfig, are_generic
from tunable_magmax.data.source import class_names_of, open_labelled
from tunable_magmax.errors import InputError, required
from tunable_magmax.files import locked, write_folder, write_json
from tunable_magmax.runs.kept import KEEP
from tunable_magmax.runs.run import BASE, Run, file_name, is_run

TASKS = "tasks"
RunPath = str | os.PathLike[str]


def recorded(run: RunPath) -> dict[str, Path]:
    """Returns the tasks that a run directory has, in training order, each with its checkpoint; none if it is new."""
    path = Path(run)
    return dict(Run.open(path, begun=True).checkpoints) if is_run(path) else {}


def record_base(run: RunPath, base: Any, processing_class: Any = None) -> Path:
    """Records the model that training begins with, before its first task; returns its checkpoint.

    `base` is a model, which is saved into the run directory with its tokenizer or image processor, or the path of a
    checkpoint, which stays where it is. A run that has tasks keeps its base; before that, the base is replaced.
    """
    with _locked(run) as path:
        if is_run(path) and Run.open(path, begun=True).tasks:
            raise InputError(f"{path} has tasks already, so its base stays; choose another directory for another base")
        if isinstance(base, str | os.PathLike):
            place = Path(base)
            if not place.exists():
                raise InputError(f"{place} does not exist: give the checkpoint that training began with")
        else:
            place = path / BASE
            write_folder(place, lambda folder: _save(base, folder, processing_class))
        begun = Run.begin(path, place)
        begun.save()
        return begun.base


def record_task(
    run: RunPath,
    task: str,
    model: Any,
    data: Any = None,
    *,
    eval_data: Any = None,
    processing_class: Any = None,
    replace: bool = False,
    keep: int = KEEP,
) -> Path:
    """Records a model that was just trained on a task, with a profile of the task's data; returns its checkpoint.

    `data`: a path, pairs of an input and its label, or a data set of texts or pictures. `eval_data`: the same, not
    trained on; `keep` samples of each class are kept of it, or else of `data`. Without both, there is no profile. The
    base must have been recorded before (`record_base`). A task that is recorded already is refused, or with `replace`
    replaced. All is complete or not there: a process that is killed can record the task again.

    >>> record_base("run", model)  # doctest: +SKIP
    >>> record_task("run", "travel", model, "travel.csv")  # doctest: +SKIP
    """
    with _locked(run) as path:
        _refuse_recorded(path, task, replace)
        if not is_run(path):
            raise InputError(
                f"{path} has no base yet: call record_base({os.fspath(run)!r}, BASE) with the model, or the path of "
                "the checkpoint, that the first task's training began with"
            )
        opened = Run.open(path, begun=True)
        old = recorded(run).get(task)
        checkpoint = _free_folder(opened, task)
        write_folder(checkpoint, lambda folder: _save(model, folder, processing_class, opened.base))
        names, facts = _class_names(task, model, data), dict[str, Any]()
        try:
            if data is not None or eval_data is not None:
                names, facts = _record_data(opened, task, checkpoint, names, data, eval_data, keep)
        except InputError as error:  # a training must not be lost because its data or model does not allow a profile
            warnings.warn(
                f"{task} is recorded without a profile or samples ({error}); "
                f"{opened.how_to_add('--data', f'{task}=DATA')} adds them",
                stacklevel=2,
            )
        _name_rows(checkpoint, names)
        opened.enter(task, checkpoint, **facts)
        opened.save()
        if old is not None and old != checkpoint and old.is_relative_to(path / TASKS):
            shutil.rmtree(old, ignore_errors=True)
        return checkpoint


def callback(
    run: RunPath,
    task: str,
    data: Any = None,
    *,
    eval_data: Any = None,
    replace: bool = False,
    keep: int = KEEP,
) -> Any:
    """Returns a `transformers.TrainerCallback` that records the task when its training ends, and before it the base.

    `data` and `eval_data`: as of `record_task`; by default what the Trainer trains on and evaluates on. A training that
    is interrupted records nothing, and can be done again. A task that is recorded already is refused at once, so that
    it is not trained in vain; `recorded(run)` says which are, and where their checkpoints are.

    >>> Trainer(model, args, train_dataset=data, callbacks=[callback("run/", task="travel")])  # doctest: +SKIP
    """
    trainer_callback: Any = required("transformers").TrainerCallback
    path = Path(run)
    _refuse_recorded(path, task, replace)
    for place in (data, eval_data):
        if isinstance(place, str | os.PathLike) and not Path(place).exists():
            raise InputError(f"{os.fspath(place)} does not exist: give the data of {task}")

    class RecordTask(trainer_callback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            if not state.is_world_process_zero:
                return
            known = Run.open(path, begun=True) if is_run(path) else None
            stays = known is not None and (bool(known.tasks) or known.base != path / BASE)
            if not stays and state.global_step == 0:
                record_base(path, parts["model"], _processor(parts))
            elif known is None:
                raise InputError(
                    f"training goes on from step {state.global_step}, and {path} does not know where it began: call "
                    f"record_base({str(path)!r}, BASE) with the path of the pre-trained checkpoint"
                )

        def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            if state.is_world_process_zero:
                trained = getattr(parts.get("train_dataloader"), "dataset", None) if data is None else data
                held = getattr(parts.get("eval_dataloader"), "dataset", None) if eval_data is None else eval_data
                options = {"processing_class": _processor(parts), "replace": replace, "keep": keep}
                record_task(path, task, parts["model"], trained, eval_data=held, **options)

    return RecordTask()


def _processor(parts: Any) -> Any:
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


def _save(model: Any, folder: Path, processing_class: Any, home: Path | None = None) -> None:
    """Saves a model as transformers does, with what prepares its inputs, or the tensors of any other module.

    `home`: the checkpoint whose tokenizer or image processor is the model's if none is given.
    """
    if hasattr(model, "peft_config"):
        raise InputError(
            "the model is a LoRA adapter on a base: save it with save_pretrained, and make the run by "
            "`tmx init run/ --base BASE --task NAME=ADAPTER`"
        )
    if not hasattr(model, "state_dict"):
        raise InputError(
            f"the model is a {type(model).__name__}, expected the model itself; of checkpoints on disk `tmx init run/ "
            "--base BASE --task NAME=DIR` makes the run"
        )
    if not hasattr(model, "save_pretrained"):
        from safetensors.torch import save_model

        save_model(model, str(folder / "model.safetensors"))
        return
    from tunable_magmax.models.pretrained import put_companions, quiet

    with quiet():
        model.save_pretrained(folder)
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(folder)
            return
    put_companions([] if home is None else [home], folder)


def _free_folder(run: Run, task: str) -> Path:
    """Returns the place of a task's checkpoint, which the run names not yet."""
    stem, used = file_name(task), {path.absolute() for path in run.tasks}
    places = (run.path / TASKS / (stem if k == 1 else f"{stem}-{k}") for k in count(1))
    return next(place for place in places if place.absolute() not in used)


# -- what a task's data tells -----------------------------------------------------------------------------------------


def _class_names(task: str, model: Any, data: Any) -> dict[int, str]:
    """Returns the classes that numbers stand for: by the model's configuration, by the data, or TASK/LABEL_0 and so on.

    So that classes without names of two tasks are not taken for the same.
    """
    known = getattr(getattr(model, "config", None), "id2label", None) or {}
    configured = {int(key): str(known[key]) for key in sorted(known, key=int)}
    of_data = dict(enumerate(class_names_of(data)))
    if not configured or not are_generic([*configured.values()]):
        return configured or of_data
    return {k: of_data.get(k, f"{task}/{name}") for k, name in configured.items()}


def _record_data(
    run: Run, task: str, checkpoint: Path, names: dict[int, str], data: Any, eval_data: Any, keep: int
) -> tuple[dict[int, str], dict[str, Any]]:
    """Writes the profile and the kept samples of a task; returns the classes by row, and what to enter into the run."""
    from tunable_magmax.models.builtin import load_builtin, rows_by_answers
    from tunable_magmax.models.encoder import load_encoder
    from tunable_magmax.models.prepared import profile_task

    encoder, base = load_encoder(checkpoint, assets=run.base), load_encoder(run.base, assets=checkpoint)
    processor = encoder.image_processor or encoder.tokenizer
    held = None if eval_data is None else open_labelled(eval_data, names, processor)
    samples = held if data is None else open_labelled(data, names, processor)
    assert samples is not None
    if names == {k: f"{task}/LABEL_{k}" for k in names} and not set(samples.classes) <= set(names.values()):
        rows = rows_by_answers(load_builtin(checkpoint, assets=run.base), samples)
        names = {**names, **{row: name for name, row in rows.items()}}
    facts = profile_task(run, task, encoder, base, samples, held, keep=keep)
    return names, {**facts, "classes": tuple(samples.present_classes())}


def _name_rows(checkpoint: Path, names: dict[int, str]) -> None:
    """Writes the names of a classifier's rows into its config.json, where it has none but LABEL_0, LABEL_1, ..."""
    config = ModelConfig.of(checkpoint)
    if config is None or config.labels is None or not are_generic(config.labels) or len(config.labels) != len(names):
        return
    rows = {"id2label": {str(k): name for k, name in names.items()}, "label2id": {name: k for k, name in names.items()}}
    write_json(config.path, {**config.content, **rows})
