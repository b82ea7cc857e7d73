"""Losses that keep what earlier tasks taught: online EWC, and learning without forgetting (LwF)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tunable_magmax.training.config import Regularisation

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.prepared import Batch, Prepared

Parameters = Sequence[tuple[str, "nn.Parameter"]]


class Regulariser(Protocol):
    """What training calls on a regulariser. `weight` and `earlier`: scaled head rows [classes, dim] as in the loss."""

    def begin(self, encoder: Encoder, earlier: Tensor | None) -> None:
        """Starts a task: the encoder is as the task before left it; `earlier` has the head rows of earlier tasks."""

    def penalty(self, batch: Batch, features: Tensor, parameters: Parameters) -> Tensor | None:
        """Returns what is added to the loss; `features` [b, dim] are normalised."""

    def finish(
        self, encoder: Encoder, inputs: Prepared, targets: Tensor, weight: Tensor, parameters: Parameters
    ) -> None:
        """Ends a task, whose data can be read once more."""

    def state(self) -> dict[str, Tensor]:
        """Returns what must be kept from one task to the next."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Sets the state that an earlier call kept."""


class ElasticWeights:
    """Online EWC: strength / 2 * sum of F (theta - anchor)^2, F the decayed sum of the tasks' Fisher diagonals.

    F is the mean square of the gradient of log p(label | input), one sample at a time.
    """

    def __init__(self, options: Regularisation) -> None:
        self._options = options
        self._fisher: dict[str, Tensor] = {}
        self._anchor: dict[str, Tensor] = {}

    def begin(self, encoder: Encoder, earlier: Tensor | None) -> None:
        pass

    def penalty(self, batch: Batch, features: Tensor, parameters: Parameters) -> Tensor | None:
        if not self._fisher:
            return None
        terms = [(self._fisher[name] * (value - self._anchor[name]).square()).sum() for name, value in parameters]
        total: Tensor = sum(terms[1:], terms[0])
        return 0.5 * self._options.strength * total

    def finish(
        self, encoder: Encoder, inputs: Prepared, targets: Tensor, weight: Tensor, parameters: Parameters
    ) -> None:
        import torch

        values = [value for _, value in parameters]
        sums = [torch.zeros_like(value) for value in values]
        rows = range(0, len(inputs), max(1, -(-len(inputs) // self._options.samples)))
        encoder.module.eval()
        for row in rows:
            features = torch.nn.functional.normalize(encoder.pool(inputs.batch([row])).float(), dim=1)
            loss = torch.nn.functional.cross_entropy(features @ weight.T, targets[row : row + 1])
            for total, gradient in zip(sums, torch.autograd.grad(loss, values, allow_unused=True), strict=True):
                if gradient is not None:
                    total += gradient.square()
        for (name, value), total in zip(parameters, sums, strict=True):
            fisher = total / len(rows)
            if name in self._fisher:
                fisher += self._options.decay * self._fisher[name]
            self._fisher[name], self._anchor[name] = fisher, value.detach().clone()

    def state(self) -> dict[str, Tensor]:
        return {f"fisher.{name}": value for name, value in self._fisher.items()} | {
            f"anchor.{name}": value for name, value in self._anchor.items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._fisher = {name.removeprefix("fisher."): v for name, v in state.items() if name.startswith("fisher.")}
        self._anchor = {name.removeprefix("anchor."): v for name, v in state.items() if name.startswith("anchor.")}


class WithoutForgetting:
    """LwF: distils the model before the task into the new one, over the classes of earlier tasks.

    strength * temperature^2 * KL(teacher || student), both softened by the temperature, on the new task's inputs.
    """

    def __init__(self, options: Regularisation) -> None:
        self._options = options
        self._teacher: Encoder | None = None
        self._earlier: Tensor | None = None

    def begin(self, encoder: Encoder, earlier: Tensor | None) -> None:
        from dataclasses import replace

        self._earlier = earlier
        self._teacher = None
        if earlier is not None:
            module: Any = copy.deepcopy(encoder.module)
            self._teacher = replace(encoder, module=module.eval().requires_grad_(False))

    def penalty(self, batch: Batch, features: Tensor, parameters: Parameters) -> Tensor | None:
        import torch
        from torch.nn import functional

        if self._teacher is None or self._earlier is None:
            return None
        temperature = self._options.temperature
        with torch.no_grad():
            before = functional.normalize(self._teacher.pool(batch).float(), dim=1) @ self._earlier.T / temperature
        now = features @ self._earlier.T / temperature
        divergence = functional.kl_div(
            now.log_softmax(dim=1), before.log_softmax(dim=1), reduction="batchmean", log_target=True
        )
        return self._options.strength * temperature**2 * divergence

    def finish(
        self, encoder: Encoder, inputs: Prepared, targets: Tensor, weight: Tensor, parameters: Parameters
    ) -> None:
        self._teacher = None

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        pass


def make_regulariser(options: Regularisation) -> Regulariser | None:
    """Returns the regulariser that a configuration names, or None."""
    if options.method == "ewc":
        return ElasticWeights(options)
    return WithoutForgetting(options) if options.method == "lwf" else None
