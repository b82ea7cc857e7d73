"""Models that lie on a GPU: merged in place, with the host ahead of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.merging.device import DeviceChunk, DeviceMerge
from tunable_magmax.merging.device_auction import Auction
from tunable_magmax.merging.kernels import TensorPlace, TensorRange
from tunable_magmax.merging.kernels.cuda import HostCopy
from tunable_magmax.merging.kernels.launch import Address, Destination, Table
from tunable_magmax.merging.layout import Layout, Mergeable
from tunable_magmax.merging.methods import Method
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.report import Survey, matched_scale


class ResidentChunks:
    """Dicts of tensors on the device, or brought there: one chunk."""

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

    def walk(self, places: Sequence[TensorPlace]) -> Iterator[DeviceChunk]:
        yield [
            (TensorRange(place, 0, place.size), [values[place.tensor] for values in self._values])
            for place in places
            if place.size
        ]


class ResidentMerge(DeviceMerge):
    """`DeviceMerge` whose outputs stay on the device.

    All work is ordered in advance, as far as the merged vectors. Should the device find that something is not as
    expected, it leaves alone what was ordered after, and the host orders that again.
    """

    _copy: HostCopy
    """Tells of the merged vectors' length, and of values that do not fit."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._foreseen: tuple[Sequence[TensorPlace], Auction] | None = None
        # Room for merged tensors and, where these are measured first, for their vectors, in their shapes.
        self._outs: dict[int, Tensor] = {}
        self._taus_of: dict[int, Tensor] = {}
        # All values, with the places of their vectors (None: not measured first) and of the output.
        self._ready: list[tuple[Table, Destination | None, Destination]] = []

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._forget()

    def _forget(self) -> None:
        """Forgets what was ordered, and the room for it."""
        self._foreseen, self._outs, self._taus_of, self._ready = None, {}, {}, []

    def restart(self, options: Options, method: Method, mark: bool) -> None:
        self._forget()
        super().restart(options, method, mark)

    def _foresee(self, flags: Address) -> None:
        """Orders the auction and the merged vectors as if every tensor were merged, which is most often so."""
        budget = self.options.budget
        if not self.method.foreseeable:
            return
        places = tuple(place for place in self._everything if place.size)
        if not places or (budget is not None and sum(budget) != self.layout.elements):
            return

        def guard(state: Address) -> None:
            for table in self._all_tables(places):
                self._cuda.unexpected(table, flags, state)

        try:
            auction = self._order(places, guard)
        except torch.OutOfMemoryError:  # which may not be needed: less may be merged
            self._forget()
            self._marked(self._everything)  # the auction may have written over the marks
        else:
            assert auction is not None
            self._foreseen = places, auction

    def _settle_suspects(self, everything: Sequence[TensorPlace], suspect: NDArray[np.bool_], found: Survey) -> None:
        if suspect.any():  # the device called everything off
            self._foreseen = None
        super()._settle_suspects(everything, suspect, found)

    def choose(self) -> None:
        self._cuda.follow()
        if self._foreseen is not None and self._foreseen[0] == self.places:
            auction: Auction | None = self._foreseen[1]
        else:
            merged = {place.tensor for place in self.places}
            self._outs = {k: out for k, out in self._outs.items() if k in merged}
            self._taus_of = {k: tau for k, tau in self._taus_of.items() if k in merged}
            auction = self._order(self.places)
        self._foreseen = None
        if auction is not None and not auction.close(self._mark):
            self._plan = auction.plan
            self._combine_all()

    def _order(self, places: Sequence[TensorPlace], guard: Callable[[Address], object] | None = None) -> Auction | None:
        auction = super()._order(places, guard)
        self._make_room(places)
        self._ready = [self._placed(table) for table in self._all_tables(places)]
        self._combine_all()
        return auction

    def _combine_all(self) -> None:
        for table, taus, outs in self._ready:
            self._combine_table(table, taus or outs, self.options.scale)
        self._copy = HostCopy(self._noted)

    def _make_room(self, places: Sequence[TensorPlace]) -> None:
        """Makes room for vectors and output, which share it where their types are the same."""
        for k in (place.tensor for place in places if place.tensor not in self._outs):
            shape, dtype = self.layout.mergeable[k].shape, self.torch_out_dtype(self.layout.mergeable[k])
            self._outs[k] = self._cuda.empty(shape, dtype)
            if self.options.scale is None:
                same = dtype == self._working[k]
                self._taus_of[k] = self._outs[k] if same else self._cuda.empty(shape, self._working[k])

    def _placed(self, table: Table) -> tuple[Table, Destination | None, Destination]:
        tensors = [bounds.place.tensor for bounds in table.ranges]
        outs = Destination([self._outs[k] for k in tensors], self._cuda.device)
        if self.options.scale is not None:
            return table, None, outs
        same = all(self._taus_of[k] is self._outs[k] for k in tensors)
        return table, outs if same else Destination([self._taus_of[k] for k in tensors], self._cuda.device), outs

    def decide(self) -> None:
        """Decides, but leaves the scale for `values`: the device may still be measuring."""
        self.choose()
        self._measured.update(place.tensor for place in self.places)

    @property
    def merged_square(self) -> float:
        return float(self._copy.read()[:1].view(np.float64)[0])

    def values(self) -> dict[str, Tensor]:
        self._cuda.follow()
        last = self._copy
        if self.options.scale is not None:  # the output is there
            self.scale = self.options.scale
        else:
            self.scale = matched_scale(self.last_square, self.merged_square)
            for table, taus, outs in self._ready:
                self._render_table(table, taus, outs)
            last = HostCopy(self._noted)
        mergeable = self.layout.mergeable
        found = {mergeable[place.tensor].name: self._outs[place.tensor] for place in self.places}
        self._forget()
        self.progress("merge", self.elements, self.elements)
        self._check_fit(last)
        return found
