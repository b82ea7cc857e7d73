"""Seeds for single purposes, derived from one that the user gives."""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, *parts: int | str) -> int:
    """A seed of 63 bits for one purpose.

    >>> derived_seed(0, "epoch", 1) == derived_seed(0, "epoch", 1) != derived_seed(0, "epoch", 2)
    True
    """
    digest = hashlib.sha256(repr((seed, *parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
