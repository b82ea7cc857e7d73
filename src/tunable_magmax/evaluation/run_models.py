"""The models of a run in memory: its checkpoints and merges of them, with the classifiers that they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tunable_magmax.checkpoints.model_config import ModelConfig
from tunable_magmax.checkpoints.source import as_checkpoint, holds_adapter, open_checkpoint
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress, show_size
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.models.builtin import builtin_labels
from tunable_magmax.runs.run import Run

if TYPE_CHECKING:
    from torch import Tensor

    from tunable_magmax.checkpoints.heads import Heads
    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.models.builtin import BuiltinEncoder

MODELS_BESIDE = 3
"""Models in memory beside base and tasks: the merged vector, the model made of it, and the encoder it is put into."""


@dataclass(frozen=True)
class MergeSpec:
    """One model of a run: a merge of its tasks by `method`, or a checkpoint as it is; 0 is the base, t the t-th task.

    `scale`: None is the method's default. A merge at scale 0 is the base.

    >>> MergeSpec("tsv", 0.5, (1.0, 0.0)).title, MergeSpec("average", 0).is_base, MergeSpec(checkpoint=2).title
    ('tsv at scale 0.5', True, 'checkpoint 2')
    """

    method: str | None = None
    scale: float | str | None = None
    weights: tuple[float | Fraction, ...] | None = None
    checkpoint: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    """Further options of the merge, by name."""

    def __post_init__(self) -> None:
        if (self.method is None) == (self.checkpoint is None):
            raise InputError("a model of a run is either a merge by a method, or the number of a checkpoint")
        if self.method is not None and self.scale == 0:
            object.__setattr__(self, "method", None)
            object.__setattr__(self, "checkpoint", 0)
        if self.checkpoint is not None or METHODS[str(self.method)].weights == "refused":
            object.__setattr__(self, "weights", None)
        if self.checkpoint is not None:
            object.__setattr__(self, "scale", None)

    @property
    def is_base(self) -> bool:
        return self.checkpoint == 0

    @property
    def title(self) -> str:
        """What tables call it."""
        if self.checkpoint is not None:
            return "base" if self.is_base else f"checkpoint {self.checkpoint}"
        if self.scale is None:
            return str(self.method)
        return f"{self.method} at scale {self.scale if isinstance(self.scale, str) else f'{self.scale:g}'}"


BASE = MergeSpec(checkpoint=0)


class RunModels:
    """The checkpoints of a run and its merges, all in memory. A context manager.

    Base and tasks are read once and task vectors compared once; a model then costs a merge.
    """

    def __init__(self, run: Run, *, seed: int = 0, device: str | None = None, progress: Progress | None = None) -> None:
        """`seed`: of the keys that settle which elements a task gives. `device`: where models are merged."""
        from tunable_magmax.merging.state_dicts import MergeSession

        refuse_adapters(run)
        refuse_too_large(run)
        self.run, self.seed = run, seed
        self.reports: dict[MergeSpec, MergeReport] = {}
        """The report of the latest merge of each kind."""
        self._labels = merged_labels(run.base, run.tasks, run.heads)
        self.builtin = None if self._labels is None else BuiltinModels.read(run.base, run.tasks, run.heads, progress)
        if self.builtin is None:
            self._states = read_states((run.base, *run.tasks), progress)
        elif run.head is None:
            self._states = list(self.builtin.states)
        else:  # the run's head goes before the tasks' own
            self._states, self.builtin = self.builtin.without_heads(), None
        if device is not None and device != "cpu":
            self._states = [moved(state, device) for state in self._states]
            if self.builtin is not None:
                self.builtin = replace(self.builtin, states=tuple(self._states))
        copied = None if self.builtin is None else self.builtin.copied or None
        self._session = MergeSession(self._states[0], self._states[1:], exclude=copied)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the task vectors."""
        self._session.close()

    @property
    def builtin_labels(self) -> tuple[str, ...]:
        """The labels of the classifiers that the models have themselves."""
        assert self.builtin is not None
        return tuple(self._labels or ())

    @property
    def elements(self) -> int:
        """d, the number of merged elements."""
        return self._session.elements

    def state(self, spec: MergeSpec) -> dict[str, Tensor]:
        """Returns the tensors of a model; of a merge, its report is put into `reports`."""
        if spec.checkpoint is not None:
            if not 0 <= spec.checkpoint < len(self._states):
                raise InputError(f"the run has no checkpoint {spec.checkpoint}; it has {len(self._states) - 1} tasks")
            if self.builtin is not None:
                return self.builtin.of_checkpoint(spec.checkpoint)
            return self._states[spec.checkpoint]
        weights = None if spec.weights is None else list(spec.weights)
        options = {**dict(spec.options), **({} if weights is None else {"weights": weights})}
        merged = self._session.merge(method=spec.method, scale=spec.scale, seed=self.seed, **options)
        self.reports[spec] = merged.report
        if spec.method == "last_task":
            weights = [*[0.0] * (len(self.run.tasks) - 1), 1.0]
        return merged.state_dict if self.builtin is None else self.builtin.with_heads(merged.state_dict, weights)


# -- classifiers that the models have themselves ----------------------------------------------------------------------


def merged_labels(base: Path, tasks: Sequence[Path], heads: str | None = None) -> tuple[str, ...] | None:
    """Returns the labels of the classifier that a merge of these would have, from headers; None if it has none."""
    if any(map(holds_adapter, tasks)) or all(builtin_labels(path) is None for path in (base, *tasks)):
        return None
    with _opened(base, tasks, heads) as inputs:
        return builtin_labels(base) if inputs.heads is None else inputs.heads.labels


def task_labels(base: Path, tasks: Sequence[Path]) -> list[tuple[str, ...] | None]:
    """Returns what a merge calls the labels of each task's own classifier, from headers; None of tasks without one."""
    own = [builtin_labels(task) for task in tasks]
    if any(map(holds_adapter, tasks)) or all(labels is None for labels in own):
        return own
    try:
        with _opened(base, tasks, None) as inputs:
            found = None if inputs.heads is None else inputs.heads.task_labels
    except InputError:  # what cannot be merged as it is may still be profiled
        return own
    return list(found) if found else own


def _opened(base: Path, tasks: Sequence[Path], heads: str | None) -> Any:
    from tunable_magmax.engines.inputs import Inputs
    from tunable_magmax.merging.methods import read_options

    return Inputs(base, tasks, read_options(len(tasks), heads=heads))


@dataclass(frozen=True, eq=False)
class BuiltinModels:
    """Base and tasks in memory, under the names of the merge. `heads`: how heads are made; None: they are merged."""

    paths: tuple[Path, ...]
    states: tuple[dict[str, Tensor], ...]
    heads: Heads | None
    config: dict[str, Any]
    copied: tuple[str, ...]
    """Patterns of tensors that are not merged."""

    @classmethod
    def read(
        cls, base: Path, tasks: Sequence[Path], heads: str | None = None, progress: Progress | None = None
    ) -> BuiltinModels:
        """Reads base and tasks."""
        from tunable_magmax.checkpoints.checkpoint import Checkpoint
        from tunable_magmax.checkpoints.views import read_tensor

        with _opened(base, tasks, heads) as inputs:
            names = list(inputs.base.tensors)
            states = []
            for done, opened in enumerate(inputs.checkpoints, 1):
                assert isinstance(opened, Checkpoint)
                held = [name for name in names if name in opened.tensors or name in opened.aliases]
                states.append({name: read_tensor(opened, name) for name in held})
                if progress is not None:
                    progress("loading", done, len(inputs.checkpoints))
            found = inputs.heads
            made = None if found is None else found.kept_in_memory()
            own = None if found is None else found.config
        config = ModelConfig.of(base)
        content = dict(own) if own is not None else {} if config is None else config.content
        copied = () if found is None else tuple(map(escape, found.copied))
        return cls((base, *tasks), tuple(states), made, content, copied)

    def of_checkpoint(self, number: int) -> dict[str, Tensor]:
        """Returns a checkpoint as it is, 0 is the base, with rows for all labels; a task's own head counts alone.

        The base has the last task's, as the merge of the last task at scale 0 has.
        """
        tasks = len(self.paths) - 1
        weights = [float(t == (number or tasks)) for t in range(1, tasks + 1)]
        return {**self.states[0], **self._plain(number), **self._made(weights)}

    def with_heads(self, merged: dict[str, Tensor], weights: Sequence[float | Fraction] | None) -> dict[str, Tensor]:
        """Returns merged tensors with the heads that the weights make."""
        return {**merged, **self._made([1.0] * (len(self.paths) - 1) if weights is None else weights)}

    def _plain(self, number: int) -> dict[str, Tensor]:
        made = () if self.heads is None else (*self.heads.classifier, *self.heads.mean)
        return {name: tensor for name, tensor in self.states[number].items() if name not in made}

    def _made(self, weights: Sequence[float | Fraction]) -> dict[str, Tensor]:
        if self.heads is None:
            return {}
        where = next(iter(self.states[0].values())).device
        made = self.heads.state([float(weight) for weight in weights])
        return {name: tensor.to(where) for name, tensor in made.items()}

    def without_heads(self) -> list[dict[str, Tensor]]:
        """Returns base and tasks without the tensors of heads that they do not share."""
        return [self._plain(number) for number in range(len(self.states))]

    def encoder(self, device: str | None = None) -> BuiltinEncoder:
        """Returns the base with the classifier over all labels; its weights are to be replaced."""
        from tunable_magmax.models.builtin import builtin_encoder
        from tunable_magmax.models.state import tensors_digest

        # Copies, because the module's parameters may be the tensors that it is made of.
        state = {name: tensor.clone().cpu() for name, tensor in self.of_checkpoint(0).items()}
        return builtin_encoder(self.config, state, tensors_digest(state), self.paths[0], self.paths, device)


# -- what cannot be held in memory ------------------------------------------------------------------------------------


def refuse_adapters(run: Run) -> None:
    """Refuses to score the models of a run whose tasks are adapters."""
    adapter = next(filter(holds_adapter, run.tasks), None)
    if adapter is not None:
        raise InputError(
            f"{adapter} is a LoRA adapter, and only whole checkpoints can be scored on samples: make "
            f"checkpoints of the adapters and a run of these: {as_checkpoint(adapter)}"
        )


def refuse_too_large(run: Run) -> None:
    """Refuses a run whose base and tasks do not fit into memory together; reads headers only."""
    from tunable_magmax.merging.resources import available_memory

    sizes = []
    for path in (run.base, *run.tasks):
        with open_checkpoint(path) as checkpoint:
            sizes.append(sum(info.nbytes for info in checkpoint.tensors.values()))
    needed, available = sum(sizes) + MODELS_BESIDE * sizes[0] + len(run.tasks) * sizes[0] // 32, available_memory()
    if available is not None and needed > available:
        raise InputError(
            f"{run.path}: the base ({show_size(sizes[0])}) and {len(run.tasks)} tasks are held in memory together, "
            f"which needs about {show_size(needed)}, but {show_size(available)} are free: take a run of fewer tasks, "
            "close other programs, or merge by files with `tmx merge` and measure with `tmx eval`"
        )


def read_states(paths: Sequence[Path], progress: Progress | None = None) -> list[dict[str, Tensor]]:
    """Reads the tensors of checkpoints, one after the other."""
    from tunable_magmax.models.state import read_tensors

    states = []
    for done, path in enumerate(paths, 1):
        states.append(read_tensors(path))
        if progress is not None:
            progress("loading", done, len(paths))
    return states


def moved(state: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    """Moves tensors to a device; tied ones stay one tensor."""
    placed = {id(tensor): tensor.to(device) for tensor in state.values()}
    return {name: placed[id(tensor)] for name, tensor in state.items()}
