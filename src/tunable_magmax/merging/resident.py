"""Models that lie on a GPU: merged in place, with the host ahead of the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.checkpoints.layout import Layout, Mergeable
from tunable_magmax.merging.device import Block, DeviceMerge, Load
from tunable_magmax.merging.kernels.cuda import Letter
from tunable_magmax.merging.kernels.tables import Address, Destination
from tunable_magmax.merging.methods import Method, TunableMagmax
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.ownership import Piece, Stretch
from tunable_magmax.merging.survey import Survey


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
    """`DeviceMerge` whose outputs stay on the device.

    All work is ordered in advance, as far as the merged vectors. Should the device find that something is not as
    expected, it leaves alone what was ordered after, and the host orders that again.
    """

    _outs: dict[int, Tensor]
    """Room for merged tensors, in their shapes."""
    _ready: Sequence[tuple[Load, Destination | None, Destination]]
    """All values, with the places of their merged vectors (None: not kept) and of the output."""
    _foreseen: Sequence[Stretch] | None
    """What the order in force is for."""
    _letter: Letter
    """Tells of the merged vectors' length, and of values that do not fit."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._let_go()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._let_go()

    def _let_go(self) -> None:
        """What was made belongs to somebody else from now on."""
        self._outs, self._stash, self._ready, self._foreseen = {}, {}, (), None

    def restart(self, options: Options, method: Method, mark: bool) -> None:
        self._let_go()
        super().restart(options, method, mark)

    def _foresee(self, flags: Address) -> None:
        """Most often everything is merged."""
        method, budget = self.method, self.options.budget
        if not isinstance(method, TunableMagmax) or method.reusable or method.cuts_by_magnitude:
            return
        stretches = tuple(stretch for stretch in self._everything if stretch.size)
        if stretches and (budget is None or sum(budget) == self.layout.elements):
            self._order(stretches, flags)

    def _settle_suspects(self, everything: Sequence[Stretch], suspect: NDArray[np.bool_], found: Survey) -> None:
        if suspect.any():
            self._foreseen = None
        super()._settle_suspects(everything, suspect, found)

    def choose(self) -> None:
        self._cuda.follow()
        if self._foreseen != self.stretches:
            self._order(self.stretches)
        if self._auction is not None and not self._auction.close():
            self._combine_all()

    def _order(self, stretches: Sequence[Stretch], flags: Address = 0) -> None:
        super()._order(stretches, flags)
        self._foreseen = stretches
        self._make_room(stretches)
        self._ready = [self._placed(load) for load in self._all_loads(stretches)]
        self._combine_all()

    def _combine_all(self) -> None:
        for load, taus, outs in self._ready:
            self._combine_load(load.table, taus or outs, self.options.scale)
        self._letter = Letter(self._noted)

    def _make_room(self, stretches: Sequence[Stretch]) -> None:
        """Room for merged tensors, and for their vectors if these are measured first: the same where types are."""
        for k in (stretch.tensor for stretch in stretches if stretch.tensor not in self._outs):
            shape, dtype = self.layout.mergeable[k].shape, self._out_dtype(k)
            self._outs[k] = self._cuda.empty(shape, dtype)
            if self.options.scale is None:
                same = dtype == self._working[k]
                self._stash[k] = self._outs[k] if same else self._cuda.empty(shape, self._working[k])

    def _placed(self, load: Load) -> tuple[Load, Destination | None, Destination]:
        tensors = [piece.stretch.tensor for piece in load.pieces]
        outs = Destination([self._outs[k] for k in tensors], self._cuda.device)
        if not self._stash:
            return load, None, outs
        same = all(self._stash[k] is self._outs[k] for k in tensors)
        return load, outs if same else Destination([self._stash[k] for k in tensors], self._cuda.device), outs

    @property
    def merged_square(self) -> float:
        return float(self._letter.read()[:1].view(np.float64)[0])

    def make_stash(self, stretches: Sequence[Stretch]) -> None:
        """It is there by then."""

    def measure(self, stretches: Sequence[Stretch]) -> None:
        """Done by then."""
        self._measured.update(stretch.tensor for stretch in stretches)

    def values(self) -> dict[str, Tensor]:
        self._cuda.follow()
        letter = self._letter
        for load, taus, outs in self._ready:
            if taus is not None:  # otherwise the output is there
                self._render_load(load, taus, outs)
                letter = Letter(self._noted)
        mergeable = self.layout.mergeable
        found = {mergeable[stretch.tensor].name: self._outs[stretch.tensor] for stretch in self.stretches}
        self._let_go()
        self.progress("merge", self.elements, self.elements)
        self._check_fit(letter)
        return found
