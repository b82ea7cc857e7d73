"""Base and tasks in memory, and merges of them, with the classifiers that they have."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.checkpoints.companions import ModelConfig
from tunable_magmax.checkpoints.source import as_checkpoint, holds_adapter, open_checkpoint
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import Progress, show_size
from tunable_magmax.merging.methods import method_class, read_options
from tunable_magmax.models.builtin import BuiltinEncoder, builtin_encoder, builtin_labels
from tunable_magmax.models.pretrained import read_tensors, tensors_digest, tensors_of

if TYPE_CHECKING:
    from torch import Tensor

    from tunable_magmax.checkpoints.heads import Heads
    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.merging.state_dicts import Merged, MergeSession
    from tunable_magmax.runs.run import Run

SMALL_MODEL = 1 << 20
"""Elements of a model that one thread merges faster than several, which would wait for each other."""
MODELS_BESIDE = 4
"""Models in memory beside base and tasks: the merged vector, that of tsv, the model made of it, and the encoder."""


@dataclass(frozen=True)
class MergeSpec:
    """One model of a run: a merge of its tasks by `method`, or a checkpoint as it is; 0 is the base, t the t-th task.

    `scale`: None is the method's default. A merge at scale 0 is the base.

    >>> names = ["travel", "bank"]
    >>> MergeSpec("tsv", 0.5, (1.0, 0.0)).title(names), MergeSpec("average", 0).title(names)
    ('tsv 0.5', 'base')
    >>> MergeSpec(checkpoint=1).title(names), MergeSpec(checkpoint=2).title(names)
    ('task travel', 'last')
    """

    method: str | None = None
    scale: float | str | None = None
    weights: tuple[float | Fraction, ...] | None = None
    checkpoint: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    """Further options of the merge, by name."""

    def __post_init__(self) -> None:
        if self.method is not None and self.scale == 0:
            object.__setattr__(self, "method", None)
            object.__setattr__(self, "checkpoint", 0)
        if self.checkpoint is not None or method_class(str(self.method)).weights == "refused":
            object.__setattr__(self, "weights", None)
        if self.checkpoint is not None:
            object.__setattr__(self, "scale", None)

    @property
    def is_base(self) -> bool:
        return self.checkpoint == 0

    def title(self, tasks: Sequence[str]) -> str:
        """Returns what tables call it: base, last, task NAME, or method and scale."""
        if self.checkpoint is not None:
            return ["base", *(f"task {name}" for name in tasks[:-1]), "last"][self.checkpoint]
        scale = "" if self.scale is None else self.scale if isinstance(self.scale, str) else f"{self.scale:g}"
        return f"{self.method} {scale}".rstrip()


BASE = MergeSpec(checkpoint=0)


class RunModels(AbstractContextManager["RunModels"]):
    """Base and tasks, and merges of them, as tensors by name. A context manager.

    Checkpoints are read once, when the first merge is made, and task vectors compared once; a model then costs a merge.
    """

    def __init__(
        self,
        base: Path,
        tasks: Sequence[Path],
        *,
        builtin: bool = True,
        seed: int = 0,
        device: str | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """The tasks' classifiers are left out unless `builtin`.

        `seed`: of the keys that settle which elements a task gives. `device`: where models are merged.
        """
        adapter = next(filter(holds_adapter, tasks), None)
        if builtin and adapter is not None:
            raise InputError(
                f"{adapter} is a LoRA adapter, of which models are scored only with a head file: make checkpoints of "
                f"the adapters and a run of these: {as_checkpoint(adapter)}"
            )
        self.paths, self.seed, self.progress = (base, *tasks), seed, progress
        self.reports: dict[MergeSpec, MergeReport] = {}
        """The report of the latest merge of each kind."""
        self._device, self._patterns, self._builtin = device, (include, exclude), builtin
        self.labels = merged_labels(base, tasks) if builtin else None
        """The labels of the classifier that the models have themselves; None: they have none, or it is left out."""

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the task vectors."""
        if "_session" in vars(self):
            self._session.close()

    @property
    def elements(self) -> int:
        """d, the number of merged elements."""
        return self._session.elements

    @cached_property
    def _read(self) -> tuple[list[dict[str, Tensor]], Heads | None, dict[str, Any]]:
        """The tensors of base and tasks, how their heads fit together, and the config.json of merges."""
        base, *tasks = self.paths
        refuse_too_large(base, tasks)
        states: list[dict[str, Tensor]] = []
        with _opened(base, tasks) as inputs:
            heads = inputs.heads
            made = () if heads is None or self._builtin else heads.made
            for opened in inputs.checkpoints:
                states.append(self._placed(tensors_of(opened, states[0] if states else {}, made)))
                if self.progress is not None:
                    self.progress("loading", len(states), len(self.paths))
            config = ModelConfig.of(base)
            content = {} if config is None else config.content
            if heads is not None and heads.config is not None:
                content = dict(heads.config)
        return states, heads if self._builtin else None, content

    @property
    def heads(self) -> Heads | None:
        """How the tasks' classifiers fit together; None if there are none, or they are left out."""
        return self._read[1]

    @cached_property
    def _session(self) -> MergeSession:
        from tunable_magmax.merging.state_dicts import MergeSession

        include, exclude = self._patterns
        copied = () if self.heads is None else tuple(map(escape, self.heads.copied))
        excluded = [*(exclude or ()), *copied] or None
        base, *tasks = self._read[0]
        threads = 1 if sum(tensor.numel() for tensor in base.values()) < SMALL_MODEL else None
        return MergeSession(base, tasks, include=include, exclude=excluded, threads=threads)

    def _placed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Moves tensors to the device; tied ones stay one tensor."""
        if self._device in (None, "cpu"):
            return dict(state)
        placed = {id(tensor): tensor.to(self._device) for tensor in state.values()}
        return {name: placed[id(tensor)] for name, tensor in state.items()}

    # -- models ------------------------------------------------------------------------------------------------------

    def merge(self, **options: Any) -> Merged:
        """Merges in memory, as `merge_checkpoints` does by files; include and exclude are fixed from the beginning."""
        merged = self._session.merge(**options)
        if self.heads is None:
            return merged
        tasks = len(self.paths) - 1
        state = {**merged.state_dict, **self._made(read_options(tasks, **options).head_weights(tasks))}
        return replace(merged, state_dict=state, report=replace(merged.report, heads=self.heads.describe()))

    def state(self, spec: MergeSpec) -> dict[str, Tensor]:
        """Returns the tensors of a model; of a merge, its report is put into `reports`."""
        if spec.checkpoint is not None:
            return self._checkpoint(spec.checkpoint)
        weights = {} if spec.weights is None else {"weights": list(spec.weights)}
        merged = self.merge(method=spec.method, scale=spec.scale, seed=self.seed, **dict(spec.options), **weights)
        self.reports[spec] = merged.report
        return merged.state_dict

    def _checkpoint(self, number: int) -> dict[str, Tensor]:
        """Returns a checkpoint as it is, with rows for all labels; a task's own head counts alone.

        The base has the last task's, as the merge of the last task at scale 0 has.
        """
        tasks = len(self.paths) - 1
        if not 0 <= number <= tasks:
            raise InputError(f"the run has no checkpoint {number}; it has {tasks} tasks")
        if self.labels is None and "_read" not in vars(self):
            return self._placed(read_tensors(self.paths[number], self.paths[0]))
        states, heads, _ = self._read
        if heads is None:
            return states[number]
        plain = {name: tensor for name, tensor in states[number].items() if name not in heads.made}
        return {**states[0], **plain, **self._made([float(t == (number or tasks)) for t in range(1, tasks + 1)])}

    def _made(self, weights: Sequence[float]) -> dict[str, Tensor]:
        """Returns the tensors of classifiers that are made of the tasks' own."""
        assert self.heads is not None
        return self._placed(self.heads.state(weights))

    def encoder(self, device: str | None = None) -> BuiltinEncoder:
        """Returns the base with the classifier over all labels; its weights are to be replaced."""
        # Copies, because the module's parameters may be the tensors that it is made of.
        state = {name: tensor.clone().cpu() for name, tensor in self._checkpoint(0).items()}
        return builtin_encoder(self._read[2], state, tensors_digest(state), self.paths[0], self.paths, device)


def merged_labels(base: Path, tasks: Sequence[Path]) -> tuple[str, ...] | None:
    """Returns the labels of the classifier that a merge of these would have, from headers; None if it has none."""
    if any(map(holds_adapter, tasks)) or all(builtin_labels(path) is None for path in (base, *tasks)):
        return None
    with _opened(base, tasks) as inputs:
        return builtin_labels(base) if inputs.heads is None else inputs.heads.labels


def task_labels(base: Path, tasks: Sequence[Path]) -> list[tuple[str, ...] | None]:
    """Returns what a merge calls the labels of each task's own classifier, from headers; None of tasks without one."""
    own = [builtin_labels(task) for task in tasks]
    if any(map(holds_adapter, tasks)) or all(labels is None for labels in own):
        return own
    with suppress(InputError), _opened(base, tasks) as inputs:  # what cannot be merged as it is may still be profiled
        return list(own if inputs.heads is None else inputs.heads.task_labels or own)
    return own


def warn_of_unseen_classes(run: Run, tasks: Iterable[str]) -> None:
    """Warns of tasks whose own classifier has classes that no sample of the run shows, kept or else of a profile.

    Classes that the checkpoint of a task without samples has, too, are left to that one.
    """
    labels = {} if run.head else dict(zip(run.names, task_labels(run.base, run.tasks), strict=True))
    shown = {run.names[t]: kept.classes if kept else run.own_classes(t) for t, kept in enumerate(run.kept)}
    seen = {name for names in shown.values() for name in names or ()}
    left = {name for task, names in labels.items() if not shown[task] for name in names or ()}
    for task in tasks:
        own = labels.get(task) or ()
        unseen = [name for name in own if name not in seen and not (shown[task] and name in left)]
        if seen and unseen:
            warnings.warn(
                f"{task}'s checkpoint has {len(own)} classes, the data show {len(own) - len(unseen)}; a fitted head "
                f"cannot learn classes without samples ({some_of(unseen, show=repr)}): give all data of {task}, "
                f"{run.how_to_add('--data', f'{task}=DATA')}",
                stacklevel=2,
            )


def _opened(base: Path, tasks: Sequence[Path]) -> Any:
    from tunable_magmax.engines.inputs import Inputs

    return Inputs(base, tasks, read_options(len(tasks)))


def refuse_too_large(base: Path, tasks: Sequence[Path]) -> None:
    """Refuses base and tasks that do not fit into memory together; reads headers only."""
    from tunable_magmax.merging.walker import available_memory

    sizes: list[int] = []
    for path in (base, *tasks):
        if holds_adapter(path):  # a copy of the base in memory
            sizes.append(sizes[0])
            continue
        with open_checkpoint(path) as checkpoint:
            sizes.append(sum(info.nbytes for info in checkpoint.tensors.values()))
    needed, available = sum(sizes) + MODELS_BESIDE * sizes[0] + len(tasks) * sizes[0] // 32, available_memory()
    if available is not None and needed > available:
        raise InputError(
            f"the base {base} ({show_size(sizes[0])}) and {len(tasks)} tasks are held in memory together, "
            f"which needs about {show_size(needed)}, but {show_size(available)} are free: take a run of fewer tasks, "
            "close other programs, or merge by files with `tmx merge` and measure with `tmx eval`"
        )
