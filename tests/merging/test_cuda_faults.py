"""The emulated device can tell: kernels with a fault planted in them are found out, by bits, counts or meetings."""

from __future__ import annotations

from pathlib import Path

import emulated
import pytest
from device_cases import OPTIONS, coarse, sequence, shrinking
from emulated import EmulatedModule, Library
from emulated.merges import SHAPES, check

from tunable_magmax.errors import TmxError
from tunable_magmax.merging.kernels.cuda import kernel_source

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing())),
]

# What is planted, the text it replaces (the first one found), and the text put there.
FAULTS = {
    "ties go to the earlier task, survey": ("size >= most[j]", "size > most[j]"),
    "ties go to the earlier task, magmax": (">= magnitude(best[j])", "> magnitude(best[j])"),
    "the largest lottery numbers win": ("keys[j] < keys[i]", "keys[j] > keys[i]"),
    "a tile ends one element early": ("< size ? start + TILE", "< size ? start + TILE - 1"),
    "tiles overlap by a word": ("[segment] + start;", "[segment] + start - (start ? 32 : 0);"),
    "one slot too many is free": ("32 : int(left)", "32 : int(left) + 1"),
    "the lottery counts elements from 0": ("(element + 1)", "element"),
    "all equal magnitudes win": ("code > threshold", "code >= threshold"),
    "the decisive bin wins as a whole": ("bin < decisive", "bin <= decisive"),
    "sums leave out half a warp": ("int step = 16; step;", "int step = 8; step;"),
    "bfloat16 rounds halves up": ("0x7fffu + ((word >> 16) & 1u)", "0x8000u"),
    "the step is not rounded": ("origin + moved", "R(double(origin) + double(scale) * double(tau))"),
    "weighted sums in the working type": ("double sum = 0;", "R sum = 0;"),
    "the last word of a stretch is not written": ("if (j * 32 < rest)", "if (j * 32 + 128 <= rest)"),
    "the last owner is forgotten": ("if (k0 + lane < owners)", "if (k0 + lane + 1 < owners)"),
    "the first owner takes all": ("k0 + __ffs(owning[j]) - 1", "k0"),
    "lottery numbers are stirred once": ("return product(x ^ (x >> 27), MIX_B);", "return x;"),
    "no barrier after clearing": ("noted[k] = 0;\n    __syncthreads();", "noted[k] = 0;"),
    "no barrier before counting kept numbers": ("kept = 0;\n    __syncthreads();", "kept = 0;"),
    "no barrier between reading and adding": ("- step] : 0;\n        __syncthreads();", "- step] : 0;"),
    "a barrier for some": ("__syncthreads();\n    V total", "if (threadIdx.x < 32) __syncthreads();\n    V total"),
    "a merged vector of marks that are not wanted": ("if (*target.state) return;", ""),
    "leftovers do not hold up what follows": ("if (left && !at_once)", "if (false)"),
    "one group's draw is everybody's": ("sequel.join && draw.groups == 1 &&", "sequel.join &&"),
    "a vote of some": ("note_owner(noted, owner, inside);", "if (inside) note_owner(noted, owner, inside);"),
}  # fmt: skip


def compare(library: Library) -> None:
    for backwards in (False, True):
        module = EmulatedModule(library, backwards=backwards)
        check(sequence(SHAPES, 4), module, OPTIONS)
        check(coarse(3), module, OPTIONS[:-1])
        check(shrinking(7, 3000), module, [{}])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_out(fault: str, tmp_path: Path) -> None:
    before, after = FAULTS[fault]
    source = kernel_source()
    assert before in source, "the kernels have changed: plant this fault anew"
    library = emulated.compiled(source.replace(before, after, 1), tmp_path)
    with pytest.raises((AssertionError, TmxError, RuntimeError)):
        compare(library)
