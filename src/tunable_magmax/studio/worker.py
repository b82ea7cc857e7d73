"""The work behind the page: one thread that measures, where the latest request wins, and the events that it sends.

Longer work goes on in steps between measurements, so that a drag never waits for more than one of them.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeAlias

from tunable_magmax.errors import TmxError
from tunable_magmax.studio.guard import error_body

KEEP_ALIVE = 15.0
PATIENCE = 1.0
"""Seconds after which a measurement is given up for a newer request. Shorter ones are finished: a drag shows them."""


class Stopped(TmxError):
    """Work that was called off: a newer request came, somebody cancelled it, or the studio closes."""


Event: TypeAlias = tuple[str, Any] | None
"""A name and what it tells; None ends the stream."""


class Events:
    """Sends events to all pages that listen. `publish` may be called by any thread."""

    def __init__(self) -> None:
        self._queues: dict[asyncio.Queue[Event], asyncio.AbstractEventLoop] = {}
        self._lock = threading.Lock()
        self._closed = False

    def publish(self, name: str, data: Any) -> None:
        """Sends an event."""
        self._send((name, data))

    def close(self) -> None:
        """Ends all streams."""
        self._closed = True
        self._send(None)

    def _send(self, event: Event) -> None:
        with self._lock:
            listeners = list(self._queues.items())
        for queue, loop in listeners:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, event)

    async def listen(self) -> AsyncIterator[bytes]:
        """Yields the events for one page, as server-sent events, until the studio closes."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
        with self._lock:
            self._queues[queue] = asyncio.get_running_loop()
        try:
            yield b": tmx studio\n\n"
            while not self._closed:
                try:
                    event = await asyncio.wait_for(queue.get(), KEEP_ALIVE)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if event is None:
                    return
                yield f"event: {event[0]}\ndata: {json.dumps(event[1], ensure_ascii=False)}\n\n".encode()
        finally:
            with self._lock:
                self._queues.pop(queue, None)


class Worker:
    """One thread for everything that uses the models: requests first, the latest only; then steps of longer work."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._changed = threading.Condition()
        self._next: tuple[int, Callable[[], dict[str, Any]]] | None = None
        self._last = 0
        self._began = math.inf
        """When the measurement that goes on began; infinite if none does."""
        self._steps: deque[tuple[dict[str, Any], Iterator[None]]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="studio", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Calls all work off, and waits until the thread has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=20)

    def check(self, phase: str) -> None:
        """Raises `Stopped` if the studio closes, or a newer request waits for a measurement that embeds for long."""
        if self._stopping:
            raise Stopped("the studio closes")
        is_late = time.monotonic() - self._began > PATIENCE and threading.current_thread() is self._thread
        if is_late and phase == "embedding" and self._next is not None:
            raise Stopped("a newer request came")

    def request(self, work: Callable[[], dict[str, Any]]) -> int:
        """Takes a request, instead of one that waits; returns its number. The event `measured` has its result."""
        with self._changed:
            self._last += 1
            number = self._last
            before, self._next = self._next, (number, work)
            self._changed.notify_all()
        if before is not None:
            self._events.publish("superseded", {"request": before[0]})
        return number

    def later(self, about: dict[str, Any], steps: Iterator[None]) -> None:
        """Takes longer work, a step at a time. `about`: what an event `failed` says beside the error."""
        with self._changed:
            self._steps.append((about, steps))
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._next or self._steps):
                    self._changed.wait()
                if self._stopping:
                    return
                request, self._next = self._next, None
            if request is not None:
                self._serve(*request)
            elif self._step(*self._steps[0]):
                self._steps.popleft()

    def _serve(self, number: int, work: Callable[[], dict[str, Any]]) -> None:
        self._began = time.monotonic()
        try:
            self._events.publish("measured", {**work(), "request": number})
        except Stopped:
            self._events.publish("superseded", {"request": number})
        except Exception as error:
            self._events.publish("failed", {"request": number, **error_body(error)})
        self._began = math.inf

    def _step(self, about: dict[str, Any], steps: Iterator[None]) -> bool:
        """Does a step of longer work; returns whether that was the last."""
        try:
            next(steps)
        except (StopIteration, Stopped):
            return True
        except Exception as error:
            self._events.publish("failed", {**about, **error_body(error)})
            return True
        return False
