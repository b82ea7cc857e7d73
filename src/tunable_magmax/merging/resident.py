"""Models that lie on a GPU: merged in place, with the host always a step ahead of the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tunable_magmax.checkpoints.layout import Layout, Mergeable
from tunable_magmax.merging.device import Block, DeviceMerge, Load
from tunable_magmax.merging.kernels.tables import Destination
from tunable_magmax.merging.methods import Method
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.ownership import Piece, Stretch


class ResidentBlocks:
    """Dicts of tensors on the device, or brought there: one block."""

    borrows = False
    chunk = 1 << 24

    def __init__(self, layout: Layout, sources: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        self._layout = layout

        def near(values: Tensor) -> Tensor:
            there = values.device == device and values.is_contiguous()
            return values if there else values.detach().to(device).contiguous()

        self._values = [
            [near(source[tensor.infos[k].name]) for tensor in layout.mergeable] for k, source in enumerate(sources)
        ]

    def read(self, source: int, tensor: Mergeable, start: int, stop: int, scratch: Tensor) -> Tensor:
        place = next(k for k, other in enumerate(self._layout.mergeable) if other is tensor)
        return scratch.copy_(self._values[source][place].detach().reshape(-1)[start:stop])

    def walk(self, stretches: Sequence[Stretch]) -> Iterator[Block]:
        yield [
            (Piece(stretch, 0, stretch.size), [values[stretch.tensor] for values in self._values])
            for stretch in stretches
            if stretch.size
        ]


class ResidentMerge(DeviceMerge):
    """`DeviceMerge` whose outputs stay on the device."""

    _outs: dict[int, Tensor]
    """Room for merged tensors, in their shapes."""
    _ready: Sequence[tuple[Load, Destination | None, Destination]]
    """All values, with the places of their merged vectors (None: not kept) and of the output."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._let_go()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._let_go()

    def _let_go(self) -> None:
        """What was made belongs to somebody else from now on."""
        self._outs, self._stash, self._ready = {}, {}, ()

    def restart(self, options: Options, method: Method, mark: bool) -> None:
        self._let_go()
        super().restart(options, method, mark)

    def _expect(self, stretches: Sequence[Stretch]) -> None:
        super()._expect(stretches)
        self._make_room(stretches)

    def _make_room(self, stretches: Sequence[Stretch]) -> None:
        """Room for merged tensors, and for their vectors: the same where types are."""
        for k in (stretch.tensor for stretch in stretches if stretch.tensor not in self._outs):
            shape, dtype = self.layout.mergeable[k].shape, self._out_dtype(k)
            self._outs[k] = self._cuda.empty(shape, dtype)
            if self.options.scale is None:
                same = dtype == self._working[k]
                self._stash[k] = self._outs[k] if same else self._cuda.empty(shape, self._working[k])

    def _make_ready(self) -> None:
        self._make_room(self.stretches)
        self._ready = [self._placed(load) for loads in self._walk_loads(self.stretches) for load in loads]

    def _placed(self, load: Load) -> tuple[Load, Destination | None, Destination]:
        tensors = [piece.stretch.tensor for piece in load.pieces]
        outs = Destination([self._outs[k] for k in tensors], self._cuda.device)
        if not self._stash:
            return load, None, outs
        same = all(self._stash[k] is self._outs[k] for k in tensors)
        return load, outs if same else Destination([self._stash[k] for k in tensors], self._cuda.device), outs

    def make_stash(self, stretches: Sequence[Stretch]) -> None:
        """It is there by then."""

    def measure(self, stretches: Sequence[Stretch]) -> None:
        for load, taus, _ in self._ready:
            assert taus is not None
            self._combine_load(load.table, taus, None)
        self._measured.update(stretch.tensor for stretch in stretches)

    def values(self) -> dict[str, Tensor]:
        self._cuda.follow()
        for load, taus, outs in self._ready:
            self._render_load(load, taus, outs)
        mergeable = self.layout.mergeable
        found = {mergeable[stretch.tensor].name: self._outs[stretch.tensor] for stretch in self.stretches}
        self._let_go()
        self.progress("merge", self.elements, self.elements)
        self._check_fit()
        return found
