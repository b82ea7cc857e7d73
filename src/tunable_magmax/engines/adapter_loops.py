"""The loops of `vectors.Loops`, compiled by numba without fast-math or fused operations."""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

from tunable_magmax.merging.kernels.loops import compiled


@compiled()
def accumulate(left, rank, right, column, sums):
    """sums += left @ right, one rank after the other; four in a go, so that sums are loaded and stored less often."""
    width = sums.shape[1]
    last = column + width
    ranks = right.shape[0]
    whole = ranks - ranks % 4
    for i in range(left.shape[0]):
        row = sums[i]
        factor = left[i, rank : rank + ranks]
        for k in range(0, whole, 4):
            f0, f1, f2, f3 = factor[k], factor[k + 1], factor[k + 2], factor[k + 3]
            r0, r1 = right[k, column:last], right[k + 1, column:last]
            r2, r3 = right[k + 2, column:last], right[k + 3, column:last]
            for j in range(width):
                row[j] = (((row[j] + f0 * r0[j]) + f1 * r1[j]) + f2 * r2[j]) + f3 * r3[j]
        for k in range(whole, ranks):
            f0, r0 = factor[k], right[k, column:last]
            for j in range(width):
                row[j] += f0 * r0[j]


@compiled()
def add_scaled(sums, scaling, out, first, stride):
    """out += scaling * sums, rounded to the type of `out` before the addition."""
    for i in range(sums.shape[0]):
        row = out[first + i * stride : first + i * stride + sums.shape[1]]
        for j in range(sums.shape[1]):
            row[j] += out.dtype.type(scaling * sums[i, j])
