"""Entropic optimal transport between two samples: Sinkhorn's iterations in the log domain, float64, batched."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import Floats, Matrix, rescaled, squared_distances
from tunable_magmax.errors import InputError

# Problems are solved in batches that fit the processor's cache, where an iteration is not bound by memory.
CACHE = 1 << 22
# Scalings beyond e^60 are absorbed into the potentials. An entry of the kernel that underflowed (below e^-708) is then
# still below e^-580 of its row's sum, so nothing is lost against doing every step by logsumexp.
DRIFT = math.exp(60)
# Bootstrap draws of more samples than this are not solved but estimated to first order, which is then good enough.
SOLVED_DRAWS = 1000
REDRAWS = 20
REDRAWN = 1e-4
TINY = 1e-300


@dataclass(frozen=True)
class SinkhornResult:
    """The result of the solver, and how good it is. `cost` is <P, C>, without the entropy term.

    `residual`: L1 distance of the plan's row sums from the uniform marginal (its column sums are exact).
    `draws`: the cost for each given draw of the target's samples.
    """

    cost: float
    converged: bool
    iterations: int
    residual: float
    draws: Floats


@dataclass(frozen=True)
class Sinkhorn:
    """The solver's settings. The defaults are the authors'; it stops early once the residual is at most `tolerance`."""

    regularisation: float = 0.1
    iterations: int = 100
    tolerance: float = 1e-6
    memory: int = 1 << 29

    def __post_init__(self) -> None:
        if not (0 < self.regularisation < math.inf and self.tolerance >= 0 and min(self.iterations, self.memory) >= 1):
            raise InputError(f"regularisation must be > 0, tolerance >= 0, iterations and memory >= 1: {self}")


SOLVER = Sinkhorn()


def transports(
    sources: Sequence[Matrix],
    targets: Sequence[Matrix],
    solver: Sinkhorn = SOLVER,
    *,
    debias: bool = False,
    draws: Floats | None = None,
) -> list[SinkhornResult]:
    """Solves the transport between sources[t] [n, width] and targets[t] [m, width] for every t.

    The cost is the squared Euclidean distance divided by its own maximum. Problems of equal shape are solved together;
    one whose matrices exceed the solver's memory is solved in blocks, recomputing its costs in every iteration. With
    `debias`, half the cost of moving each side onto itself (over the same maximum) is taken off: 0 for equal samples.

    `draws` [k, m]: how often each target sample counts in each of k bootstrap draws. Their costs are solved for,
    starting from the plan of the whole sample; beyond 1,000 samples only to first order, through the dual potentials.

    >>> x = np.array([[0.0], [1.0]])
    >>> [round(result.cost, 3) for result in transports([x, x + 9], [x, x], debias=True)]
    [0.0, 0.81]
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for t, (x, y) in enumerate(zip(sources, targets, strict=True)):
        groups.setdefault((len(x), len(y)), []).append(t)
    results: dict[int, SinkhornResult] = {}
    for (n, m), members in groups.items():
        together = max(1, CACHE // (n * m * 8))
        for start in range(0, len(members), together):
            batch = members[start : start + together]
            pairs = [rescaled(sources[t], targets[t]) for t in batch]
            shares = np.empty((0, m)) if draws is None else draws / draws.sum(axis=1, keepdims=True)
            results.update(zip(batch, _transport_batch(pairs, solver, debias, shares), strict=True))
    return [results[t] for t in range(len(sources))]


def _transport_batch(
    pairs: list[tuple[Floats, Floats]], solver: Sinkhorn, debias: bool, draws: Floats
) -> list[SinkhornResult]:
    n = len(pairs[0][0])
    uniform = np.full((len(draws), n), 1 / n)
    crossed, scales = _solve_pairs(pairs, None, solver, uniform, draws)
    if not debias:
        return crossed
    own, _ = _solve_pairs([(x, x) for x, _ in pairs], scales, solver, uniform[:0], uniform[:0])
    theirs, _ = _solve_pairs([(y, y) for _, y in pairs], scales, solver, draws, draws)
    return [
        SinkhornResult(
            cost=across.cost - 0.5 * source.cost - 0.5 * target.cost,
            converged=across.converged and source.converged and target.converged,
            iterations=max(across.iterations, source.iterations, target.iterations),
            residual=max(across.residual, source.residual, target.residual),
            draws=across.draws - 0.5 * source.cost - 0.5 * target.draws,
        )
        for across, source, target in zip(crossed, own, theirs, strict=True)
    ]


def _solve_pairs(
    pairs: list[tuple[Floats, Floats]],
    scales: list[float] | None,
    solver: Sinkhorn,
    source_draws: Floats,
    target_draws: Floats,
) -> tuple[list[SinkhornResult], list[float]]:
    """Solves problems of one shape with costs divided by `scales`, by default their maxima; also returns the scales."""
    n, m = len(pairs[0][0]), len(pairs[0][1])
    if 2 * n * m * 8 > solver.memory:
        scales = scales or [_maximum(x, y, solver) or 1.0 for x, y in pairs]
        problems = zip(pairs, scales, strict=True)
        return [
            result
            for (x, y), scale in problems
            for result in _solve_blocks(x, y, scale, solver, source_draws, target_draws)
        ], scales
    costs = np.stack([squared_distances(x, y) for x, y in pairs])
    scales = scales or [float(cost.max()) or 1.0 for cost in costs]
    costs /= np.array(scales)[:, None, None]
    return _solve(costs, solver, source_draws, target_draws), scales


def _results(
    costs: Floats, residuals: Floats, iterations: NDArray[np.int64], draws: Floats, solver: Sinkhorn
) -> list[SinkhornResult]:
    """Makes one result per problem; costs come in units of the regularisation."""
    return [
        SinkhornResult(
            cost=float(cost) * solver.regularisation,
            converged=bool(residual <= solver.tolerance),
            iterations=int(done),
            residual=float(residual),
            draws=drawn * solver.regularisation,
        )
        for cost, residual, done, drawn in zip(costs, residuals, iterations, draws, strict=True)
    ]


def _solve(cost: Floats, solver: Sinkhorn, source_draws: Floats, target_draws: Floats) -> list[SinkhornResult]:
    """Solves a batch of costs [B, n, m], which is overwritten; then, from its plans, draws [k, n] and [k, m]."""
    batch, n, m = cost.shape
    cost /= solver.regularisation
    log_a, log_b = -math.log(n), -math.log(m)
    # The first iteration by logsumexp; after it no row or column of the kernel can vanish: a step changes a marginal by
    # a factor of at most n or m, since the plan's total mass is 1.
    kernel = -cost
    f = log_a - _logsumexp(kernel, axis=2)
    np.subtract(f[:, :, None], cost, out=kernel)
    g = log_b - _logsumexp(kernel, axis=1)
    _gibbs(f, g, cost, kernel)
    u, v = np.ones((batch, n, 1)), np.ones((batch, m, 1))
    done = np.ones(batch, dtype=np.int64)
    rows = kernel @ v
    residual = np.abs(u * rows - 1 / n).sum(axis=(1, 2))
    for _ in range(solver.iterations - 1):
        active = residual > solver.tolerance
        if not active.any():
            break
        # Problems that have converged stand still, so that no result depends on which others share its batch.
        moving = active[:, None, None]
        u = np.where(moving, 1 / (n * rows), u)
        v = np.where(moving, 1 / (m * (kernel.transpose(0, 2, 1) @ u)), v)
        done += active
        if max(u.max(), v.max(), 1 / u.min(), 1 / v.min()) > DRIFT:
            f, g = f + np.log(u)[:, :, 0], g + np.log(v)[:, :, 0]
            _gibbs(f, g, cost, kernel)
            u, v = np.ones_like(u), np.ones_like(v)
        rows = kernel @ v
        residual = np.abs(u * rows - 1 / n).sum(axis=(1, 2))
    f, g = f + np.log(u)[:, :, 0], g + np.log(v)[:, :, 0]
    kernel *= u
    kernel *= v.transpose(0, 2, 1)
    cost *= kernel
    total = cost.sum(axis=(1, 2))
    if max(n, m) <= SOLVED_DRAWS:
        drawn = np.stack(
            [_redraw(plan, work, source_draws, target_draws, solver) for plan, work in zip(kernel, cost, strict=True)]
        )
    else:
        drawn = np.stack([_tangent(*part, source_draws, target_draws) for part in zip(total, f, g, strict=True)])
    return _results(total, residual, done, drawn, solver)


def _gibbs(f: Floats, g: Floats, cost: Floats, out: Floats) -> None:
    """Computes out = exp(f + g - cost) in place, because the matrices are the largest arrays."""
    np.add(f[:, :, None], g[:, None, :], out=out)
    out -= cost
    np.exp(out, out=out)


def _redraw(plan: Floats, work: Floats, a: Floats, b: Floats, solver: Sinkhorn) -> Floats:
    """Returns costs [k] for marginals a [k, n], b [k, m], from a plan [n, m] and its products with the cost."""
    u, v = np.ones_like(a), np.ones_like(b)
    for _ in range(min(solver.iterations, REDRAWS) if len(a) else 0):
        # A draw may leave out all that a row or column of the plan holds; then its scaling does not matter.
        v = b / np.maximum(u @ plan, TINY)
        rows = v @ plan.T
        if np.abs(u * rows - a).sum(axis=1).max() <= max(solver.tolerance, REDRAWN):
            break
        u = a / np.maximum(rows, TINY)
    costs: Floats = np.einsum("kn,kn->k", u, v @ work.T)
    return costs


def _tangent(total: float, f: Floats, g: Floats, a: Floats, b: Floats) -> Floats:
    """Returns costs [k] for marginals a [k, n], b [k, m] to first order: the potentials are the value's derivatives."""
    costs: Floats = total + a @ (f - f.mean()) + b @ (g - g.mean())
    return costs


def _solve_blocks(
    x: Floats, y: Floats, scale: float, solver: Sinkhorn, source_draws: Floats, target_draws: Floats
) -> list[SinkhornResult]:
    """Runs the same iterations by logsumexp, over blocks of target samples whose costs are recomputed when needed."""
    n, m = len(x), len(y)
    rows = _block_rows(n, solver)
    log_a, log_b = -math.log(n), -math.log(m)

    def costs() -> Iterator[tuple[slice, Floats]]:
        for start in range(0, m, rows):
            part = slice(start, start + rows)
            cost = squared_distances(x, y[part])
            cost /= scale * solver.regularisation
            yield part, cost

    f = log_a - _logsumexp(np.stack([_logsumexp(-cost, axis=1) for _, cost in costs()]), axis=0)
    g = np.zeros(m)
    for done in range(1, solver.iterations + 1):
        sums = []
        for part, cost in costs():
            g[part] = log_b - _logsumexp(f[:, None] - cost, axis=0)
            sums.append(_logsumexp(g[None, part] - cost, axis=1))
        marginal = _logsumexp(np.stack(sums), axis=0)
        residual = np.abs(np.exp(f + marginal) - 1 / n).sum()
        if done == solver.iterations or residual <= solver.tolerance:
            break
        f = log_a - marginal
    total = sum(float((np.exp(f[:, None] + g[None, part] - cost) * cost).sum()) for part, cost in costs())
    drawn = _tangent(total, f, g, source_draws, target_draws)
    return _results(np.array([total]), np.array([residual]), np.array([done]), drawn[None], solver)


def _logsumexp(values: Floats, axis: int) -> Floats:
    """Returns log(sum(exp(values))) over `axis`; `values` is overwritten."""
    largest = values.max(axis=axis, keepdims=True)
    values -= largest
    total: Floats = np.log(np.exp(values, out=values).sum(axis=axis)) + largest.squeeze(axis)
    return total


def _block_rows(n: int, solver: Sinkhorn) -> int:
    """Returns how many target samples a block may hold: it needs its costs and two arrays of their size."""
    return max(1, solver.memory // (3 * 8 * n))


def _maximum(x: Floats, y: Floats, solver: Sinkhorn) -> float:
    rows = _block_rows(len(x), solver)
    return max(float(squared_distances(x, y[start : start + rows]).max()) for start in range(0, len(y), rows))
