"""`open_run`: a run directory in Python, with a method for each command that takes one."""

from __future__ import annotations

import os
import tempfile
import warnings
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from tunable_magmax.data.source import SamplesLike
from tunable_magmax.errors import InputError, closest, plural, some_of
from tunable_magmax.files import Progress
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run as RunDirectory
from tunable_magmax.workflows.compare import Comparison, compare
from tunable_magmax.workflows.evaluate import HEAD_FILES, Data, Evaluation, evaluate
from tunable_magmax.workflows.merge import merge as merge_files
from tunable_magmax.workflows.merge import merge_recipe_in_memory, recipe_of
from tunable_magmax.workflows.options import (
    CompareOptions,
    MergeOptions,
    PreferOptions,
    SweepOptions,
    TailorOptions,
    from_flat,
)
from tunable_magmax.workflows.prefer import prefer
from tunable_magmax.workflows.sweep import Sweep, sweep
from tunable_magmax.workflows.tailor import tailor
from tunable_magmax.workflows.tailored import Tailored

if TYPE_CHECKING:
    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.merging.state_dicts import Merged, MergeSession

Place: TypeAlias = str | os.PathLike[str]
Chosen: TypeAlias = Preference | Place
"""A preference, or its file."""


def open_run(path: Place) -> Run:
    """Opens a run directory, as `tmx train`, `tmx demo` or a script left it, to do with it what the commands do.

    >>> run = open_run("run")  # doctest: +SKIP
    >>> site = run.prefer(inputs=["where is my card?", "what do I owe?"])  # doctest: +SKIP
    >>> run.tailor("site-model", preference=site)  # doctest: +SKIP
    """
    return Run.open(path)


class Run(RunDirectory):
    """A run directory: a base, the tasks in training order, and what is known of them.

    Samples of a site are the path of a file or folder, as for the commands, or the samples themselves: a list of texts,
    or of PIL images, arrays [height, width, 3] of uint8 or paths of image files; labels are class names or indices; and
    pairs are tuples of an input and its label. What a user should be warned of comes as a Python warning.

    >>> open_run("run")  # doctest: +SKIP
    Run('run': 2 tasks: birds, cars; 20 classes; profiles; a head)
    """

    def __repr__(self) -> str:
        count, profiled = len(self.tasks), sum(profile is not None for profile in self.profiles)
        parts = [f"{plural(count, 'task')}: {some_of(self.names)}"]
        parts += [f"{len({*chain(*self.classes.values())})} classes"] if self.classes else []
        parts += ["profiles" if profiled == count else f"{profiled} of {count} profiles"]
        parts += [] if self.head is None else ["a head"]  # tasks may have classifiers of their own
        return f"Run({str(self.path)!r}: {'; '.join(parts)})"

    # -- preferences -----------------------------------------------------------------------------------------------

    def prefer(
        self,
        *,
        inputs: SamplesLike | None = None,
        labels: SamplesLike | None = None,
        labelled: SamplesLike | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Preference:
        """Finds how much each task matters to a site, as `tmx prefer` does.

        `inputs` and `labels` of the site may be of different samples; `labelled` are inputs with their labels. Without
        samples: `weights` (a list, or by task name), `alpha`, or `equal`. Other options are those of the command:
        method, max_samples, split, text_column, device, ...

        >>> run.prefer(labels=["cat", "cat", "dog"]).weights  # doctest: +SKIP
        (0.6666666666666666, 0.3333333333333333)
        """
        known = from_flat(PreferOptions, inputs=inputs, labels=labels, labelled=labelled, **options)
        return prefer(self, known, progress)

    # -- models ----------------------------------------------------------------------------------------------------

    @overload
    def merge(self, preference: Chosen | None = None, *, out: None = None, **options: Any) -> Merged: ...

    @overload
    def merge(self, preference: Chosen | None = None, *, out: Place, **options: Any) -> MergeReport: ...

    def merge(self, preference: Chosen | None = None, *, out: Place | None = None, **options: Any) -> Any:
        """Merges the tasks as `tmx merge` does: into `out`, which gives the report; without `out` in memory.

        `preference`: one of this run, or its file; without one, all tasks matter alike, or as `weights` say. The other
        options are those of the command: method, scale, seed, overwrite, memory, ...

        >>> run.merge(site).state_dict  # doctest: +SKIP
        >>> run.merge(site, out="merged", scale=1).counts  # doctest: +SKIP
        (15000, 5000)
        """
        progress: Progress | None = options.pop("progress", None)
        read = from_flat(MergeOptions, preference=preference, out=None if out is None else Path(out), **options)
        if out is not None:
            return merge_files(self.path, read, progress)
        return merge_recipe_in_memory(recipe_of(self.path, None, read.preference, read.merging), progress)[0]

    def session(self, **options: Any) -> MergeSession:
        """Opens a `MergeSession` on the run's checkpoints, to merge again and again in memory.

        >>> with run.session() as session:  # doctest: +SKIP
        ...     merged = [session.merge(weights=preference) for preference in preferences]
        """
        from tunable_magmax.merging.state_dicts import MergeSession
        from tunable_magmax.models.builtin import builtin_labels
        from tunable_magmax.models.pretrained import read_tensors

        found = [builtin_labels(path) for path in self.tasks]
        if any(labels is not None for labels in found) and {builtin_labels(self.base)} != set(found):
            raise InputError(
                "the tasks have classifiers of their own, which a session does not put together: `merge` does, in "
                "memory too"
            )
        tasks = {name: read_tensors(path, self.base) for name, path in self.checkpoints.items()}
        return MergeSession(read_tensors(self.base), tasks, **options)

    def sweep(self, out: Place, **options: Any) -> Sweep:
        """Merges for each point of a line or a list into `out/NAME`, as `tmx sweep` does, with the command's options.

        >>> run.sweep("line", start=[1, 0], stop=[0, 1], steps=5)  # doctest: +SKIP
        """
        return sweep(self.path, from_flat(SweepOptions, out=Path(out), **options))

    def tailor(
        self,
        out: Place | None = None,
        *,
        inputs: SamplesLike | None = None,
        labels: SamplesLike | None = None,
        labelled: SamplesLike | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Tailored:
        """Makes the model that a site needs, with its head, preference and evidence, as `tmx tailor` does.

        What is known of the site is as for `prefer`, or a `preference`, beside which inputs and labelled samples may
        be given. Other options are those of the command: method, scale, head, seed, overwrite, max_samples, device, ...
        Called again with the same, it returns the model that is there. Without `out` the model lives in a temporary
        directory, as long as the object that is returned.

        >>> model = run.tailor(labelled=zip(images, labels))  # doctest: +SKIP
        >>> model.predict(images[0])  # doctest: +SKIP
        [Prediction('cat', 0.931)]
        """
        temporary = tempfile.TemporaryDirectory(prefix="tmx-") if out is None else None
        place = Path(out) if out is not None else Path(temporary.name if temporary else "", "model")
        known = from_flat(TailorOptions, out=place, inputs=inputs, labels=labels, labelled=labelled, **options)
        made = tailor(self, known, progress)
        for text in made.record.warnings:
            warnings.warn(text, stacklevel=2)
        return replace(made, temporary=temporary)

    # -- measuring -------------------------------------------------------------------------------------------------

    def compare(
        self, preference: Chosen | None = None, data: Data = None, *, progress: Progress | None = None, **options: Any
    ) -> Comparison:
        """Measures which model of the run is best for a site, on its labelled samples, as `tmx compare` does.

        `preference`: one of this run, its file, or a tailored model; by default all tasks alike. `data`: pairs of input
        and label, or the path of such data; by default the run's own test data. Other options are those of the command:
        seed, max_samples, device, ...
        """
        return compare(self, from_flat(CompareOptions, preference=preference, data=data, **options), progress)

    def evaluate(
        self,
        model: Chosen | Merged,
        data: Data = None,
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> Evaluation:
        """Measures one model on labelled data, by default the run's own test data, with the run's head.

        `model`: the name of a checkpoint (base, a task's, last), "all" for the accuracy matrix of all checkpoints, a
        merge in memory, a preference, which is merged as `merge` does, or the path of any model of this architecture.
        Other options are those of the command: head, max_samples, device, ...

        >>> run.evaluate("last").accuracy.overall.value  # doctest: +SKIP
        0.42
        """
        subject: Any = model
        if isinstance(model, Preference):
            subject = recipe_of(self.path, preference=model)
        elif isinstance(model, str):
            places = {"last": self.tasks[-1], "all": self.path, "base": self.base, **self.checkpoints}
            subject = places.get(model, Path(model))
            if model not in places and not Path(model).exists():
                hint = closest(model, list(places))
                raise InputError(f"{self.path} has no checkpoint {model!r}{hint}; it has {some_of(places)}")
        # A tailored model has a head of its own, which goes before the run's.
        beside = isinstance(subject, os.PathLike) and any((Path(subject) / name).is_file() for name in HEAD_FILES)
        return evaluate(subject, data, run=None if beside else self.path, progress=progress, **options)
