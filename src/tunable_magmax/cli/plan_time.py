"""The time that a plan estimates, for a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tunable_magmax.files import show_size

if TYPE_CHECKING:
    from tunable_magmax.engines.cost import Estimate
    from tunable_magmax.workflows.plan import ClusterPlan, MergePlan

LEAST = 0.1
"""Seconds below which a number would promise more than an estimate can know."""
WORTHWHILE = 1.1
"""Times faster, below which a cluster is not worth its trouble."""


def time_lines(planned: MergePlan) -> Iterator[str]:
    """Lines on time and its parts; none if the plan has no estimate."""
    if planned.time is None or planned.speeds is None:
        return
    found, speeds = planned.time, planned.speeds
    if found.seconds < 1:
        yield "time         about a second or less here"
    else:
        within = f"{seconds(found.low)} to {seconds(found.high)}"
        yield f"time         about {seconds(found.seconds)} here ({within}): {_phases(found)}"
    yield f"  reading    {seconds(sum(phase.reading for phase in found.phases))} by itself, {show_size(speeds.read)}/s"
    yield f"  computing  {seconds(sum(phase.computing for phase in found.phases))} by itself"
    if speeds.write is not None:
        writing = seconds(sum(phase.writing for phase in found.phases))
        yield f"  writing    {writing} by itself, {show_size(speeds.write)}/s"
    if planned.cluster is not None:
        yield f"{planned.cluster.workers} workers    {_cluster(planned.cluster)}"


def _phases(found: Estimate) -> str:
    """The phases that take time worth telling, and that there are others."""
    long = [phase for phase in found.phases if phase.seconds >= LEAST]
    rest = [f"the rest {seconds(0)}"] if len(long) < len(found.phases) else []
    return ", ".join([*(f"{phase.name} {seconds(phase.seconds)}" for phase in long), *rest])


def _cluster(found: ClusterPlan) -> str:
    alone = "if the file system gives each of them what it gives this machine"
    if found.speedup < WORTHWHILE:
        more = "and more of them would change little" if found.most_speedup < WORTHWHILE else "take more, or merge here"
        return f"not worth it: about {seconds(found.scaling.seconds)} even {alone}, {more}"
    shared = f"{seconds(found.shared.seconds)}, {_faster(found.shared_speedup)}, if they share that"
    most = f"never more than {found.most_speedup:.{0 if found.most_speedup >= 10 else 1}f} times"
    return f"{seconds(found.scaling.seconds)}, {_faster(found.speedup)}, {alone}; {shared}; {most}"


def _faster(factor: float) -> str:
    """How a cluster compares.

    >>> _faster(3.21), _faster(1.01), _faster(0.004)
    ('3.2 times faster', 'not faster', 'not faster')
    """
    return f"{factor:.1f} times faster" if factor >= WORTHWHILE else "not faster"


def seconds(amount: float) -> str:
    """Seconds for people.

    >>> seconds(0.0004), seconds(0.34), seconds(12.3), seconds(400), seconds(10_000)
    ('less than 0.1 s', '0.34 s', '12 s', '6.7 min', '2.8 h')
    """
    if amount < LEAST:
        return f"less than {LEAST} s"
    if amount < 120:
        return f"{amount:.2g} s" if amount < 10 else f"{amount:.0f} s"
    return f"{amount / 60:.1f} min" if amount < 7200 else f"{amount / 3600:.1f} h"
