"""Many checkpoints of one architecture on the same data: inputs decoded once, weights put in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import Accuracy, predict
from tunable_magmax.evaluation.labelled import Labelled
from tunable_magmax.evaluation.share import LEVEL

if TYPE_CHECKING:
    from torch import Tensor

    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Head
    from tunable_magmax.models.prepared import Prepared
    from tunable_magmax.models.refill import Refill

BATCH = 256
Progress = Callable[[str, int, int], None]


class Evaluator:
    """Measures checkpoints with a frozen head on labelled data. The encoder is its own: its weights get replaced.

    Everything is computed in float32, on a GPU too: no reduced precision, so that a result does not depend on it.

        evaluator = Evaluator(load_encoder(base), load_head(file), label_samples(samples, head.classes, tasks))
        with MergeSession(base, tasks) as session:
            for weights in many:
                evaluator.measure(session.merge(weights=weights).state_dict).overall.value
    """

    def __init__(
        self,
        encoder: Encoder,
        head: Head,
        labelled: Labelled,
        *,
        batch: int = BATCH,
        strict: bool = False,
        level: float = LEVEL,
        progress: Progress | None = None,
        prepared: Prepared | None = None,
    ) -> None:
        """Decode the inputs; those that cannot be read are left out with a warning, or with `strict` an error.

        `prepared`: the inputs at the labelled positions where they are decoded already, by an equal encoder.
        """
        import torch

        from tunable_magmax.models.head import require_match
        from tunable_magmax.models.prepared import prepare

        if batch < 1:
            raise InputError(f"the batch is {batch}, expected at least 1")
        require_match(encoder, head)
        self.encoder, self.head, self.batch, self.level = encoder, head, batch, level
        if prepared is None:
            prepared = prepare(encoder, labelled.samples, labelled.positions, strict=strict, progress=progress)
        row = {position: k for k, position in enumerate(labelled.positions)}
        self.prepared = prepared
        self.labelled = labelled.take([row[position] for position in prepared.positions])
        self._weight = torch.from_numpy(np.ascontiguousarray(head.weight)).to(self._device)
        self._refills: dict[tuple[str, ...], Refill] = {}

    def __len__(self) -> int:
        return len(self.prepared)

    @property
    def truth(self) -> NDArray[np.int64]:
        """The right class of each readable sample, as an index into the head's classes."""
        return self.labelled.truth

    @property
    def unreadable(self) -> int:
        """How many samples were left out."""
        return self.prepared.failed

    def measure(self, state: Mapping[str, Tensor] | None = None, progress: Progress | None = None) -> Accuracy:
        """The accuracy with the weights of `state`, tensors in the names of a checkpoint; None: as they are now."""
        predicted, known = self.predict(state, progress)
        tasks = self.labelled.tasks
        return Accuracy.of(
            predicted,
            self.truth,
            self.head.classes,
            tasks,
            sample_tasks=self.labelled.sample_tasks if tasks else None,
            known=known if tasks else None,
            level=self.level,
        )

    def predict(
        self, state: Mapping[str, Tensor] | None = None, progress: Progress | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The predicted class of each sample: among all, and among those of its own task (-1 without a task)."""
        if state is not None:
            self.fill(state)
        owner = self.labelled.sample_tasks
        owner = np.full(len(self), -1) if owner is None else owner
        members = list(self.labelled.tasks.values())
        found = []
        done = 0
        for scores in self._scores():
            found.append(predict(scores, owner[done : done + len(scores)], members))
            done += len(scores)
            if progress is not None:
                progress("evaluating", done, len(self))
        return np.concatenate([part for part, _ in found]), np.concatenate([part for _, part in found])

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Put the weights of a checkpoint into the encoder."""
        from tunable_magmax.models.refill import Refill

        names = tuple(state)
        if names not in self._refills:
            first = next(iter(self._refills), ())
            lacking = [name for name in first if name not in state]
            if lacking:  # they would silently stay what the last checkpoint left there
                raise InputError(
                    f"the weights lack {len(lacking)} tensors that those before them had, first {lacking[0]!r}: "
                    "checkpoints that are evaluated together must have one architecture"
                )
            self._refills[names] = Refill(self.encoder, state)
        self._refills[names](state)

    def _scores(self) -> Iterator[Tensor]:
        """Cosines with the head's rows times its scale, [b, classes] for each batch."""
        import torch

        module = self.encoder.module
        training = module.training
        module.eval()
        try:
            for start in range(0, len(self), self.batch):
                rows = range(start, min(start + self.batch, len(self)))
                with torch.inference_mode(), full_float32(self._device):
                    features = self.encoder.pool(self.prepared.batch(rows)).float()
                    features = torch.nn.functional.normalize(features, dim=1)
                    scores = self.head.logit_scale * features @ self._weight.T
                yield scores
        except torch.cuda.OutOfMemoryError:
            raise InputError(
                f"the device ran out of memory with {self.batch} samples at a time: give a smaller --batch, such as "
                f"{max(1, self.batch // 4)}, or --device cpu"
            ) from None
        finally:
            module.train(training)

    @property
    def _device(self) -> Any:
        return next(self.encoder.module.parameters()).device


@contextmanager
def full_float32(device: Any) -> Iterator[None]:
    """Float32 means float32: neither autocast nor the shortened TF32 of a GPU's matrix units."""
    import torch

    with torch.autocast(device.type, enabled=False):
        if device.type != "cuda":
            yield
            return
        products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(products)
            torch.backends.cudnn.allow_tf32 = convolutions
