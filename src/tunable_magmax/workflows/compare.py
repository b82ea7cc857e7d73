"""What `tmx compare` does: says which model of a run is best for a site, by labelled samples of it."""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.engines.log import read_report
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.evaluation.accuracy import LEVEL, Share
from tunable_magmax.evaluation.bench import Bench, BenchData, SiteFacts
from tunable_magmax.evaluation.comparison import ALPHA, Paired, Verdict, holm, paired
from tunable_magmax.evaluation.run_models import (
    BASE,
    MergeSpec,
    merged_labels,
    refuse_adapters,
    refuse_too_large,
    task_labels,
)
from tunable_magmax.files import Progress
from tunable_magmax.models.builtin import BuiltinEncoder
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.showing import data_frame, plural
from tunable_magmax.workflows.material import open_material
from tunable_magmax.workflows.merge import require_tasks
from tunable_magmax.workflows.options import Reading
from tunable_magmax.workflows.prefer import completed
from tunable_magmax.workflows.scoring import Data, find_head, open_encoder, open_head, open_labelled
from tunable_magmax.workflows.tailor import TailorOptions, choose_spec
from tunable_magmax.workflows.tailored import PREFERENCE, read_record

if TYPE_CHECKING:
    import pandas

    from tunable_magmax.models.head import Head

VERSION = 2
HeadKind = Literal["fitted", "old", "own"]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Rivals:
    """What is compared beside the tailored model.

    `scales`: of Tunable MAGMAX. `old_heads`: every model also with the head that it had before fitting, and the site's
    class shares. `seed`: of the merges' keys; the directory of a tailored model has its own.
    """

    scales: Sequence[float | str] = (0.5, 1.0)
    old_heads: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """A model with a head, against the tailored model, which has None in all that says how they differ.

    `head`: "fitted" for this comparison, "old" as it was, or "own", which the tailored model's directory holds.
    """

    model: str
    head: HeadKind
    spec: MergeSpec | None
    """None of a directory."""
    share: Share
    pair: Paired | None = None
    p_value: float | None = None
    """Corrected for the number of comparisons."""
    verdict: Verdict | None = None
    needed: int | None = None
    """About how many samples would tell the two apart, if their difference is real; None if there is none."""

    @property
    def title(self) -> str:
        """What tables and sentences call it."""
        return f"{self.model}, old head" if self.head == "old" else self.model

    def to_dict(self, level: float) -> dict[str, Any]:
        """Returns everything for JSON."""
        spec = self.spec
        return {
            "model": self.model,
            "head": self.head,
            "method": None if spec is None else spec.method,
            "scale": None if spec is None else spec.scale,
            "checkpoint": None if spec is None else spec.checkpoint,
            "right": self.share.right,
            "accuracy": self.share.value,
            "interval": list(self.share.interval(level)),
            "won": None if self.pair is None else self.pair.won,
            "lost": None if self.pair is None else self.pair.lost,
            "difference": None if self.pair is None else self.pair.difference,
            "p_value": self.p_value,
            "verdict": self.verdict,
            "needed": self.needed,
        }


@dataclass(frozen=True, repr=False)
class Comparison:
    """Models of a run on a site's samples, best first; of equal ones the tailored, then the simpler one.

    `preference`: its file, or None for equal weights. `model`: the directory of the tailored model, if one was given.
    `kept`: kept samples that heads are fitted to.
    """

    run: str
    data: str
    preference: str | None
    model: str | None
    weights: dict[str, float]
    samples: int
    unreadable: int
    unknown_labels: int
    kept: int
    rows: tuple[Row, ...]
    level: float = LEVEL

    def __repr__(self) -> str:
        return f"Comparison({len(self.rows)} models of {self.run} on {self.data}:\n  {self.sentences()[0]})"

    @property
    def tailored(self) -> Row:
        """The model in `model`; else what `tmx tailor` would choose for the preference."""
        return next(row for row in self.rows if row.pair is None)

    def to_frame(self) -> pandas.DataFrame:
        """Returns a row for each model, best first, as a pandas frame."""
        records = [row.to_dict(self.level) for row in self.rows]
        names = ("head", "accuracy", "difference", "p_value", "verdict")
        columns: dict[str, list[Any]] = {name: [record[name] for record in records] for name in names}
        columns |= {end: [record["interval"][k] for record in records] for k, end in enumerate(("low", "high"))}
        columns["tailored"] = [row.pair is None for row in self.rows]
        return data_frame(columns, [record["model"] for record in records], "model")

    def sentences(self) -> list[str]:
        """Returns who wins, and whether a checkpoint would do without any merge."""
        mine, best = self.tailored, self.rows[0]
        others = [row for row in self.rows if row is not mine]
        fewest = least_samples(len(others))
        if self.samples < fewest:
            count = plural(self.samples, "sample")
            return [f"No verdict: {count} cannot tell any of these models apart; at least {fewest} are needed."]
        beaten = sum(row.verdict == "clearly worse" for row in others)
        lead = f"clearly better than {beaten} of the {len(others)} others"
        if best is mine:
            lines = [f"The tailored model is the best: {mine.share.value:.1%} right, {lead}."]
        else:
            lines = [verdict(best, mine)]
            if best.verdict == "clearly better" and (command := self._command(best)) is not None:
                lines.append(f"`{command}` makes `{best.title}`.")
            elif beaten:
                lines.append(f"The tailored model is {lead}.")
        plain = next((row for row in others if row.spec is not None and row.spec.checkpoint is not None), None)
        if plain is not None and plain.verdict != "clearly worse":
            lines += [] if plain is best else [verdict(plain, mine)]
            lines.append(f"`{plain.model}` needs no merge.")
        return lines

    def _command(self, row: Row) -> str | None:
        """Returns the command that makes a model with its head; None of a task's checkpoint."""
        spec = row.spec
        if spec is None or (spec.checkpoint is not None and row.model not in ("base", "last")):
            return None
        method, scale = ("last_task", int(not spec.is_base)) if spec.method is None else (spec.method, spec.scale)
        words = ["tmx", "tailor", self.run]
        words += ["--equal"] if self.preference is None else ["--preference", self.preference]
        words += ["--method", method, "--scale", scale if isinstance(scale, str) else f"{scale:g}"]
        return shlex.join([*words, *(["--head", "old"] if row.head == "old" else []), "-o", "OUT"])

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        plain = {name: value for name, value in vars(self).items() if name != "rows"}
        return {
            "version": VERSION,
            **plain,
            "tailored": self.rows.index(self.tailored),
            "rows": [row.to_dict(self.level) for row in self.rows],
            "summary": self.sentences(),
        }


def verdict(one: Row, tailored: Row) -> str:
    """Returns what the samples say of a model against the tailored one, as a sentence."""
    assert one.pair is not None
    shares = f"{one.share.value:.1%} against {tailored.share.value:.1%}"
    if one.verdict != "cannot tell":
        return f"`{one.title}` is {one.verdict} than the tailored model: {shares}."
    count = plural(one.share.samples, "sample")
    would = "" if one.needed is None else f"; about {one.needed:,} would, if the difference is real"
    return f"{count} cannot tell `{one.title}` from the tailored model ({shares}){would}."


def least_samples(comparisons: int) -> int:
    """Returns how many samples a sign test needs before any difference can be clear among so many comparisons.

    >>> least_samples(1), least_samples(20)
    (6, 10)
    """
    return 1 + math.ceil(math.log2(max(1, comparisons) / ALPHA))


def compared_rows(models: Sequence[tuple[str, HeadKind, MergeSpec | None, Bools]], tailored: int) -> tuple[Row, ...]:
    """Compares models, each with the samples that it gets right, with the one at place `tailored`; best first."""
    mine = models[tailored][3]
    pairs = [paired(right, mine) for *_, right in models]
    others = [k for k in range(len(models)) if k != tailored]
    corrected = dict(zip(others, holm([pairs[k].p_value for k in others]), strict=True))
    rows = []
    for k, (model, head, spec, right) in enumerate(models):
        row = Row(model, head, spec, Share(int(right.sum()), len(right)))
        if k != tailored:
            needed = pairs[k].needed(ALPHA / len(others))
            needed = None if needed is None else max(needed, least_samples(len(others)))
            row = replace(
                row, pair=pairs[k], p_value=corrected[k], verdict=pairs[k].verdict(corrected[k]), needed=needed
            )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: (-row.share.right, row.pair is not None)))


# -- comparing --------------------------------------------------------------------------------------------------------


def compare(
    run: Run | str | Path,
    preference: Preference | str | Path | None = None,
    data: Data = None,
    *,
    head: str | Path | None = None,
    rivals: Rivals = Rivals(),  # noqa: B008  (frozen)
    reading: Reading | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Measures base, every task's checkpoint, merges and the tailored model on the same labelled samples.

    Every model gets a head that is fitted to it with the run's kept samples, for the class shares of the preference;
    never with the samples that are compared on. Each is compared with the tailored model by an exact sign test,
    corrected for the number of comparisons. `preference`: by default equal weights. The directory of a tailored model
    is compared as it is. `data` and `head` are as for `evaluate`.

    >>> compare("run", "site.json", "site/test").sentences()  # doctest: +SKIP
    ['The tailored model is the best: 71.2% right, clearly better than 9 of the 15 others.']
    """
    reading = reading or Reading()
    site = _open(run, preference, head, rivals)
    labelled, origin = open_labelled(data, site.head, site.run, reading)
    folder, weights = site.folder, tuple(site.preference.weights)
    with Bench(site.run, head=_file_head(site.head), seed=site.seed, device=reading.device, progress=progress) as bench:
        samples = bench.open_labelled("compared", labelled)
        specs = _candidates(site.run, weights, rivals.scales)
        fewest = least_samples((1 + rivals.old_heads) * len(specs))
        if len(samples) < fewest:
            warnings.warn(
                f"{plural(len(samples), 'sample')} cannot show any difference between so many models, however large "
                f"it is: give at least {fewest}, better some hundred",
                stacklevel=2,
            )
        material = open_material(bench, site.preference, fits=bool(bench.views))
        facts, mine = material.all, None
        if folder is None:
            mine, _, _ = choose_spec(bench, site.preference, TailorOptions(seed=site.seed), material)
            specs = list(dict.fromkeys([*specs, mine]))
        models: list[tuple[str, HeadKind, MergeSpec | None, Bools]] = []
        for done, spec in enumerate(specs, 1):
            title, fitted = model_title(site.run, spec), bench.fit(spec, facts)
            kind: HeadKind = "old" if fitted.kind == "old" else "fitted"
            models.append((title, kind, spec, _right(bench.logits(spec, samples, fitted.linear), samples)))
            if rivals.old_heads and kind == "fitted":
                logits = _old_logits(bench, spec, samples, facts)
                models += [] if logits is None else [(title, "old", spec, _right(logits, samples))]
            if progress is not None:
                progress("comparing", done, len(specs))
        if folder is not None:
            right = _right_as_written(folder, samples, site.run, bench.classes, reading)
            models.append((folder.name or str(folder), "own", None, right))
    place = next(k for k, (_, _, spec, _) in enumerate(models) if spec == mine)
    return Comparison(
        str(site.run.path),
        origin,
        site.file,
        None if folder is None else str(folder),
        dict(zip(site.run.labels, map(float, weights), strict=True)),
        len(samples),
        samples.prepared.failed,
        labelled.unknown,
        0 if facts.kept is None else len(facts.kept),
        compared_rows(models, place),
    )


def check_comparison(
    run: Run | str | Path,
    preference: Preference | str | Path | None = None,
    data: Data = None,
    *,
    head: str | Path | None = None,
    rivals: Rivals = Rivals(),  # noqa: B008  (frozen)
    reading: Reading | None = None,
) -> dict[str, Any]:
    """Returns what `compare` would do, from headers alone; what prevents it is an error."""
    site = _open(run, preference, head, rivals)
    labelled, origin = open_labelled(data, site.head, site.run, reading or Reading())
    specs = _candidates(site.run, site.preference.weights, rivals.scales)
    titles = list(dict.fromkeys(model_title(site.run, spec) for spec in specs))
    return {
        "run": str(site.run.path),
        "data": origin,
        "samples": len(labelled),
        "models": titles,
        "tailored": "what tmx tailor would choose" if site.folder is None else str(site.folder),
        "old_heads": rivals.old_heads,
    }


@dataclass(frozen=True)
class _Site:
    run: Run
    preference: Preference
    head: Head
    folder: Path | None
    """The directory of a tailored model."""
    file: str | None
    seed: int


def _open(
    run: Run | str | Path, preference: Preference | str | Path | None, head: str | Path | None, rivals: Rivals
) -> _Site:
    trained = run if isinstance(run, Run) else Run.open(run)
    folder, file, seed = None, None, rivals.seed
    if preference is None:
        chosen = Preference.equal(len(trained.tasks))
    elif isinstance(preference, Preference):
        chosen, file = preference, "FILE"
    else:
        chosen, file = Preference.load(preference), str(preference)
        if Path(preference).is_dir():
            folder, file = Path(preference), str(Path(preference) / PREFERENCE)
    name = "the preference" if isinstance(preference, Preference) else str(file)
    require_tasks(chosen, trained.names, name)
    if len(chosen.weights) != len(trained.tasks):
        raise InputError(
            f"{name} has {len(chosen.weights)} weights, and {trained.path} has {len(trained.tasks)} tasks: make a "
            f"preference for this run with `tmx prefer {trained.path}`"
        )
    refuse_adapters(trained.tasks)
    refuse_too_large(trained.base, trained.tasks)
    if folder is None:
        chosen = completed(chosen, trained)
    else:
        read_record(folder)
        report = read_report(folder)
        heads = report.options.get("heads")
        trained, seed = trained.with_heads(heads if isinstance(heads, str) else None), report.seed
    if head is not None and trained.head is None and merged_labels(trained.base, trained.tasks, trained.heads):
        raise InputError(
            f"the tasks of {trained.path} have classifiers of their own: leave out --head, or enter the head into the "
            f"run with `tmx init {trained.path} --head {head}`"
        )
    head_file, _ = find_head(trained.base, head, trained)
    return _Site(trained, chosen, open_head(head_file)[0], folder, file, seed)


def _file_head(head: Head) -> Head | None:
    return None if head.builtin else head


def _candidates(run: Run, weights: Sequence[Any], scales: Sequence[float | str]) -> list[MergeSpec]:
    """Returns what is worth comparing: base, every task's checkpoint, other merges, Tunable MAGMAX at each scale."""
    shares = tuple(weights)
    sizes = [scale if isinstance(scale, str) else float(scale) for scale in scales]
    specs = [
        BASE,
        *(MergeSpec(checkpoint=t) for t in range(1, len(run.tasks) + 1)),
        MergeSpec("average", 1.0, shares),
        MergeSpec("magmax", "matched"),
        MergeSpec("tsv", 1.0, shares),
        *(MergeSpec("tunable_magmax", scale, shares) for scale in sizes),
    ]
    return list(dict.fromkeys(specs))


def model_title(run: Run, spec: MergeSpec) -> str:
    """Returns what a model of a run is called in a table: "base", "last", "task NAME", or method and scale."""
    if spec.checkpoint is None:
        scale = spec.scale if isinstance(spec.scale, str) else f"{spec.scale:g}"
        return f"{spec.method} {scale}"
    return ["base", *(f"task {name}" for name in run.labels[:-1]), "last"][spec.checkpoint]


def _right(logits: NDArray[np.float64], data: BenchData) -> Bools:
    right: Bools = logits.argmax(axis=1) == data.labels
    return right


def _old_logits(bench: Bench, spec: MergeSpec, data: BenchData, facts: SiteFacts) -> NDArray[np.float64] | None:
    """Returns the logits of a model with the head that it had, for the site's class shares; None if it had none.

    A checkpoint with a classifier of its own answers with that alone: it knows its own labels only.
    """
    plain = replace(facts, kept=None, labelled=None, inputs=None, moved=False)
    known = np.ones(len(bench.classes), dtype=bool)
    if bench.is_builtin and spec.checkpoint is not None:
        run = bench.run
        own = _base_labels(run) if spec.is_base else task_labels(run.base, run.tasks)[spec.checkpoint - 1]
        known = np.isin(bench.classes, own or ())
        if not known.any():
            return None
    logits = bench.logits(spec, data, bench.fit(spec, plain).linear)
    logits[:, ~known] = -np.inf
    return logits


def _base_labels(run: Run) -> tuple[str, ...] | None:
    from tunable_magmax.models.builtin import builtin_labels

    return builtin_labels(run.base)


def _right_as_written(folder: Path, data: BenchData, run: Run, classes: Sequence[str], reading: Reading) -> Bools:
    """Returns which samples the model in a directory gets right, as `tmx eval` measures it."""
    from tunable_magmax.models.prepared import embed_prepared

    head = open_head(find_head(folder)[0])[0]
    lacking = [name for name in classes if name not in head.classes]
    if lacking:
        raise InputError(
            f"{folder} does not know {plural(len(lacking), 'class', 'classes')} of {run.path}, first "
            f"{some_of(lacking[:1], show=repr)}: it was made with another head; give that one as --head"
        )
    places = np.array([head.classes.index(name) for name in classes], dtype=np.int64)
    encoder = open_encoder(folder, head, run, reading.device)
    used = encoder.head if isinstance(encoder, BuiltinEncoder) else head
    logits = used.logits(embed_prepared(encoder, data.prepared, reading.batch))
    right: Bools = logits.argmax(axis=1) == places[data.labels]
    return right
