"""How a model is tailored: the options, the rules for method and scale, and what is checked before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.settings import Resources
from tunable_magmax.errors import InputError
from tunable_magmax.merging.methods import METHODS, read_options
from tunable_magmax.merging.resources import kernels_for, plan_memory, whole_bytes
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.prior import read_eps
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.prefer import class_tables

if TYPE_CHECKING:
    pass

# Above this effective number of tasks, tsv keeps the lead that Tunable MAGMAX loses; below, they are level, and Tunable
# MAGMAX is exact and several times as fast. Chosen on other seeds and environments than the tables' (docs/results.md).
MANY_TASKS = 3.2


def effective_tasks(weights: Sequence[float]) -> float:
    """Returns how many tasks of equal weight would be as mixed: 1 / sum of w^2.

    >>> effective_tasks([0.5, 0.5, 0.0]), effective_tasks([1.0, 0.0])
    (2.0, 1.0)
    """
    total = sum(weights)
    return 1 / sum((weight / total) ** 2 for weight in weights)


def default_method(weights: Sequence[float]) -> str:
    """Returns the method for weights if none is asked for: the one rule of `--method auto`.

    >>> default_method([0.5, 0.5]), default_method([1] * 10)
    ('tunable_magmax', 'tsv')
    """
    return "tsv" if effective_tasks(weights) > MANY_TASKS else "tunable_magmax"


def why_default(method: str, weights: Sequence[float]) -> str:
    """Returns why a method is the default one for weights.

    >>> why_default("tunable_magmax", [0.5, 0.5])
    'few tasks matter: the weights amount to 2 equal ones, and tsv is for more than 3.2'
    >>> why_default("tsv", [1] * 10)
    'many tasks matter: the weights amount to 10 equal ones, more than 3.2'
    """
    count = f"{effective_tasks(weights):.3g}"
    if count == "1":
        return "only one task matters"
    amount = f"the weights amount to {count} equal ones"
    if method == "tsv":
        return f"many tasks matter: {amount}, more than {MANY_TASKS:g}"
    return f"few tasks matter: {amount}, and tsv is for more than {MANY_TASKS:g}"


def why_not_tsv(run: Run, output: Mapping[str, Any]) -> str | None:
    """Returns why tsv, which merges matrices whole, cannot make a model of a run with these settings; None if it can.

    `output`: settings of `merge_checkpoints`.
    """
    import torch

    resources = Resources(**{name: output[name] for name in Resources.__slots__ if name in output})
    try:
        resources.check_method("tsv")
    except InputError:
        place = f"engine {resources.engine!r}" if resources.engine != "local" else f"device {resources.device!r}"
        return f"tsv does not run with {place}"
    options, kernels = read_options(len(run.tasks), method="tsv"), kernels_for(torch.device("cpu"))
    with Inputs(run.base, run.tasks, options) as inputs:

        def fits(memory: int) -> bool:
            try:
                plan_memory(inputs.layout, options, kernels, resources.threads, memory)
            except InputError:
                return False
            return True

        if fits(resources.memory_bytes):
            return None
        gib = next((power for power in (1 << bit for bit in range(20)) if fits(power << 30)), None)
        needed = -(-whole_bytes(inputs.layout, options) // 2**20)
    remedy = "" if gib is None else f"; --memory {gib}GiB lets it"
    return f"tsv needs {needed} MiB for its largest matrix{remedy}"


def default_scale(method: str, prior: bool) -> float | str:
    """Returns the scale for a method if none is asked for and no preference has one.

    With a site prior, the tasks' own steps serve better than steps that are stretched to the last one's length: what
    stretching gives, keeping other tasks' classes from winning, the prior gives already. Without one, the method's own.

    >>> default_scale("tunable_magmax", prior=True), default_scale("tunable_magmax", prior=False)
    (1.0, 'matched')
    """
    return 1.0 if prior and method == "tunable_magmax" else METHODS[method].default_scale


def default_words(method: str, prior: bool) -> str:
    """Returns what a default scale is called.

    >>> default_words("tunable_magmax", prior=True), default_words("tsv", prior=True)
    ('the default with a site prior', 'the default of tsv')
    """
    return "the default with a site prior" if prior and method == "tunable_magmax" else f"the default of {method}"


def with_site_prior(preference: Preference, run: Run, prior: float | str) -> Preference:
    """Returns a stored preference with the prior that a tailored model gets: its own, or that of the tasks' classes.

    `prior`: "auto", "none", or the eps that is wanted.
    """
    if prior == "none":
        return replace(preference, prior=None)
    eps = None if prior == "auto" else read_eps(prior)
    if preference.prior is not None:
        return preference if eps is None else replace(preference, prior=replace(preference.prior, eps=eps))
    tables = class_tables(run)
    return preference if tables is None else preference.with_prior(tables, eps=eps)


def read_scale(scale: float | str) -> float:
    """Reads a scale that is not `matched`."""
    from tunable_magmax.merging.options import Options

    return Options.read(1, scale=scale).scale or 0.0
