"""Samples of one data set, decoded when they are first asked for and kept while they fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.models.prepared import Prepared, prepare

KEEP_BYTES = 4 << 30


class Decoded:
    """The samples at `positions` (all if None) of a data set, for encoders of one architecture.

    If they take up to `keep` bytes, all are decoded at once and kept; otherwise those that are asked for, each time.
    """

    def __init__(
        self,
        encoder: Encoder,
        samples: Samples,
        positions: Sequence[int] | None = None,
        *,
        strict: bool = False,
        keep: int = KEEP_BYTES,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._encoder, self._samples, self._strict, self._progress = encoder, samples, strict, progress
        self._positions = sorted(set(range(len(samples)) if positions is None else positions))
        self._keep = keep
        self._whole: Prepared | None = None
        self._rows: dict[int, int] = {}

    def take(self, positions: Sequence[int]) -> Prepared:
        """The readable ones among some samples, in ascending order."""
        if self._whole is None and self._fits():
            self._whole = self._prepare(self._positions)
            self._rows = {position: row for row, position in enumerate(self._whole.positions)}
        if self._whole is None:
            return self._prepare(sorted(positions))
        rows = [self._rows[k] for k in sorted(positions) if k in self._rows]
        if not rows:
            raise InputError(f"{self._samples.origin}: none of the {len(positions)} samples asked for can be read")
        return self._whole.subset(rows)

    def _prepare(self, positions: Sequence[int]) -> Prepared:
        return prepare(self._encoder, self._samples, positions, strict=self._strict, progress=self._progress)

    def _fits(self) -> bool:
        if self._samples.kind == "text":
            return True
        processor = self._encoder.image_processor
        size = getattr(processor, "crop_size", None) or getattr(processor, "size", None) or {}
        side = [size.get(name) for name in ("height", "width")]
        height, width = (value or size.get("shortest_edge") or 224 for value in side)
        return 3 * height * width * len(self._positions) <= self._keep
