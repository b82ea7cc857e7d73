"""How results show themselves in Python: short texts."""

from __future__ import annotations

from collections.abc import Sequence


def plural(count: int, one: str, many: str | None = None) -> str:
    """Returns a number of things as text.

    >>> plural(1, "tensor"), plural(1200, "tensor")
    ('1 tensor', '1,200 tensors')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def shown_shares(labels: Sequence[str], shares: Sequence[float], limit: int = 5) -> str:
    """Returns the largest shares with their names, in the order given, and how many more there are.

    >>> shown_shares(["birds", "cars", "planes"], [0.7, 0.05, 0.25], limit=2)
    'birds 70%, planes 25% and 1 more'
    """
    largest = sorted(range(len(shares)), key=lambda k: (-shares[k], k))[:limit]
    more = f" and {len(shares) - limit:,} more" if len(shares) > limit else ""
    return ", ".join(f"{labels[k]} {shares[k]:.0%}" for k in sorted(largest)) + more
