"""The oracle: a second, deliberately naive reading of docs/method.md.

Loops, sets, fractions and `sorted()`. It shares no code with the package, knows nothing of speed, and takes its inputs
to be valid: what the package must refuse is tested by hand elsewhere. Tasks count from 1, as in the text; a "tau" maps
the element index p to a NumPy scalar of the tensor's working type, so that every operation rounds as the text says.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

ORACLE_METHODS = ("average", "last_task", "magmax", "random_mix", "task_arithmetic", "ties", "tunable_magmax")
MERGEABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TWO_64 = 2**64
G = 0x9E3779B97F4A7C15


class Unrepresentable(ValueError):
    """A finite value that the output type cannot hold."""


@dataclass(frozen=True)
class NaiveResult:
    state_dict: dict[str, Tensor]
    elements: int
    budget: list[int] | None
    counts: list[int] | None
    leftovers: int
    scale: float
    owners: dict[int, int] | None
    """Element index p -> task (from 1), where every element has an owner."""
    ratio: float | None = None
    """What `matched` was before it was rounded to 6 digits; None for a number, and where tau_merged is 0."""


def naive_merge(
    base: Mapping[str, Tensor],
    tasks: Sequence[Mapping[str, Tensor]],
    *,
    method: str = "tunable_magmax",
    weights: Sequence[object] | None = None,
    budget: Sequence[int] | None = None,
    scale: float | str = "matched",
    scope: str = "model",
    compare: str = "all",
    density: object = 0.2,
    normalize: object = "count",
    seed: int = 0,
    out_dtype: torch.dtype | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> NaiveResult:
    """The merge of docs/method.md."""
    layout = Layout(base, tasks, include, exclude)
    T, d = len(tasks), len(layout.elements)
    tau = {t: layout.task_vector(t) for t in range(1, T + 1)}

    owners = counts = used_budget = None
    leftovers = 0
    if method == "tunable_magmax":
        owners, used_budget, leftovers = {}, [0] * T, 0
        scopes = [layout.elements] if scope == "model" else list(layout.elements_of.values())
        for elements in scopes:
            n = list(budget) if budget is not None else naive_budget(weights or [1] * T, len(elements))
            here, unowned = assign(elements, tau, n, compare=compare, seed=seed)
            owners.update(here)
            leftovers += unowned
            used_budget = [a + b for a, b in zip(used_budget, n, strict=True)]
    elif method == "magmax":
        owners = {p: max(tau, key=lambda t: (abs(tau[t][p]), t)) for p in layout.elements}
    elif method == "last_task":
        owners = dict.fromkeys(layout.elements, T)
    elif method == "random_mix":
        owners = {p: random_task(p, normalised(weights or [1] * T), seed) for p in layout.elements}

    if owners is not None:
        counts = [sum(owner == t for owner in owners.values()) for t in tau]
        merged = {p: tau[owners[p]][p] for p in layout.elements}
    elif method == "average":
        merged = weighted_sum(tau, normalised(weights or [1] * T), layout)
    elif method == "task_arithmetic":
        merged = weighted_sum(tau, [decimal(w) for w in weights or [1] * T], layout)
    elif method == "ties":
        densities = [decimal(each) for each in (density if isinstance(density, list) else [density] * T)]
        kept = {}
        for t in tau:
            kept[t] = trimmed(tau[t], t, densities[t - 1], seed, layout, scope)
        merged = ties(tau, [decimal(w) for w in weights or [1] * T], kept, normalize, layout)
    else:
        raise AssertionError(f"{method}: write it here, too, and list it in ORACLE_METHODS")

    ratio = None
    if scale == "matched":
        ratio = norm_ratio(tau[T], merged)
        scale = 1.0 if ratio is None else float(f"{ratio:.6g}")
    state_dict = {name: layout.output(name, merged, scale, out_dtype) for name in base}
    return NaiveResult(state_dict, d, used_budget, counts, leftovers, float(scale), owners, ratio)


# --- section 1: what is merged --------------------------------------------------------------------


class Layout:
    """Which elements are merged, under which index, and how a tensor is computed and written."""

    def __init__(self, base, tasks, include, exclude):
        self.base, self.checkpoints = base, [base, *tasks]
        mergeable = [name for name in sorted(base) if base[name].dtype in MERGEABLE and allowed(name, include, exclude)]
        self.first_name: dict[str, str] = {}
        for name in mergeable:
            twins = [first for first in self.first_name.values() if self.tied(first, name)]
            self.first_name[name] = twins[0] if twins else name
        self.elements_of: dict[str, list[int]] = {}  # merged tensors only
        position = 0
        for name in mergeable:
            if self.first_name[name] != name:
                continue
            size = base[name].numel()
            if any(self.differs(name, task) for task in tasks):
                self.elements_of[name] = list(range(position, position + size))
            position += size
        self.elements = [p for elements in self.elements_of.values() for p in elements]

    def tied(self, first: str, name: str) -> bool:
        def place(x):
            return x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype

        return all(c[name].numel() > 0 and place(c[first]) == place(c[name]) for c in self.checkpoints)

    def differs(self, name: str, task) -> bool:
        def same(x, y):
            return x == y or (math.isnan(x) and math.isnan(y))

        return not all(same(x, y) for x, y in zip(numbers(self.base[name]), numbers(task[name]), strict=True))

    def working_type(self, name: str) -> type[np.floating]:
        return np.float64 if any(c[name].dtype == torch.float64 for c in self.checkpoints) else np.float32

    def widest_type(self, name: str) -> torch.dtype:
        held = {c[name].dtype for c in self.checkpoints}
        for wide in (torch.float64, torch.float32):
            if wide in held:
                return wide
        return held.pop() if len(held) == 1 else torch.float32

    def task_vector(self, t: int) -> dict[int, np.floating]:
        tau = {}
        for name, elements in self.elements_of.items():
            real = self.working_type(name)
            ours, theirs = numbers(self.base[name]), numbers(self.checkpoints[t][name])
            for p, x, y in zip(elements, ours, theirs, strict=True):
                tau[p] = real(y) - real(x)
        return tau

    def rounded(self, values: Mapping[int, float]) -> dict[int, np.floating]:
        return {p: self.working_type(name)(values[p]) for name, elements in self.elements_of.items() for p in elements}

    def output(self, name: str, merged, scale: float, out_dtype) -> Tensor:
        first = self.first_name.get(name)
        if first not in self.elements_of:
            held = self.base[name].detach().clone()
            return held if out_dtype is None or held.dtype not in MERGEABLE else cast(held, out_dtype)
        real = self.working_type(first)
        factor = real(scale)
        out = []
        with np.errstate(over="ignore"):
            for p, x in zip(self.elements_of[first], numbers(self.base[first]), strict=True):
                step = factor * merged[p]
                out.append(real(x) + step)
        if not np.all(np.isfinite(out)):
            raise Unrepresentable(name)
        values = torch.from_numpy(np.array(out, dtype=real)).reshape(self.base[first].shape)
        return cast(values, out_dtype or self.widest_type(first))


def allowed(name: str, include, exclude) -> bool:
    if include is not None and not any(fnmatchcase(name, pattern) for pattern in include):
        return False
    return not any(fnmatchcase(name, pattern) for pattern in exclude or [])


def numbers(tensor: Tensor) -> list[float]:
    """The values in row-major order; a Python float holds each of the four types exactly."""
    return tensor.detach().to(torch.float64).reshape(-1).tolist()


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    result = tensor.to(dtype)
    if bool((torch.isfinite(tensor) & ~torch.isfinite(result)).any()):
        raise Unrepresentable(dtype)
    return result


# --- section 2: weights and budget ----------------------------------------------------------------


def decimal(number: object) -> Fraction:
    """The number that `number` prints as."""
    return Fraction(str(number))


def normalised(weights: Sequence[object]) -> list[Fraction]:
    exact = [decimal(w) for w in weights]
    return [w / sum(exact) for w in exact]


def naive_budget(weights: Sequence[object], elements: int) -> list[int]:
    shares = normalised(weights)
    n = [math.floor(share * elements) for share in shares]
    remainder = elements - sum(n)
    for t, share in enumerate(shares):
        if share > 0 and remainder > 0:
            n[t] += 1
            remainder -= 1
    return n


# --- section 3: who owns an element ---------------------------------------------------------------


def assign(elements, tau, n, *, compare, seed):
    """Owners of `elements` under the budget n, and how many were nobody's before the leftovers were given out."""
    tasks = list(tau)
    size = {t: {p: abs(float(tau[t][p])) for p in elements} for t in tasks}
    n = dict(zip(tasks, n, strict=True))
    own: dict[int, set[int]] = {t: set() for t in tasks}
    unowned = set(elements)

    for t in reversed(tasks):
        if n[t] == 0:
            continue
        rivals = [s for s in tasks if s < t and (compare == "all" or n[s] > 0)]
        candidates = {p for p in unowned if all(size[t][p] >= size[s][p] for s in rivals)}
        if len(candidates) > n[t]:
            order = sorted((lottery(seed, 0, t, p), p) for p in candidates)
            candidates = {p for _, p in order[: n[t]]}
        own[t] |= candidates
        unowned -= candidates

    leftovers = len(unowned)
    for t in tasks:
        order = sorted((lottery(seed, 1, t, p), p) for p in unowned)
        taken = {p for _, p in order[: n[t] - len(own[t])]}
        own[t] |= taken
        unowned -= taken

    assert not unowned
    assert all(len(own[t]) == n[t] for t in tasks)
    return {p: t for t in tasks for p in own[t]}, leftovers


# --- section 4: the lottery -----------------------------------------------------------------------


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % TWO_64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % TWO_64
    return x ^ (x >> 31)


def absorb(h: int, v: int) -> int:
    return mix((h + G) % TWO_64 ^ v % TWO_64)


def lottery(seed: int, stream: int, task: int, p: int) -> int:
    return mix((absorb(absorb(absorb(0, seed), stream), task) + G * (p + 1)) % TWO_64)


# --- section 5: the matched scale -----------------------------------------------------------------


def norm_ratio(last: Mapping[int, float], merged: Mapping[int, float]) -> float | None:
    if all(value == 0 for value in merged.values()):
        return None

    def norm(vector):
        return math.sqrt(math.fsum(float(value) ** 2 for value in vector.values()))

    return norm(last) / norm(merged)


# --- section 6: the other methods -----------------------------------------------------------------


def random_task(p: int, shares: list[Fraction], seed: int) -> int:
    number = lottery(seed, 2, 0, p)
    reached = Fraction(0)
    for t, share in enumerate(shares, start=1):
        reached += share
        if number < math.floor(TWO_64 * reached):
            return t
    raise AssertionError("the shares sum to 1")


def weighted_sum(tau, factors: list[Fraction], layout: Layout):
    total = {}
    for p in layout.elements:
        terms = [np.float64(f) * np.float64(tau[t][p]) for t, f in zip(tau, factors, strict=True) if f != 0]
        total[p] = sum(terms, start=np.float64(0))
    return layout.rounded(total)


def trimmed(vector, t: int, density: Fraction, seed: int, layout: Layout, scope: str):
    """The elements that TIES keeps of a task vector."""
    kept = set()
    for elements in [layout.elements] if scope == "model" else layout.elements_of.values():
        n = math.floor(density * len(elements))
        if scope == "tensor" and density > 0:
            n = max(n, min(1, len(elements)))
        order = sorted((-abs(float(vector[p])), lottery(seed, 3, t, p), p) for p in elements)
        kept |= {p for _, _, p in order[:n]}
    return kept


def ties(tau, factors: list[Fraction], kept, normalize: object, layout: Layout):
    merged = {}
    for p in layout.elements:
        votes = [
            (np.float64(f) * np.float64(tau[t][p]), np.float64(f))
            for t, f in zip(tau, factors, strict=True)
            if f != 0 and p in kept[t]
        ]
        s = sum((v for v, _ in votes), start=np.float64(0))
        elected = [(v, f) for v, f in votes if v != 0 and (v > 0) == (s > 0)]
        divisor = {"count": len(elected), True: sum((f for _, f in elected), start=np.float64(0)), False: 1}
        total = sum((v for v, _ in elected), start=np.float64(0))
        merged[p] = total / divisor[normalize] if s != 0 else np.float64(0)
    return layout.rounded(merged)
