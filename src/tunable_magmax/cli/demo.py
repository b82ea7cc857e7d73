"""`tmx demo`."""

from __future__ import annotations

from pathlib import Path


def demo(out: Path = Path("demo-out")) -> None:
    """The whole story on a small model sequence that it makes itself: on the CPU, offline.

    Parameters
    ----------
    out
        A directory for everything it makes.
    """
    from tunable_magmax.demo import run_demo

    run_demo(out)
