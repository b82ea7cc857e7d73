"""Records of experiments that never were."""

from collections.abc import Iterable

from tunable_magmax.experiments.records import EnvironmentScore, RowRecord, ScaleRecord

SETTING = "mini-clip/cifar100-20"


def row_record(row: str, seed: int, variants: Iterable[int] = (42, 123), right: int = 280) -> RowRecord:
    found = (EnvironmentScore(name=f"D1/{each}", mixture="D1", right=right, samples=400) for each in variants)
    return RowRecord(setting=SETTING, seed=seed, row=row, environments=tuple(found))


def scale_record(seed: int, best: float = 0.75) -> ScaleRecord:
    grid = {"0.5": 0.7, f"{best:g}": 0.72}
    return ScaleRecord(setting=SETTING, seed=seed, method="magmax", grid=grid, best=best)
