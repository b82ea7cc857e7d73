"""The time that a plan estimates, for a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tunable_magmax.sizes import show_size

if TYPE_CHECKING:
    from tunable_magmax.engines.plan import MergePlan


def time_lines(planned: MergePlan) -> Iterator[str]:
    """Lines on time and its parts; none if the plan has no estimate."""
    if planned.time is None or planned.speeds is None:
        return
    found, speeds = planned.time, planned.speeds
    phases = ", ".join(f"{phase.name} {seconds(phase.seconds)}" for phase in found.phases)
    yield f"time         about {seconds(found.seconds)} here ({seconds(found.low)} to {seconds(found.high)}): {phases}"
    yield f"  reading    {seconds(sum(phase.reading for phase in found.phases))} by itself, {show_size(speeds.read)}/s"
    yield f"  computing  {seconds(sum(phase.computing for phase in found.phases))} by itself"
    if speeds.write is not None:
        writing = seconds(sum(phase.writing for phase in found.phases))
        yield f"  writing    {writing} by itself, {show_size(speeds.write)}/s"
    if planned.cluster is not None:
        cluster = planned.cluster
        yield (
            f"{cluster.workers} workers    {seconds(cluster.scaling.seconds)}, {cluster.speedup:.1f} times faster, if "
            f"the file system gives each of them what it gives this machine; {seconds(cluster.shared.seconds)}, "
            f"{cluster.shared_speedup:.1f} times, if they share that; never more than {cluster.most_speedup:.0f} times"
        )


def seconds(amount: float) -> str:
    """Seconds for people.

    >>> seconds(0.04), seconds(12.3), seconds(400), seconds(10_000)
    ('0.04 s', '12 s', '6.7 min', '2.8 h')
    """
    if amount < 120:
        return f"{amount:.2g} s" if amount < 10 else f"{amount:.0f} s"
    return f"{amount / 60:.1f} min" if amount < 7200 else f"{amount / 3600:.1f} h"
