"""Work on pieces, one after the other or in threads: while some work on chunks, others read the next ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tunable_magmax.merging.kernels import Chunk
from tunable_magmax.merging.memory import MemoryPlan
from tunable_magmax.merging.ownership import Piece
from tunable_magmax.merging.reading import ChunkReader

Work = Callable[[Piece, Chunk], Any]
Wanted = Callable[[Piece], Collection[int]]
"""Which tasks' values (from 0) a piece needs; the others are not read."""


class Walker:
    """Threads that read chunks, as many as the plan's pool has, of which its `threads` may work at a time."""

    def __init__(self, reader: ChunkReader, plan: MemoryPlan) -> None:
        self._reader, self._ahead = reader, plan.ahead
        self._pool = ThreadPoolExecutor(plan.pool) if plan.pool > 1 else None
        self._turn = threading.Semaphore(plan.threads)

    def close(self) -> None:
        """Let the threads go."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def each(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Apply `work` to items, in the pool if there is one; results in order."""
        if self._pool is None:
            return [work(item) for item in items]

        def in_turn(item: Any) -> Any:
            with self._turn:
                return work(item)

        return list(self._pool.map(in_turn, items))

    def walk(self, work: Work, todo: Sequence[Piece], wanted: Wanted) -> Iterator[tuple[Piece, Any]]:
        """Apply `work` to pieces; yields results in order, a bounded number of pieces ahead of the consumer."""
        ahead: deque[Callable[[], Any]] = deque()
        for k, piece in enumerate(todo):
            while len(ahead) < self._ahead and k + len(ahead) < len(todo):
                begun = todo[k + len(ahead)]
                ahead.append(self.begin(work, begun, wanted(begun)))
            yield piece, ahead.popleft()()

    def begin(self, work: Work, piece: Piece, wanted: Collection[int]) -> Callable[[], Any]:
        """Start to read a piece and to work on it; call the result for what came of it."""

        def read_and_work() -> Any:
            chunk = self._reader.chunk(piece, wanted)
            with self._turn:  # whoever waits here, or for a disk, has let another one work
                return work(piece, chunk)

        return self._pool.submit(read_and_work).result if self._pool is not None else read_and_work
