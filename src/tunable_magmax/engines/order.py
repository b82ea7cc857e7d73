"""Notices tasks that are hardly in training order, from a small sample of the values."""

from __future__ import annotations

import torch

from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.vectors import FileVectors
from tunable_magmax.errors import StorageError
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.reading import working_dtype

TENSORS, ELEMENTS = 64, 4096
"""How many tensors are looked at, and how many elements of each."""
NEARER = 0.5
"""Training moves away from the base; a task at less than this share of an earlier one's distance is suspicious."""


def doubtful_order(inputs: Inputs, options: Options) -> str | None:
    """Returns a note if a task is far nearer to the base than an earlier one, and the result depends on the order.

    It reads a megabyte or two of each checkpoint at most. Nothing is said of adapters, which are often trained apart.
    """
    if inputs.adapters or not (options.scale is None or options.method == "last_task"):
        return None
    try:
        lengths = _sampled_lengths(inputs)
    except StorageError:
        return None  # the merge will meet it, and say what to do
    pairs = [
        (later / earlier, t, s)
        for t, later in enumerate(lengths)
        for s, earlier in enumerate(lengths[:t])
        if later and earlier
    ]
    share, t, s = min(pairs, default=(1.0, 0, 0))
    if share >= NEARER:
        return None
    return (
        f"{inputs.labels[t + 1]} is far nearer to the base than {inputs.labels[s + 1]} ({share:.2f} of its distance, "
        "by a sample): are the tasks in the order of training?"
    )


def _sampled_lengths(inputs: Inputs) -> list[float]:
    """Returns the length of each task vector over the sample."""
    tensors = [tensor for tensor in inputs.layout.mergeable if tensor.size]
    vectors, squares = FileVectors(inputs.checkpoints), [0.0] * (len(inputs.paths) - 1)
    for tensor in tensors[:: 1 + len(tensors) // TENSORS]:
        start = max(0, (tensor.size - ELEMENTS) // 2)
        stop = min(tensor.size, start + ELEMENTS)
        scratch = torch.empty(stop - start, dtype=working_dtype(tensor))
        base = vectors.read(0, tensor, start, stop, scratch).double().clone()
        for t in range(len(squares)):
            step = vectors.read(t + 1, tensor, start, stop, scratch).double() - base
            squares[t] += float(step.nan_to_num(0.0, 0.0, 0.0).square().sum())
    return [square**0.5 for square in squares]
