"""MAGMAX as tasks arrive: a merged vector so far plus one new task, in memory that does not grow with their number."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tunable_magmax.errors import InputError
from tunable_magmax.merging.layout import build_layout
from tunable_magmax.merging.methods import read_options
from tunable_magmax.merging.report import matched_scale
from tunable_magmax.merging.state_dicts import StateDict, signature_of
from tunable_magmax.merging.walker import does_not_fit, working_dtype


class RunningMagmax:
    """The MAGMAX merge of all tasks added so far; holds the base and one vector, whatever the number of tasks.

    For checkpoints of one type the result equals `merge_state_dicts(base, tasks, method="magmax")` to the bit. `vector`
    and `last_length` are all the state there is: save them, and go on later with them.

    >>> import torch
    >>> running = RunningMagmax({"w": torch.zeros(3)})
    >>> running.add({"w": torch.tensor([1.0, -5.0, 0.0])})
    >>> running.add({"w": torch.tensor([2.0, 3.0, 0.0])})
    >>> running.merged(scale=1)["w"]
    tensor([ 2., -5.,  0.])
    """

    def __init__(
        self, base: StateDict, vector: Mapping[str, Tensor] | None = None, last_length: float | None = None
    ) -> None:
        self._base = base
        self._signature = signature_of(base, "base")
        self.vector: dict[str, Tensor] = dict(vector or {})
        self.last_length = last_length
        """The length of the last task vector added; None before the first."""

    @torch.no_grad()
    def add(self, task: StateDict) -> None:
        """Merges one more task, the next in training order."""
        labels = ["base", "the new task"]
        layout = build_layout([self._signature, signature_of(task, labels[1])], labels)
        untied = [alias for alias in self._signature.aliases if alias not in layout.ties]
        if untied:
            raise InputError(
                f"the base ties {untied[0]!r} to {self._signature.aliases[untied[0]]!r}, but the new task holds both: "
                "a running merge can't, merge_state_dicts can"
            )
        fresh: dict[str, Tensor] = {}
        for tensor in layout.mergeable:
            before, after = (source[info.name] for source, info in zip((self._base, task), tensor.infos, strict=True))
            working = working_dtype(tensor)
            difference = after.to(working) - before.to(working)
            if not bool(difference.isfinite().all()):
                if bool(((after == before) | (after.isnan() & before.isnan())).all()):
                    continue
                raise InputError(f"{tensor.name!r}: the new task or the base holds NaN or infinity: it can't be merged")
            fresh[tensor.name] = difference
        self.last_length = math.sqrt(math.fsum(float(v.double().square().sum()) for v in fresh.values()))
        for name, difference in fresh.items():
            so_far = self.vector.get(name)
            if so_far is None:
                self.vector[name] = difference
            else:
                self.vector[name] = torch.where(difference.abs() >= so_far.abs(), difference, so_far)

    @torch.no_grad()
    def merged(self, scale: float | str = "matched") -> dict[str, Tensor]:
        """Returns the merged state dict in the base's types; tensors that no task changed are as in the base."""
        if self.last_length is None:
            raise InputError("no task was added yet")
        factor = read_options(1, method="magmax", scale=scale).scale
        if factor is None:
            merged_square = math.fsum(float(v.double().square().sum()) for v in self.vector.values())
            factor = matched_scale(self.last_length**2, merged_square)
        result: dict[str, Tensor] = {}
        for name, tensor in self._base.items():
            vector = self.vector.get(name)
            if name in self._signature.aliases:
                result[name] = result[self._signature.aliases[name]]
            elif vector is None or not bool(vector.any()):
                result[name] = tensor.clone()
            else:
                step = vector * torch.tensor(factor, dtype=vector.dtype, device=vector.device)
                result[name] = (tensor.to(vector.dtype) + step).to(tensor.dtype)
                if not bool(result[name].isfinite().all()):
                    raise does_not_fit(name, "merged", tensor.dtype)
        return result
