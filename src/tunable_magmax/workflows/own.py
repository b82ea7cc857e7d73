"""Base and tasks that have classifiers of their own: their labels, and their tensors in memory under common names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.checkpoints.model_config import ModelConfig
from tunable_magmax.checkpoints.source import holds_adapter
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress
from tunable_magmax.runs.run import Run

if TYPE_CHECKING:
    from torch import Tensor

    from tunable_magmax.checkpoints.heads import Heads
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Head


def merged_labels(base: Path, tasks: Sequence[Path], heads: str | None = None) -> tuple[str, ...] | None:
    """Returns the labels of the classifier that a merge of these would have, from headers; None if it has none."""
    from tunable_magmax.models.own import own_labels

    if any(map(holds_adapter, tasks)) or all(own_labels(path) is None for path in (base, *tasks)):
        return None
    with _inputs(base, tasks, heads) as inputs:
        return own_labels(base) if inputs.heads is None else inputs.heads.labels


def task_labels(base: Path, tasks: Sequence[Path]) -> list[tuple[str, ...] | None]:
    """Returns what a merge calls the labels of each task's own classifier, from headers; None of tasks without one."""
    from tunable_magmax.models.own import own_labels

    own = [own_labels(task) for task in tasks]
    if any(map(holds_adapter, tasks)) or all(labels is None for labels in own):
        return own
    try:
        with _inputs(base, tasks, None) as inputs:
            found = None if inputs.heads is None else inputs.heads.task_labels
    except InputError:  # what cannot be merged as it is may still be profiled
        return own
    return list(found) if found else own


def takes_prior(base: Path, tasks: Sequence[Path], heads: str | None = None) -> bool:
    """Whether the classifier that a merge of these would have has a bias, which can hold a prior."""
    with _inputs(base, tasks, heads, {}) as inputs:
        return inputs.heads is not None and inputs.heads.takes_prior


def _inputs(base: Path, tasks: Sequence[Path], heads: str | None, class_bias: Mapping[str, float] | None = None) -> Any:
    from tunable_magmax.engines.inputs import Inputs
    from tunable_magmax.merging.methods import read_options

    return Inputs(base, tasks, read_options(len(tasks), heads=heads, class_bias=class_bias))


@dataclass(frozen=True, eq=False)
class OwnModels:
    """Base and tasks in memory, under the names of the merge. `heads`: how heads are made; None: they are merged."""

    paths: tuple[Path, ...]
    states: tuple[dict[str, Tensor], ...]
    heads: Heads | None
    config: dict[str, Any]
    copied: tuple[str, ...]
    """Patterns of tensors that are not merged."""

    @classmethod
    def read(
        cls,
        base: Path,
        tasks: Sequence[Path],
        heads: str | None = None,
        progress: Progress | None = None,
        class_bias: Mapping[str, float] | None = None,
    ) -> OwnModels:
        """Reads base and tasks. `class_bias`: what is added to the classifier's bias, by label."""
        from tunable_magmax.checkpoints.checkpoint import Checkpoint
        from tunable_magmax.checkpoints.views import read_tensor

        with _inputs(base, tasks, heads, class_bias) as inputs:
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
        """Returns a checkpoint as it is, 0 is the base, with rows for all labels; a task's own head counts alone."""
        tasks = len(self.paths) - 1
        weights = [float(number in (0, t)) for t in range(1, tasks + 1)]
        return {**self.states[0], **self._plain(number), **self._made(weights)}

    def with_heads(self, merged: dict[str, Tensor], weights: Sequence[float | Fraction] | None) -> dict[str, Tensor]:
        """Returns merged tensors with the heads that the weights make."""
        return {**merged, **self._made([1.0] * (len(self.paths) - 1) if weights is None else weights)}

    def _plain(self, number: int) -> dict[str, Tensor]:
        made = () if self.heads is None else (*self.heads.classifier, *self.heads.mean)
        return {name: tensor for name, tensor in self.states[number].items() if name not in made}

    def _made(self, weights: Sequence[float | Fraction]) -> dict[str, Tensor]:
        return {} if self.heads is None else self.heads.state([float(weight) for weight in weights])

    def encoder(self, device: str | None = None) -> Encoder:
        """Returns the base with the classifier over all labels; its weights are to be replaced."""
        from tunable_magmax.models.own import own_encoder
        from tunable_magmax.models.state import tensors_digest

        state = self.of_checkpoint(0)
        return own_encoder(self.config, state, tensors_digest(state), self.paths[0], self.paths, device)


def scoring_encoder(run: Run, head: Head, device: str | None) -> Encoder:
    """Returns the encoder that models of a run are scored with: the base's, or with the classifiers of their own."""
    from tunable_magmax.models.encoder import load_encoder

    if not head.own:
        return load_encoder(run.base, device)
    return OwnModels.read(run.base, run.tasks, run.heads).encoder(device)
