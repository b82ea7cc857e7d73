"""Who does the work: which engine and device may be asked for, and with what. Checked before anything is opened."""

from __future__ import annotations

from tunable_magmax.engines.ray_session import import_ray, refuse_address_form
from tunable_magmax.errors import InputError, closest

ENGINES = ("local", "ray")


def check_merge(engine: str, workers: int | None, ray_address: str | None, device: str | None) -> None:
    """Refuse a place where no merge can run: an engine or device that is not here, or options of another engine.

    >>> check_merge("local", 2, None, None)
    Traceback (most recent call last):
    tunable_magmax.errors.InputError: workers is 2, but the engine is 'local', which has none: give engine 'ray'
    """
    if engine == "ray" and device not in (None, "cpu"):
        raise InputError(
            f"device is {device!r}, but the engine is {engine!r}, whose workers merge on CPUs: leave it out"
        )
    _check_engine(engine, workers=workers, ray_address=ray_address)
    check_workers(workers)
    if device not in (None, "cpu"):
        from tunable_magmax.engines.on_device import open_device

        open_device(device)


def check_workers(workers: int | None) -> None:
    """Refuse a number of workers that can do nothing."""
    if workers is not None and workers < 1:
        raise InputError(f"workers is {workers}, expected at least 1")


def check_jobs(engine: str, ray_address: str | None, device: str | None) -> None:
    """Refuse a place where the jobs of an experiment can't run.

    >>> check_jobs("ray", None, "cuda:1")
    Traceback (most recent call last):
    tunable_magmax.errors.InputError: device is 'cuda:1', but engine 'ray' gives each job a GPU: give 'cuda' or 'cpu'
    """
    if engine == "ray" and device is not None and ":" in device:
        raise InputError(f"device is {device!r}, but engine 'ray' gives each job a GPU: give 'cuda' or 'cpu'")
    _check_engine(engine, ray_address=ray_address)


def _check_engine(engine: str, **of_ray: object) -> None:
    if engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}{closest(engine, ENGINES)}; known: {', '.join(ENGINES)}")
    if engine == "local":
        for option, value in of_ray.items():
            if value is not None:
                raise InputError(f"{option} is {value!r}, but the engine is 'local', which has none: give engine 'ray'")
        return
    import_ray()
    if of_ray["ray_address"] is not None:
        refuse_address_form(str(of_ray["ray_address"]))
