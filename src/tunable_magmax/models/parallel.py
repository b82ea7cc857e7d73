"""Forward passes on the processor: a thread for each part of the samples, instead of threads inside each operation.

Threads inside an operation wait for each other after each of them. With a small encoder that is most of the time, and
where other programs use the cores as well, it can be nearly all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

SMALLEST = 32
"""Samples of a part, at least: below, the interpreter is busier than the processor."""
MOST_THREADS = 16
_Result = TypeVar("_Result")


def in_parallel(work: Callable[[range], _Result], samples: int, batch: int, device: torch.device) -> Iterator[_Result]:
    """Yields what `work` returns for consecutive rows, at most `batch` at a time over all threads, in order.

    On another device than the processor, or with few samples, it is called in this thread.
    """
    import torch

    threads = min(torch.get_num_threads(), MOST_THREADS, -(-min(samples, batch) // SMALLEST))
    if device.type != "cpu" or threads < 2:
        yield from map(work, pieces(samples, batch))
        return
    before = torch.get_num_threads()
    with ThreadPoolExecutor(threads, "forward", torch.set_num_threads, (1,)) as pool:
        try:
            yield from pool.map(work, pieces(samples, -(-batch // threads)))
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)  # threads that others begin would have the number that was set last


def pieces(samples: int, size: int) -> Iterator[range]:
    """Yields rows, `size` at a time.

    >>> list(pieces(5, 2))
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return (range(start, min(start + size, samples)) for start in range(0, samples, size))
