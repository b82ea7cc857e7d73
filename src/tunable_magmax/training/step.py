"""One step of optimisation, and the losses that keep what earlier tasks taught: online EWC, and LwF.

On a GPU a step is recorded once for each shape of batch and then replayed. A step of a small model is hundreds of
short kernels, and launching them one by one takes longer than running them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tunable_magmax.training.config import Optimisation, Regularisation

if TYPE_CHECKING:
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.prepared import Batch, Prepared

MOMENTS = ("exp_avg", "exp_avg_sq")
# Libraries choose their algorithms in the first runs, which cannot be recorded.
RUNS_BEFORE_RECORDING = 3
Parameters = Sequence[tuple[str, nn.Parameter]]


class Regulariser:
    """A loss that keeps what earlier tasks taught. `weight` and `earlier`: scaled head rows [classes, dim]."""

    def __init__(self, options: Regularisation) -> None:
        self._options = options

    def begin(self, encoder: Encoder, earlier: Tensor | None) -> None:
        """Starts a task: the encoder is as the task before left it; `earlier` has the head rows of earlier tasks."""

    def penalty(self, batch: Batch, features: Tensor, parameters: Parameters) -> Tensor | None:
        """Returns what is added to the loss; `features` [b, dim] are normalised."""
        raise NotImplementedError

    def finish(
        self, encoder: Encoder, inputs: Prepared, targets: Tensor, weight: Tensor, parameters: Parameters
    ) -> None:
        """Ends a task, whose data can be read once more."""

    def state(self) -> dict[str, Tensor]:
        """Returns what must be kept from one task to the next."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Sets the state that an earlier call kept."""


class ElasticWeights(Regulariser):
    """Online EWC: strength / 2 * sum of F (theta - anchor)^2, F the decayed sum of the tasks' Fisher diagonals.

    F is the mean square of the gradient of log p(label | input), one sample at a time.
    """

    def __init__(self, options: Regularisation) -> None:
        super().__init__(options)
        self._fisher: dict[str, Tensor] = {}
        self._anchor: dict[str, Tensor] = {}

    def penalty(self, batch: Batch, features: Tensor, parameters: Parameters) -> Tensor | None:
        if not self._fisher:
            return None
        terms = [(self._fisher[name] * (value - self._anchor[name]).square()).sum() for name, value in parameters]
        total: Tensor = sum(terms[1:], terms[0])
        return 0.5 * self._options.strength * total

    def finish(
        self, encoder: Encoder, inputs: Prepared, targets: Tensor, weight: Tensor, parameters: Parameters
    ) -> None:
        values = [value for _, value in parameters]
        sums = [torch.zeros_like(value) for value in values]
        rows = range(0, len(inputs), max(1, -(-len(inputs) // self._options.samples)))
        encoder.module.eval()
        for row in rows:
            features = functional.normalize(encoder.pool(inputs.batch([row])).float(), dim=1)
            loss = functional.cross_entropy(features @ weight.T, targets[row : row + 1])
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


class WithoutForgetting(Regulariser):
    """LwF: distils the model before the task into the new one, over the classes of earlier tasks.

    strength * temperature^2 * KL(teacher || student), both softened by the temperature, on the new task's inputs.
    """

    def __init__(self, options: Regularisation) -> None:
        super().__init__(options)
        self._teacher: Encoder | None = None
        self._earlier: Tensor | None = None

    def begin(self, encoder: Encoder, earlier: Tensor | None) -> None:
        self._earlier = earlier
        self._teacher = None
        if earlier is not None:
            module: Any = copy.deepcopy(encoder.module)
            self._teacher = replace(encoder, module=module.eval().requires_grad_(False))

    def penalty(self, batch: Batch, features: Tensor, parameters: Parameters) -> Tensor | None:
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


def make_regulariser(options: Regularisation) -> Regulariser | None:
    """Returns the regulariser that a configuration names, or None."""
    if options.method == "ewc":
        return ElasticWeights(options)
    return WithoutForgetting(options) if options.method == "lwf" else None


# -- one step -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Recording:
    graph: Any
    batch: Batch
    targets: Tensor
    weight: Tensor
    loss: Tensor


class Step:
    """Optimises some parameters of an encoder; the loss is cross-entropy over the frozen head's rows."""

    def __init__(
        self, encoder: Encoder, parameters: Parameters, options: Optimisation, regulariser: Regulariser | None
    ) -> None:
        self._encoder, self._named, self._options, self._regulariser = encoder, parameters, options, regulariser
        self._values = [value for _, value in parameters]
        self._device = self._values[0].device
        gpu = self._device.type == "cuda"
        self._reduced = options.precision == "bfloat16" or (options.precision == "auto" and gpu)
        self._rate = torch.tensor(options.lr, device=self._device) if gpu else options.lr
        self._optimiser = torch.optim.AdamW(
            self._values, lr=self._rate, weight_decay=options.weight_decay, fused=gpu, capturable=gpu
        )
        for value in self._values:
            value.grad = torch.zeros_like(value)
            self._optimiser.state[value] = {
                "step": torch.zeros((), device=self._device if gpu else None),
                **{moment: torch.zeros_like(value) for moment in MOMENTS},
            }
        self._embed: Callable[[Batch], Tensor] = encoder.pool
        if options.compile:
            self._embed = torch.compile(encoder.pool, dynamic=False)
        self._records = gpu and regulariser is None
        self._recordings: dict[Any, _Recording] = {}
        self._runs: dict[Any, int] = {}
        self._pool: Any = None

    def reset(self) -> None:
        """Sets the moments to 0 for a new task; in place, because recordings refer to them."""
        for state in self._optimiser.state.values():
            for value in state.values():
                value.zero_()

    def state(self) -> dict[str, Tensor]:
        """Returns the parameters and their moments by name, to go on from after a kill."""
        state = {}
        for name, value in self._named:
            state[f"value.{name}"] = value.detach()
            state |= {f"{moment}.{name}": self._optimiser.state[value][moment] for moment in MOMENTS}
        return state

    def restore(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Sets the state after so many steps."""
        with torch.no_grad():
            for name, value in self._named:
                value.copy_(state[f"value.{name}"])
                kept = self._optimiser.state[value]
                kept["step"].fill_(steps)
                for moment in MOMENTS:
                    kept[moment].copy_(state[f"{moment}.{name}"])

    def __call__(self, batch: Batch, targets: Tensor, weight: Tensor, rate: float) -> Tensor:
        """Takes one step and returns the loss before it, a scalar on the device. `weight`: scaled head rows."""
        if isinstance(self._rate, Tensor):
            self._rate.fill_(rate)
        else:
            self._optimiser.param_groups[0]["lr"] = rate
        if not self._records:
            return self._run(batch, targets, weight)
        return self._replayed(batch, targets, weight)

    def _run(self, batch: Batch, targets: Tensor, weight: Tensor) -> Tensor:
        # Recordings need every tensor at its place, so gradients are emptied, not dropped.
        loss = self._loss(batch, targets, weight)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._options.clip is not None:
            nn.utils.clip_grad_norm_(self._values, self._options.clip)
        self._optimiser.step()
        torch._foreach_zero_([value.grad for value in self._values if value.grad is not None])
        return loss.detach()

    def _loss(self, batch: Batch, targets: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._reduced, cache_enabled=False):
            pooled = self._embed(batch)
        features = functional.normalize(pooled.float(), dim=1)
        loss = functional.cross_entropy(features @ weight.T, targets, label_smoothing=self._options.label_smoothing)
        if self._regulariser is not None:
            penalty = self._regulariser.penalty(batch, features, self._named)
            loss = loss if penalty is None else loss + penalty
        return loss

    # -- recording -------------------------------------------------------------------------------------------------

    def _replayed(self, batch: Batch, targets: Tensor, weight: Tensor) -> Tensor:
        key = (tuple((name, value.shape) for name, value in _named(batch).items()), weight.shape)
        recording = self._recordings.get(key)
        if recording is None:
            self._runs[key] = self._runs.get(key, 0) + 1
            if self._runs[key] <= RUNS_BEFORE_RECORDING:
                return self._run(batch, targets, weight)
            recording = self._recorded(batch, targets, weight)
            if recording is None:
                return self._run(batch, targets, weight)
            self._recordings[key] = recording
        for name, place in _named(recording.batch).items():
            place.copy_(_named(batch)[name])
        recording.targets.copy_(targets)
        recording.weight.copy_(weight)
        recording.graph.replay()
        return recording.loss

    def _recorded(self, batch: Batch, targets: Tensor, weight: Tensor) -> _Recording | None:
        places = {name: value.clone() for name, value in _named(batch).items()}
        own: Batch = places if isinstance(batch, dict) else places["pixels"]
        targets, weight = targets.clone(), weight.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
                loss = self._run(own, targets, weight)
        except RuntimeError as error:
            self._records = False
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"steps cannot be recorded for this model, so training is slower ({reason})", stacklevel=2)
            return None
        self._pool = graph.pool()
        return _Recording(graph, own, targets, weight, loss)


def _named(batch: Batch) -> dict[str, Tensor]:
    return batch if isinstance(batch, dict) else {"pixels": batch}
