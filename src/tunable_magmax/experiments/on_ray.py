"""Does the seeds of an experiment side by side on a Ray cluster; records come back one by one, as they are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from tunable_magmax.engines.ray_session import ray_session
from tunable_magmax.errors import ClusterError
from tunable_magmax.experiments.records import Record
from tunable_magmax.experiments.seed import SeedWork, records_of

RETRIES = 3
"""How many times a seed whose machine died is started again; its training continues where it was."""


def records_on_ray(seeds: Sequence[SeedWork], address: str | None) -> Iterator[Record]:
    """Yields the records of all seeds in the order in which they are made, by jobs with a GPU each.

    Jobs have no GPU if no node has one, or if the device is "cpu".
    """
    if not seeds:
        return
    with ray_session(address) as ray:
        resources, threads = _resources(ray, seeds[0].device)
        job = ray.remote(num_returns="streaming", max_retries=0, **resources)(_job)
        streams = {job.remote(seed, threads): (seed, 0) for seed in seeds}
        made: dict[int, list[Record]] = {seed.seed: [] for seed in seeds}
        try:
            while streams:
                [stream], _ = ray.wait(list(streams), num_returns=1, fetch_local=False)
                seed, deaths = streams[stream]
                try:
                    record = ray.get(next(stream))
                except StopIteration:
                    del streams[stream]
                    continue
                except ray.exceptions.RayTaskError as error:
                    raise error.cause if isinstance(error.cause, Exception) else error from None
                except ray.exceptions.RayError as error:
                    del streams[stream]
                    if deaths == RETRIES:
                        raise ClusterError(
                            f"seed {seed.seed} died {deaths + 1} times ({str(error).splitlines()[0][:200]}). Records "
                            "and training so far are kept: see the nodes' memory, and run the same command again"
                        ) from None
                    streams[job.remote(seed.without(made[seed.seed]), threads)] = (seed, deaths + 1)
                    continue
                made[seed.seed].append(record)
                yield record
        finally:
            for stream in streams:
                with suppress(Exception):
                    ray.cancel(stream, force=True)


def _resources(ray: Any, device: str | None) -> tuple[dict[str, float], int]:
    """Returns what a job reserves (a GPU, or a CPU for each thread) and its threads, as here for the same last bits."""
    threads = torch.get_num_threads()
    if device != "cpu" and ray.cluster_resources().get("GPU", 0) >= 1:
        return {"num_gpus": 1, "num_cpus": 1}, threads
    largest = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if largest < 1:
        raise ClusterError("the Ray cluster has no CPUs for jobs: add nodes with `ray start --address=...`")
    return {"num_cpus": min(threads, int(largest))}, threads


def _job(seed: SeedWork, threads: int) -> Iterator[Record]:
    torch.set_num_threads(threads)
    yield from records_of(seed)
