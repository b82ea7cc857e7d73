"""Which way round a base keeps its weights: [out, in] like Linear, or [in, out] like GPT-2's Conv1D.

PEFT goes by the class of each module, and writes down one `fan_in_fan_out` for all: that of the last module it came
to. So shapes are asked first, and the configuration last.
"""

from __future__ import annotations

from collections.abc import Iterable

from tunable_magmax.checkpoints.layout import Signature
from tunable_magmax.checkpoints.tensors import TensorInfo

Shape = tuple[int, ...]


class Direction:
    """What can be known about the direction of square weights, from weights that are not square.

    `adapted` are the factors A [r, in] and B [out, r] of adapted layers, each with the shape of the base's weight.
    """

    def __init__(self, base: Signature, adapted: Iterable[tuple[tuple[TensorInfo, TensorInfo], Shape]]) -> None:
        in_base = {
            info.shape[1:] == bias.shape
            for name, info in base.tensors.items()
            if name.endswith(".weight") and _oblong(info.shape)
            if (bias := base.tensors.get(f"{name.removesuffix('.weight')}.bias")) is not None
            if bias.shape in (info.shape[:1], info.shape[1:])
        }
        in_adapter = {
            shape != _product(a, b)
            for (a, b), shape in adapted
            if _oblong(shape) and shape in (_product(a, b), _product(a, b)[::-1])
        }
        self._seen = in_base or in_adapter

    def transposed(self, a: TensorInfo, b: TensorInfo, shape: Shape, configured: bool) -> bool | None:
        """Whether the base's weight is the transpose of B @ A; None if that cannot be known.

        A square weight is like the base's other weights with a bias, or else like the other adapted ones, or else as
        the configuration says.
        """
        product = _product(a, b)
        if len(product) != 2 or product[0] != product[1]:
            return shape != product and shape == product[::-1]
        seen = self._seen or {configured}
        return None if len(seen) > 1 else next(iter(seen))


def _product(a: TensorInfo, b: TensorInfo) -> Shape:
    return b.shape[0], *a.shape[1:]


def _oblong(shape: Shape) -> bool:
    return len(shape) == 2 and shape[0] != shape[1]
