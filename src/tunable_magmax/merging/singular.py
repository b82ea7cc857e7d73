"""Singular vectors of task vectors, for the method `tsv`: by eigenvalues of the smaller Gram matrix, in float64.

A matrix lies here with its shorter side first: [short, long]. Of each task only the vectors of the short side are
computed by a decomposition and kept; those of the long side follow from them by a product with the matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

ZERO = 1e-6
"""Singular values of at most this share of the largest count as zero. Squares in float64 tell no finer."""
DEPENDENT = 1e-10
"""Directions of the concatenated factors count as dependent if their squared length is at most this share of the
largest: below it, the polar factor would blow up what rounding alone has put there."""
STEPS, CONVERGED = 28, 1e-9
"""So many Newton steps reach eigenvalues down to about 1e-8 of the largest, far above `DEPENDENT`."""


@dataclass(frozen=True, slots=True)
class Triples:
    """The singular values of a matrix [rank], largest first, and the vectors of its short side [short, rank]."""

    values: Tensor
    short: Tensor

    def largest(self, rank: int) -> Triples:
        """Returns the largest of these, so many at most."""
        return Triples(self.values[:rank], self.short[:, :rank])


def triples_of(matrix: Tensor) -> Triples:
    """Returns the singular triples of a float64 matrix [short, long], less those whose value counts as zero.

    >>> triples_of(torch.tensor([[3.0, 0.0, 4.0], [0.0, 0.0, 0.0]], dtype=torch.float64)).values.tolist()
    [5.0]
    """
    largest = float(matrix.abs().max())
    if not largest:
        return Triples(matrix.new_empty(0), matrix.new_empty(len(matrix), 0))
    scaled = matrix / largest  # squares of the values themselves may overflow, or vanish
    squares, vectors = torch.linalg.eigh(scaled @ scaled.mT)  # in rising order
    del scaled
    values = squares.clamp(min=0).sqrt()
    rank = int((values > ZERO * values[-1]).sum())
    return Triples(values[-rank:].flip(0) * largest, vectors[:, -rank:].flip(1))


def united(parts: Iterable[tuple[Tensor, Triples]], short: int, long: int) -> Tensor | None:
    """Returns the matrix [short, long] made of triples of several matrices, with both factors made orthogonal.

    None: there are no triples. The parts, a float64 matrix [short, long] and those of its triples that are taken, may
    be made one at a time: a part is let go before the next one is asked for.

    >>> matrices = [torch.diag(torch.tensor(row, dtype=torch.float64)) for row in ([2, 0], [0, 1])]
    >>> united(((matrix, triples_of(matrix)) for matrix in matrices), 2, 2)
    tensor([[2., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    left, right = torch.empty(0), torch.empty(0)
    values: list[Tensor] = []
    used = 0
    for matrix, triples in parts:
        end = used + len(triples.values)
        if end == used:
            continue
        if not values:
            left, right = matrix.new_empty(short, short), matrix.new_empty(long, short)
        left[:, used:end] = triples.short
        torch.matmul(matrix.mT, triples.short, out=right[:, used:end]).div_(triples.values)
        values.append(triples.values)
        used = end
        del matrix, triples
    if not values:
        return None
    left, right, core = left[:, :used], right[:, :used], torch.cat(values)
    if len(values) == 1:  # its vectors are orthogonal as they are
        return (left * core) @ right.mT
    middle = (_inverse_root(left) * core) @ _inverse_root(right)
    return left @ middle @ right.mT


def _inverse_root(factor: Tensor) -> Tensor:
    """Returns (F^T F)^(-1/2) on the directions that are independent, and 0 on the others."""
    gram = factor.mT @ factor
    if gram.is_cuda and (root := iterated_inverse_root(gram)) is not None:
        return root
    squares: Tensor
    vectors: Tensor
    squares, vectors = torch.linalg.eigh(gram)
    roots = torch.where(squares > DEPENDENT * squares[-1], squares.clamp(min=DEPENDENT).rsqrt(), 0.0)
    return (vectors * roots) @ vectors.mT


def iterated_inverse_root(gram: Tensor) -> Tensor | None:
    """Returns gram^(-1/2) by products alone, which a GPU does ten times faster than a decomposition.

    None where the steps do not converge, because directions are dependent or nearly so: those need a decomposition.
    """
    size = torch.linalg.matrix_norm(gram, float("inf"))  # at least the largest eigenvalue
    one = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    product, inverse = gram / size, one
    for _ in range(STEPS):
        step = 1.5 * one - 0.5 * (inverse @ product)
        product, inverse = product @ step, step @ inverse
    left = (inverse @ product - one).abs().max()
    return inverse / size.sqrt() if bool(left < CONVERGED) else None


def working_bytes(shape: tuple[int, ...], width: int) -> int:
    """Returns the memory that merging one matrix takes; values of base and tasks have `width` bytes in it.

    Base, task, what is read and the merged vector in their own types; a matrix, its scaled copy and a factor in
    float64, and as much as two of these that the allocator does not give back at once (measured); of the short side,
    two factors and what the decomposition of a Gram matrix works in.
    """
    (rows, columns), short = shape, min(shape)
    return rows * columns * (4 * width + 5 * 8) + 8 * 8 * short * short
