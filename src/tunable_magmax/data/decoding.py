"""Decode inputs in several threads, in order: worth it for large images, whose decoders leave the lock alone."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_THREADS = 16
# Encoded bytes of an image from which on threads win. Of smaller ones Python's own work is the larger part, and
# threads that wait for each other's lock are slower than one (measured: 1.5 times for 32 px images).
WORTH_BYTES = 8 << 10
AHEAD = 4  # images in work or ready for each thread


def threads_for(encoded_bytes: float) -> int:
    """How many threads to decode images with that are so many bytes each."""
    if encoded_bytes < WORTH_BYTES:
        return 1
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    return min(cores, MOST_THREADS)


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int, ahead: int | None = None
) -> Iterator[Result]:
    """`work` of each item, in order, at most `ahead` items (default: a few for each thread) before the reader.

    >>> list(in_order(lambda x: x * x, range(5), 2))
    [0, 1, 4, 9, 16]
    """
    if threads < 2:
        yield from map(work, items)
        return
    source, most = iter(items), threads * AHEAD if ahead is None else ahead
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[Result]] = deque(pool.submit(work, item) for item in islice(source, most))
        try:
            while waiting:
                yield waiting.popleft().result()
                waiting.extend(pool.submit(work, item) for item in islice(source, 1))
        finally:
            for future in waiting:  # the reader stopped early
                future.cancel()
