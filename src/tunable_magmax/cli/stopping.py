"""How the program stops: by Ctrl-C, by a signal of the system, and for lack of memory."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedError(KeyboardInterrupt):
    """A signal asked the program to stop; `number` is that signal's. Work stops as for Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP stop the work as Ctrl-C does, and a second signal end the process without a word.

    Signals that are ignored, as by nohup, stay so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only there may handlers be set
        return
    owner = os.getpid()
    seen: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked process is ended by others, and has nothing to say
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if seen:
            os._exit(128 + number)
        seen.append(number)
        raise StoppedError(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number, handler in before.items():
            if handler in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, stop)
        yield
    finally:
        if not seen:  # else the next one shall end the process, also while Python itself is ending
            for number, handler in before.items():
                signal.signal(number, handler)


def stop_message(error: KeyboardInterrupt) -> tuple[str, int]:
    """Returns what to say of a stop, and the exit code that shells know it by: 128 and the number of the signal."""
    number = getattr(error, "number", int(signal.SIGINT))
    cause = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    return str(error) or f"{cause}; finished work is kept, run the same command again to go on", 128 + number


_REFUSED = ("can't allocate memory", "Cannot allocate memory", "can't start new thread", "failed to map segment")
_WANTED = re.compile(r"(?:[Uu]nable to|tried to) allocate ([\d.]+ \w+)")


def memory_message(error: Exception) -> str | None:
    """Returns what to say where the system refused memory; None of any other error.

    >>> memory_message(RuntimeError("can't allocate memory: you tried to allocate 4000 bytes. Error code 12"))
    'the system refused memory (4000 bytes more were wanted): ...'
    >>> memory_message(RuntimeError("no such layer"))
    """
    text, cause = str(error), error.__cause__ or error.__context__
    refused = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not refused and not any(words in text for words in _REFUSED):
        return memory_message(cause) if isinstance(cause, Exception) else None
    wanted = _WANTED.search(text)
    more = f" ({wanted[1]} more were wanted)" if wanted else ""
    return (
        f"the system refused memory{more}: end other programs or raise the limit (ulimit -v); for commands that merge, "
        "give less than there is as --memory, such as --memory 1GiB"
    )
