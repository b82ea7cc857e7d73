"""Merges on a Ray cluster: the driver decides; workers read, hold the planes and write, each for its share.

The survey, the assignment of owners, the scale and the report are those of a merge in one process. Here is what makes
them act on tensors that workers hold: their counts are added up, and decisions are sent to all. `Worker` knows
nothing of Ray: all that it does comes in calls (`ray_workers`).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tunable_magmax.checkpoints.safetensors_file import Shard
from tunable_magmax.checkpoints.tensors import TensorInfo
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.inputs import Inputs, file_sources
from tunable_magmax.engines.outputs import Job, shard_data, write_weights
from tunable_magmax.engines.ray_workers import RayWorkers, find_room, ray_session
from tunable_magmax.errors import ClusterError, InputError
from tunable_magmax.merging.layout import Layout
from tunable_magmax.merging.merge import Findings, Merge
from tunable_magmax.merging.methods import Method, load_method, place_of_method
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.owners import Call, MergedElements
from tunable_magmax.merging.report import MergeReport, Survey
from tunable_magmax.merging.walker import Limits, Sources, kernels_for
from tunable_magmax.version import __version__

_SHARED = "Workers read the inputs themselves: put base and tasks on a file system that all nodes mount at one place"


@dataclass(frozen=True, slots=True)
class Share:
    """The work of one worker: the tensors that it merges, by number, and the names of those that it copies."""

    tensors: tuple[int, ...]
    copied: tuple[str, ...]


def divide(layout: Layout, workers: int) -> list[Share]:
    """Divides the tensors of a merge among workers, so that all read about as many bytes; some may get nothing.

    >>> from tunable_magmax.merging.layout import Mergeable
    >>> tensors = [Mergeable(name, (TensorInfo(name, "F32", (size,)),) * 3, 0) for name, size in zip("abc", (5, 9, 3))]
    >>> divide(Layout(tuple(tensors), (TensorInfo("steps", "I64", ()),), {}, ()), 2)
    [Share(tensors=(1,), copied=()), Share(tensors=(0, 2), copied=('steps',))]
    """
    costs = [(sum(info.nbytes for info in tensor.infos), k) for k, tensor in enumerate(layout.mergeable)]
    loads, owner = [0] * workers, {}
    for cost, k in sorted(costs, key=lambda pair: (-pair[0], pair[1])):
        owner[k] = min(range(workers), key=lambda worker: loads[worker])
        loads[owner[k]] += cost
    copied: list[list[str]] = [[] for _ in range(workers)]
    for info in layout.copied:
        least = min(range(workers), key=lambda worker: loads[worker])
        copied[least].append(info.name)
        loads[least] += info.nbytes
    return [Share(tuple(k for k in sorted(owner) if owner[k] == n), tuple(copied[n])) for n in range(workers)]


# -- a worker ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker needs to begin. Paths are absolute: another machine has another current folder."""

    base: Path
    tasks: tuple[Path, ...]
    options: Options
    method: str
    """What `load_method` takes: the method may be in a file."""
    layout: Layout
    share: Share
    threads: int
    memory: int
    spill: Path
    """The file of its planes, if they do not fit into the memory."""


class Worker:
    """Does one share of a merge. The driver calls the methods in the order in which they stand here.

    Tensors go by their numbers in the whole merge's layout.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()

    def node_and_version(self) -> tuple[str, str]:
        """Returns the node's address and the version of this package there."""
        import ray

        node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return node, __version__

    def begin(self, assignment: Assignment) -> None:
        """Opens the inputs and prepares the merge. What the driver can read and this worker can't is an error."""
        self._assignment = assignment
        options, share = assignment.options, assignment.share
        load_method(assignment.method)
        try:
            self._inputs = self._stack.enter_context(Inputs(assignment.base, assignment.tasks, options))
        except InputError as error:
            raise ClusterError(f"a worker can't read what the driver can: {error}. {_SHARED}") from None
        if self._inputs.layout != assignment.layout:
            raise ClusterError(f"a worker finds other checkpoints than the driver at the same paths. {_SHARED}")
        sources = file_sources(self._inputs.checkpoints)
        limits = Limits(assignment.threads, assignment.memory, assignment.spill, tensors=share.tensors)
        kernels = kernels_for(torch.device("cpu"))
        merge = Merge(Sources(assignment.layout, sources, self._inputs.labels), options, kernels, limits)
        self._merge = self._stack.enter_context(merge)

    def scan(self) -> Survey:
        """Surveys the share."""
        return self._merge.scan(self._assignment.layout.elements)

    def apply(self, changed: NDArray[np.bool_], elements: int) -> None:
        """Takes over what the whole merge merges: `changed` [all tensors, T], and its number of elements."""
        survey = Survey.nothing(*changed.shape)
        survey.changed[:] = changed
        self._merge.apply(survey, elements)
        self._part = self._merge.part()

    def ask(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Calls a method of the merged elements that are here, for a decision that the driver makes."""
        return getattr(self._part, name)(*arguments)

    def take_over(self, method: Method) -> None:
        """Takes over what the driver's method has decided."""
        self._merge.method = method

    def measure(self) -> Findings:
        """Counts owners and measures the merged vector; keeps it if memory allows."""
        self._merge.measure()
        return self._merge.found

    def write(self, path: Path, tensors: Sequence[tuple[TensorInfo, int]], scale: float) -> Findings:
        """Writes tensors of an output file, each at its offset; returns what was counted so far."""
        self._merge.scale = scale
        infos = tuple(info for info, _ in tensors)
        here = Shard(path.name, infos, b"", sum(info.nbytes for info in infos))
        data = shard_data(self._merge, self._inputs, here)
        with open(path, "r+b") as file:
            for info, offset in tensors:
                file.seek(offset)
                while file.tell() < offset + info.nbytes:
                    file.write(next(data))
            file.flush()
            os.fsync(file.fileno())
        self._inputs.refuse_changed()
        return self._merge.found

    def digest(self, path: Path) -> str:
        """Returns the sha256 of a complete file."""
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def close(self) -> None:
        """Closes the inputs and the merge."""
        self._stack.close()


# -- the driver -------------------------------------------------------------------------------------------------------


class ClusterMerge(Merge):
    """A merge whose walks over the values are done by workers, each over its share."""

    def __init__(self, workers: RayWorkers, shares: Sequence[Share], inputs: Inputs, options: Options) -> None:
        sources = inputs.sources(file_sources(inputs.checkpoints))
        super().__init__(sources, options, kernels_for(torch.device("cpu")), Limits(threads=1))
        self._workers, self._shares = workers, shares

    def _ask_all(self, name: str, *arguments: Any) -> list[Any]:
        return self._workers.ask([Call(k, name, arguments) for k in range(len(self._shares))])

    def scan(self, elements: int) -> Survey:
        self.method.elements = elements
        survey = Survey.nothing(len(self.layout.mergeable), self.tasks)
        for answer in self._ask_all("scan"):
            survey.add(answer)
        return survey

    def apply(self, survey: Survey, elements: int | None = None) -> None:
        super().apply(survey, elements)
        self._ask_all("apply", survey.changed, self.elements)

    def choose(self) -> None:
        holder = {tensor: k for k, share in enumerate(self._shares) for tensor in share.tensors}

        def ask(calls: Sequence[Call]) -> list[Any]:
            return self._workers.ask([Call(call.part, "ask", (call.name, call.arguments)) for call in calls])

        self.method.decide(MergedElements(self.places, holder, ask))
        self._ask_all("take_over", self.method)

    def measure(self) -> None:
        for measured in self._ask_all("measure"):
            self.found |= measured

    def write(self, shards: Sequence[Shard], output: Output) -> dict[str, str]:
        """Has the workers write their tensors; returns the sha256 of each shard."""
        worker = {name: k for k, share in enumerate(self._shares) for name in share.copied}
        worker |= {self.layout.mergeable[n].name: k for k, share in enumerate(self._shares) for n in share.tensors}
        paths = {output.begin_shard(shard): shard for shard in shards}
        calls: list[Call] = []
        for path, shard in paths.items():
            parts: dict[int, list[tuple[TensorInfo, int]]] = {}
            offset = len(shard.header)
            for info in shard.tensors:
                parts.setdefault(worker[info.name], []).append((info, offset))
                offset += info.nbytes
            calls += [Call(k, "write", (path, tensors, self.scale)) for k, tensors in parts.items()]
        for counted in self._workers.ask(calls):
            self.found |= counted
        digests = self._workers.ask([Call(n % len(self._shares), "digest", (path,)) for n, path in enumerate(paths)])
        for path, shard in paths.items():
            output.finish_shard(shard, path)
        return {shard.name: sha256 for shard, sha256 in zip(shards, digests, strict=True)}


def merge_by(workers: RayWorkers, shares: Sequence[Share], job: Job, threads: int) -> MergeReport:
    """Merges by workers, each with its share; the files are the same as those of one process, to the byte."""
    inputs, options, output = job.inputs, job.options, job.output
    base, *tasks = (path.absolute() for path in inputs.paths)
    attempt = secrets.token_hex(4)  # a worker of a killed driver may still write to a file of its own
    calls = []
    method = place_of_method(options.method)
    for k, share in enumerate(shares):
        spill = output.scratch(f"planes-{k}-{attempt}")
        assignment = Assignment(base, tuple(tasks), options, method, inputs.layout, share, threads, job.memory, spill)
        calls.append(Call(k, "begin", (assignment,)))
    workers.ask(calls)
    merge = ClusterMerge(workers, shares, inputs, options)
    merge.survey()
    merge.decide()
    return write_weights(merge, job, lambda shards: merge.write(shards, output))


@contextmanager
def join_cluster(
    address: str | None, workers: int | None, threads: int | None
) -> Iterator[tuple[int, Callable[[Job], MergeReport]]]:
    """Joins the cluster at an address, or one on this machine, and finds room for workers there.

    Yields the CPUs of each worker, and what merges a job and writes its weights; its memory bounds each worker.
    """
    with ray_session(address, workers) as ray:
        nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        count, cpus = find_room(nodes, workers, threads)

        def merge(job: Job) -> MergeReport:
            shares = [share for share in divide(job.inputs.layout, count) if share.tensors or share.copied]
            with RayWorkers(ray, Worker, len(shares), cpus, job.progress) as started:
                started.greet()
                return merge_by(started, shares, job, cpus)

        yield cpus, merge
