"""A warmed-up process that forks a child for every order it gets, so that children can be killed at any moment.

Importing torch costs seconds, a fork milliseconds, so that a thousand kills are affordable. No thread is started before
the fork. Nothing waits for the disk: what a killed process has written is there without it. A module of orders has
`warm_up()`, which loads what the children then have, and `work(order)`, which a child does. Here `forking` starts the
process and gives what asks it; there one JSON object a line goes in, and one answer a line comes out.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

Answer = dict[str, Any]


@contextmanager
def forking(module: str, *flags: str, **how: Any) -> Iterator[Callable[..., Answer]]:
    """A function that has one order done and tells how it went: "killed", "crashed", or what the child answers.

    `flags` are the interpreter's.
    """
    with subprocess.Popen(
        [sys.executable, *flags, __file__, module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **how
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        orders, answers = process.stdin, process.stdout

        def ask(**order: Any) -> Answer:
            orders.write(json.dumps(order, default=str) + "\n")
            orders.flush()
            return json.loads(answers.readline())

        yield ask
        orders.close()


def serve(order: dict[str, Any], work: Callable[[dict[str, Any]], Answer]) -> Answer:
    answers, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.close(answers)
            os.fsync = lambda descriptor: None
            answer = json.dumps(work(order)).encode()
            with open(writing, "wb") as pipe:
                pipe.write(answer)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(answers, "rb") as pipe:
        content = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return {"killed": os.WTERMSIG(status)}
    answer: Answer = json.loads(content) if content else {"crashed": os.waitstatus_to_exitcode(status)}
    return answer


if __name__ == "__main__":
    orders = import_module(sys.argv[1])
    orders.warm_up()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(serve(json.loads(line), orders.work)) + "\n")
        sys.stdout.flush()
