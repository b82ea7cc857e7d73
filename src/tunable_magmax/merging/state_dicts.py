"""Merging dicts of tensors in memory: once, again and again with other options, or task by task as they arrive."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Module

from tunable_magmax.checkpoints.companions import are_generic
from tunable_magmax.checkpoints.tensors import FLOATS, Signature, TensorInfo, dtype_code, torch_dtype
from tunable_magmax.errors import InputError, plural, some_of
from tunable_magmax.merging.budget import named_tasks
from tunable_magmax.merging.layout import Layout, build_layout
from tunable_magmax.merging.merge import Merge
from tunable_magmax.merging.methods import Method, read_options
from tunable_magmax.merging.options import FOR_FILES, Options, takes_options
from tunable_magmax.merging.report import MergeReport, TensorReport, matched_scale
from tunable_magmax.merging.walker import Limits, Sources, cast_copied, does_not_fit, kernels_for

StateDict = Mapping[str, Tensor]
Tasks = Sequence[StateDict | Module] | Mapping[str, StateDict | Module]
"""In training order; a dict has names, too."""


@dataclass(frozen=True, slots=True, repr=False)
class Merged:
    """A merged state dict and the report of how it was made; `to_model` makes a model of it.

    >>> import torch
    >>> base, task = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> merged = merge_state_dicts(base, [task], scale=1)
    >>> merged
    Merged(2 tensors; tunable_magmax, 3 elements of 2 tensors, scale 1; task 1 100%)
    >>> torch.allclose(merged.to_model().weight, task.weight)
    True
    """

    state_dict: dict[str, Tensor]
    report: MergeReport
    base: Module | None = field(default=None, compare=False)
    """The base, if it was given as a module."""

    def __repr__(self) -> str:
        about = repr(self.report).removeprefix("MergeReport(")
        return f"Merged({plural(len(self.state_dict), 'tensor')}; {about}"

    def to_model(self, module: Module | None = None) -> Module:
        """Returns a copy of `module`, by default of the base, with the merged values and their types.

        Class, configuration, device and mode (training or evaluation) are those of the module, which stays as it is.
        """
        given = self.base if module is None else module
        if given is None:
            raise InputError("base and tasks were dicts of tensors: give a module to put the values into")
        model = copy.deepcopy(given)
        for name, tensor in model.state_dict(keep_vars=True).items():
            merged = self.state_dict.get(name)
            # In place, so that tied parameters stay one.
            if merged is not None and tensor.is_floating_point() and tensor.dtype != merged.dtype:
                tensor.data = tensor.data.to(merged.dtype)
        try:
            model.load_state_dict(self.state_dict)
        except RuntimeError as error:
            raise InputError(f"{type(given).__name__} cannot hold the merged values: {error}") from None
        return model


@takes_options(Options, without=FOR_FILES)
def merge_state_dicts(base: StateDict | Module, tasks: Tasks, *, threads: int | None = None, **options: Any) -> Merged:
    """Merges task checkpoints, given in training order, into the base; all are dicts of tensors, or modules.

    The options are those of `Options`, such as `method`, `weights` and `scale`. `tasks` may be a dict by name;
    `weights` and `budget` may then be by name, too, with 0 for tasks that are not named. `threads`: by default one for
    each core. The inputs are not modified.

    >>> import torch
    >>> base = {"w": torch.zeros(4)}
    >>> tasks = [{"w": torch.tensor([4.0, 3.0, 2.0, 1.0])}, {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}]
    >>> merged = merge_state_dicts(base, tasks, weights=[1, 1], scale=1)
    >>> merged.state_dict["w"], merged.report.counts
    (tensor([4., 3., 3., 4.]), (2, 2))
    """
    with _MemoryMerge(base, tasks, threads, options) as merge:
        merged = merge.merged()
    if not merged.report.elements:
        warnings.warn(merged.report.warnings[-1], stacklevel=2)
    return merged


class _MemoryMerge(Merge):
    """A merge of dicts of tensors, or of modules, on the device where the base lies; it is surveyed."""

    @torch.no_grad()
    def __init__(
        self,
        base: StateDict | Module,
        tasks: Tasks,
        threads: int | None,
        options: Mapping[str, Any],
        kept: dict[type[Method], Any] | None = None,
    ) -> None:
        listed, self.names = named_tasks(tasks)
        self._given = [base, *listed]
        self._base, *_ = states = [each.state_dict() if isinstance(each, Module) else each for each in self._given]
        read = read_options(len(listed), self.names, **options)
        labels = ["base", *(f"task {t}" for t in range(1, len(states)))]
        layout = build_layout(list(map(signature_of, states, labels)), labels, read.include, read.exclude)
        sources = Sources(layout, MemorySource.of(layout, states), labels, in_memory=True)
        device = next((tensor.device for tensor in self._base.values()), torch.device("cpu"))
        super().__init__(sources, read, kernels_for(device), Limits(threads=threads), kept)
        self.survey()

    @torch.no_grad()
    def merged(self) -> Merged:
        """Merges, by the options that the merge has."""
        for name in FOR_FILES:
            if getattr(self.options, name) is not None:
                raise InputError(f"{name} is for merges of files; tensors in memory are merged into a whole model")
        self.decide()
        values = self.values()
        base, report = self._given[0], self.report()
        return Merged(
            assemble(self._base, self.layout.ties, values, self.options.out_dtype),
            replace(report, names=self.names, warnings=(*report.warnings, *_mixed_labels(self._given, report.tensors))),
            base if isinstance(base, Module) else None,
        )


def _mixed_labels(given: Iterable[object], merged: Mapping[str, TensorReport]) -> Iterator[str]:
    """Yields a warning if rows of a merged classifier stand for other classes in one module than in another."""
    heads: dict[tuple[str, ...], list[str]] = {}
    for module in given:
        named = getattr(getattr(module, "config", None), "id2label", None)
        if named and any("Classification" in kind.__name__ for kind in type(module).__mro__):
            labels = tuple(str(named[row]) for row in sorted(named))
            encoder, rows = f"{getattr(module, 'base_model_prefix', '')}.", (len(labels),)
            head = [name for name, each in merged.items() if each.shape[:1] == rows and not name.startswith(encoder)]
            if head and not are_generic(labels):
                heads[labels] = head
    if len(heads) > 1:
        yield (
            f"rows of {some_of(next(iter(heads.values())))} stand for other labels in one model than in another and "
            "are mixed: merge_checkpoints gives each label a row of its own, `tmx tailor` fits a head to the result"
        )


def signature_of(tensors: StateDict, label: str) -> Signature:
    """Returns names, types and shapes of a dict of tensors; tied tensors are found by their shared storage."""
    if not isinstance(tensors, Mapping):
        raise InputError(f"{label} is a {type(tensors).__name__}, expected a dict of tensors")
    infos: dict[str, TensorInfo] = {}
    aliases: dict[str, str] = {}
    first: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{label}: {name!r} is a {type(tensor).__name__}, expected a tensor")
        if tensor.is_meta:
            raise InputError(f"{label}: {name!r} has no values, its device is 'meta': load the checkpoint first")
        code = dtype_code(tensor.dtype)
        if code is None or tensor.layout != torch.strided:
            raise InputError(f"{label}: {name!r} is a {tensor.layout} tensor of {tensor.dtype}, which can't be merged")
        if address := tensor.data_ptr():  # 0 if there are no elements
            there = first.setdefault(address, [])
            kept = next((other for other in there if _same(tensors[other], tensor)), None)
            if kept is not None:
                aliases[name] = kept
                continue
            there.append(name)
        infos[name] = TensorInfo(name, code, tuple(tensor.shape))
    return Signature(infos, aliases)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors that begin at the same address are one."""
    return (one.device, one.dtype, one.shape, one.stride()) == (other.device, other.dtype, other.shape, other.stride())


class MemorySource:
    """A `Source` of tensors in memory: views wherever they have the type that is asked for."""

    def __init__(self, state: StateDict, names: Iterable[str]) -> None:
        self._tensors = {name: state[name].detach().reshape(-1).contiguous() for name in names}

    @classmethod
    def of(cls, layout: Layout, states: Sequence[StateDict]) -> list[Self]:
        """Returns the sources of base and tasks."""
        return [cls(state, [each.infos[k].name for each in layout.mergeable]) for k, state in enumerate(states)]

    def read(self, name: str, start: int, stop: int, scratch: Tensor) -> Tensor:
        values = self._tensors[name]
        if stop - start != values.numel():
            values = values[start:stop]
        if values.dtype == scratch.dtype and values.device == scratch.device:
            return values
        return scratch.copy_(values) if scratch.numel() else values.to(scratch)


def assemble(
    base: StateDict, ties: Mapping[str, str], merged: Mapping[str, Tensor], out_dtype: str | None = None
) -> dict[str, Tensor]:
    """Returns the output in the base's order: merged tensors, copies of the others, one tensor for tied names."""
    result: dict[str, Tensor] = {}
    asked = torch_dtype(out_dtype) if out_dtype else None
    for name, tensor in base.items():
        if name in ties:
            result[name] = result[ties[name]]
        elif name in merged:
            result[name] = merged[name]
        elif asked is not None and dtype_code(tensor.dtype) in FLOATS:
            result[name] = cast_copied(tensor.detach(), asked, name)
        else:
            result[name] = tensor.detach().clone()
    return result


class MergeSession:
    """Merges one base and its tasks again and again, with other weights, scales and methods. A context manager.

    Each merge equals `merge_state_dicts` with the same options, to the bit, but compares the task vectors only once.
    For `tsv`, singular vectors are computed when a task first has a share, and kept in memory until the session closes.
    Tensors may be shared with the dicts given, so leave those alone while the session is open.

    >>> import torch
    >>> base, tasks = {"w": torch.zeros(4)}, [{"w": torch.ones(4)}, {"w": torch.full((4,), 2.0)}]
    >>> with MergeSession(base, tasks) as session:
    ...     [session.merge(weights=[share, 1 - share], scale=1).report.counts for share in (0.25, 0.5)]
    [(1, 3), (2, 2)]
    """

    def __init__(
        self,
        base: StateDict | Module,
        tasks: Tasks,
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        threads: int | None = None,
    ) -> None:
        self._patterns: dict[str, Any] = {"include": include, "exclude": exclude}
        self._merge = _MemoryMerge(base, tasks, threads, self._patterns, kept={})
        self.elements = self._merge.elements
        """d, the number of merged elements."""
        self._closed = False

    def __repr__(self) -> str:
        return f"MergeSession({plural(self._merge.tasks, 'task')}, {self.elements:,} elements)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the vectors and planes."""
        self._merge.__exit__()
        self._closed = True

    def merge(self, **given: Any) -> Merged:
        """Merges; the options are those of `merge_state_dicts`, less include and exclude."""
        if self._closed:
            raise InputError("this MergeSession is closed: open another one")
        if given.keys() & self._patterns.keys():
            raise InputError("include and exclude are fixed when a session is opened")
        self._merge.restart(read_options(self._merge.tasks, self._merge.names, **self._patterns, **given))
        return self._merge.merged()


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
            tied = f"{untied[0]!r} to {self._signature.aliases[untied[0]]!r}"
            raise InputError(
                f"the base ties {tied}, but the new task holds both: only merge_state_dicts can merge that"
            )
        fresh: dict[str, Tensor] = {}
        for tensor in layout.mergeable:
            before, after = (source[info.name] for source, info in zip((self._base, task), tensor.infos, strict=True))
            difference = after.to(tensor.working) - before.to(tensor.working)
            if not bool(difference.isfinite().all()):
                if bool(((after == before) | (after.isnan() & before.isnan())).all()):
                    continue
                raise InputError(f"{tensor.name!r}: the new task or the base holds NaN or infinity: it can't be merged")
            fresh[tensor.name] = difference
        self.last_length = math.sqrt(_square(fresh))
        for name, difference in fresh.items():
            so_far = self.vector.setdefault(name, difference)
            self.vector[name] = torch.where(difference.abs() >= so_far.abs(), difference, so_far)

    @torch.no_grad()
    def merged(self, scale: float | str = "matched") -> dict[str, Tensor]:
        """Returns the merged state dict in the base's types; tensors that no task changed are as in the base."""
        if self.last_length is None:
            raise InputError("no task was added yet")
        options = read_options(1, method="magmax", scale=scale)
        factor = matched_scale(self.last_length**2, _square(self.vector)) if options.matched else options.scale
        merged: dict[str, Tensor] = {}
        for name, vector in self.vector.items():
            if bool(vector.any()):
                base, step = self._base[name], vector * torch.tensor(factor, dtype=vector.dtype, device=vector.device)
                merged[name] = (base.to(vector.dtype) + step).to(base.dtype)
                if not bool(merged[name].isfinite().all()):
                    raise does_not_fit(name, "merged", base.dtype)
        return assemble(self._base, self._signature.aliases, merged)


def _square(vectors: Mapping[str, Tensor]) -> float:
    """Returns the squared length of all vectors together."""
    return math.fsum(float(vector.double().square().sum()) for vector in vectors.values())
