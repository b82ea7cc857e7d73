"""A merge divided into parts that different workers do: ranges of tensors, of about the same number of bytes each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tunable_magmax.checkpoints.layout import Layout, Mergeable
from tunable_magmax.engines.weight_files import output_tensors
from tunable_magmax.merging.kernels import SLOTS, Chunk, Kernels, Planes
from tunable_magmax.merging.methods import Counts, Method
from tunable_magmax.merging.reading import Vectors


@dataclass(frozen=True, slots=True)
class Part:
    """Elements start:stop of a mergeable tensor, which is known by its place in the layout."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker does: its parts of mergeable tensors, at most one of each, and the tensors that it copies."""

    parts: tuple[Part, ...]
    copied: tuple[str, ...]

    def layout(self, whole: Layout) -> Layout:
        """The parts as if each were a tensor: same names and element indices, shorter shapes."""
        parts = tuple(_cut(whole.mergeable[part.tensor], part) for part in self.parts)
        return replace(whole, mergeable=parts, copied=(), ties={}, warnings=())


def _cut(tensor: Mergeable, part: Part) -> Mergeable:
    infos = tuple(replace(info, shape=(part.stop - part.start,)) for info in tensor.infos)
    return replace(tensor, infos=infos, element=tensor.element + part.start)


def divide(layout: Layout, out_dtype: str | None, workers: int) -> list[Share]:
    """Shares of about equally many bytes to read, each a range of the output as planned from headers.

    There are fewer than `workers` if there is not enough to do. Cuts inside a tensor fall on multiples of 64 elements.

    >>> from tunable_magmax.checkpoints.tensors import TensorInfo
    >>> infos = (TensorInfo("w", "F32", (1000,)),) * 3
    >>> whole = Layout((Mergeable("w", infos, 0),), (TensorInfo("steps", "I64", ()),), {}, ())
    >>> [share.parts for share in divide(whole, None, 2)]
    [(Part(tensor=0, start=0, stop=448),), (Part(tensor=0, start=448, stop=1000),)]
    """
    place = {tensor.name: k for k, tensor in enumerate(layout.mergeable)}
    merged = {tensor.name: out_dtype or tensor.widest for tensor in layout.mergeable}
    planned = output_tensors(layout, merged, out_dtype)
    costs = {tensor.name: sum(info.nbytes for info in tensor.infos) for tensor in layout.mergeable}
    costs |= {info.name: info.nbytes for info in layout.copied}
    total, spent = sum(costs.values()), 0
    shares: list[tuple[list[Part], list[str]]] = [([], []) for _ in range(workers)]
    current = 0
    for info in planned:
        cost, start = costs[info.name], 0
        if info.name not in place:
            shares[current][1].append(info.name)
        while info.name in place:
            k, size = place[info.name], info.numel
            room = total * (current + 1) // workers - spent - cost * start // max(size, 1)
            stop = size if current == workers - 1 else min(size, start + room * size // max(cost, 1) // SLOTS * SLOTS)
            if stop > start or not size:
                shares[current][0].append(Part(k, start, stop))
            if stop >= size:
                break
            start, current = max(start, stop), current + 1
        spent += cost
    return [Share(tuple(parts), tuple(copied)) for parts, copied in shares if parts or copied]


class PartVectors:
    """`Vectors` for parts of tensors."""

    def __init__(self, vectors: Vectors, whole: Layout, share: Share) -> None:
        self.borrows = vectors.borrows
        self._vectors = vectors
        self._of = {whole.mergeable[part.tensor].name: (whole.mergeable[part.tensor], part) for part in share.parts}

    def read(self, source: int, tensor: Mergeable, start: int, stop: int, scratch: Tensor) -> Tensor:
        whole, part = self._of[tensor.name]
        return self._vectors.read(source, whole, part.start + start, part.start + stop, scratch)


class PartMethod(Method):
    """A method at work on parts of tensors: what it says of a part is what it says of the whole."""

    def __init__(self, method: Method, whole: Layout, share: Share) -> None:
        super().__init__(method.options, method.tasks)
        self.method, self.plane_rows, self.cuts_by_magnitude = method, method.plane_rows, method.cuts_by_magnitude
        self.elements = whole.elements
        """How many elements are merged, here and elsewhere."""
        self._places = [(part.tensor, whole.mergeable[part.tensor].size) for part in share.parts]

    def marks(self, tensor: int, size: int) -> tuple[Sequence[bool], Sequence[int]]:
        return self.method.marks(*self._places[tensor])

    def assume(self, elements: int) -> bool:
        return self.method.assume(self.elements)

    def combined(self, tensor: int, size: int) -> Sequence[int]:
        return self.method.combined(*self._places[tensor])

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        return self.method.combine(kernels, chunk, self._places[tensor][0], planes, out)
