"""New weights for a loaded encoder, in place: for many checkpoints of one architecture, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunable_magmax.errors import InputError
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.models.instantiate import from_state

if TYPE_CHECKING:
    from torch import Tensor

# Beyond every value that transformers itself puts into a tensor when it makes a model: 0, 1, and small random numbers.
MARK = 1000


class Refill:
    """Puts tensors in the names of a checkpoint into an encoder's module, which may call them otherwise.

    Old checkpoints and those with a head have other names than the module; transformers knows all the rules. So it is
    asked once: it loads a checkpoint whose every tensor is filled with a mark of its own, which tells where each goes.
    """

    def __init__(self, encoder: Encoder, state: Mapping[str, Tensor]) -> None:
        self._places = _places(encoder, state)

    def __call__(self, state: Mapping[str, Tensor]) -> None:
        """Copy the tensors of `state` into the module."""
        import torch

        with torch.no_grad():
            for place, name in self._places:
                place.copy_(state[name])


def _places(encoder: Encoder, state: Mapping[str, Tensor]) -> list[tuple[Tensor, str]]:
    """The module's tensors, each with the name of the checkpoint's tensor that belongs there."""
    import torch

    names = [name for name, tensor in state.items() if tensor.is_floating_point()]
    marks = {name: torch.tensor(float(MARK + k)).expand(state[name].shape) for k, name in enumerate(names)}
    module: Any = encoder.module
    probe, told = from_state(type(module), module.config, marks)
    found = probe.state_dict()
    places: list[tuple[Tensor, str]] = []
    for name, place in module.state_dict().items():
        if not place.is_floating_point() or not place.numel() or name in told["missing_keys"]:
            continue
        low, high = found[name].aminmax()
        if low != high or not MARK <= low < MARK + len(names):
            raise InputError(
                f"{encoder.path}: {name!r} of {type(module).__name__} is not one tensor of the checkpoint as it is, so "
                "weights cannot be replaced in memory; save the checkpoints with this version of transformers first"
            )
        places.append((place, names[int(low) - MARK]))
    return places
