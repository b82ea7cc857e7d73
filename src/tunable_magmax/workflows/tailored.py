"""`Tailored`: a model that was made for a site, its record, and how a complete one is recognised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.config import LENIENT, check
from tunable_magmax.data.memory import SampleSource
from tunable_magmax.data.samples import Samples
from tunable_magmax.engines.card import card_cell
from tunable_magmax.engines.log import read_report
from tunable_magmax.evaluation.choosing import effective_tasks
from tunable_magmax.files import identities, read_json
from tunable_magmax.preference.preference import FILE, Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.showing import plural, shown_shares
from tunable_magmax.workflows.material import site_shares
from tunable_magmax.workflows.site import SiteSources

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.workflows.predict import LoadedClassifier, Prediction
    from tunable_magmax.workflows.tailor import Decision

HEAD, PREFERENCE, RECORD = "head.safetensors", FILE, "tmx-tailor.json"
VERSION = 3
SHOWN, LEAST_SHOWN = 5, 0.01
"""So many tasks are named, those of largest weight, if they have at least so much."""
LONGEST_NAME = 40
LIKELIEST = 10


@dataclass(frozen=True)
class MixtureRecord:
    """What is believed of the site's weights, and from what."""

    __pydantic_config__ = LENIENT
    method: str
    samples: int | None
    weights: dict[str, float]
    intervals: dict[str, list[float]] | None
    expected_error: float | None
    """The half-L1 error to be expected of the weights; None of those given by hand."""
    effective_tasks: float
    ood_share: float | None = None
    """The share of samples that are like none of the tasks'."""


@dataclass(frozen=True)
class MergeRecord:
    """The merge, and why it was taken. `tried`: candidates with their log loss, best first."""

    __pydantic_config__ = LENIENT
    method: str
    scale: float | str
    why: str
    tried: tuple[dict[str, Any], ...] = ()
    judged_by: int = 0
    """Labelled samples that judged candidates."""


@dataclass(frozen=True)
class HeadRecord:
    """The head: "fitted" or "old", from how many samples, and its cross-validated log loss beside the old one's."""

    __pydantic_config__ = LENIENT
    kind: str
    note: str | None
    """Why it is the old one."""
    kept: int
    labelled: int
    profiles: int
    trained_on: bool
    """Whether kept samples were trained on, so that they flatter."""
    log_loss: float | None
    old_log_loss: float | None
    view: str
    shrinkage: float | None
    digest: str | None
    embedded: int
    """Forward passes that choosing and fitting took, in samples."""


@dataclass(frozen=True)
class TailorRecord:
    """What one tailoring found and made: tmx-tailor.json, the summary on the terminal, and the card."""

    __pydantic_config__ = LENIENT
    sources: dict[str, str]
    mixture: MixtureRecord
    merge: MergeRecord
    head: HeadRecord
    expected: dict[str, list[float]]
    """The accuracy to expect with its 90 % interval: of the tailored model, the base and the last checkpoint."""
    simpler: str | None
    """"base" or "last", if it cannot be told from the tailored model."""
    likeliest: dict[str, float]
    """The likeliest classes of the site with their shares."""
    warnings: tuple[str, ...] = field(default=())
    version: int = VERSION

    def to_json(self) -> str:
        """Returns the file's text; equal records are equal bytes."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def with_scale(self, scale: float) -> TailorRecord:
        """Returns the record with the number that the merge's scale was."""
        return replace(self, merge=replace(self.merge, scale=float(scale)))


def record_of(decision: Decision, run: Run, sources: SiteSources) -> TailorRecord:
    """Returns the record of a decision."""
    preference, fit, choice, evidence = decision.preference, decision.head, decision.choice, decision.evidence
    facts, ends = preference.provenance, preference.intervals
    samples, ood_share = facts.get("samples"), facts.get("ood_share")
    digest = None if decision.tensors is None else decision.tensors.digest
    # Rows of profiles were trained on, and moved: of what they judge nothing is told.
    judged = fit if fit is not None and decision.kept + decision.labelled else None
    merge = decision.merge_options
    mixture = MixtureRecord(
        preference.method,
        samples if isinstance(samples, int) else None,
        dict(zip(run.labels, preference.weights, strict=True)),
        None if ends is None else {name: list(pair) for name, pair in zip(run.labels, ends, strict=True)},
        preference.expected_error,
        round(effective_tasks(preference.weights), 2),
        float(ood_share) if isinstance(ood_share, (int, float)) else None,
    )
    return TailorRecord(
        sources={key: str(getattr(value, "name", value)) for key, value in sources.named().items()},
        mixture=mixture,
        merge=MergeRecord(
            merge["method"],
            merge["scale"],
            decision.why,
            () if choice is None else tuple(each.to_dict() for each in choice.tried),
            0 if choice is None else choice.rows,
        ),
        head=HeadRecord(
            "old" if fit is None else fit.kind,
            decision.note,
            decision.kept,
            decision.labelled,
            decision.profiles,
            decision.trained_on,
            _rounded(None if judged is None else judged.loss),
            _rounded(None if judged is None else judged.old_loss),
            "" if fit is None else fit.view,
            None if fit is None else fit.shrinkage,
            digest if decision.file is None else decision.file.digest,
            decision.embedded,
        ),
        expected={
            name: [round(value, 4) for value in (each.value, each.low, each.high)]
            for name, each in (evidence.expected if evidence is not None else {}).items()
        },
        simpler=None if evidence is None else evidence.simpler,
        likeliest=_likeliest(preference, decision.classes),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _likeliest(preference: Preference, classes: Sequence[str]) -> dict[str, float]:
    if preference.prior is None or not classes:
        return {}
    shares = site_shares(preference, classes)
    order = sorted(range(len(classes)), key=lambda k: (-shares[k], classes[k]))[:LIKELIEST]
    return {classes[k]: round(float(shares[k]), 6) for k in order}


# -- in words ---------------------------------------------------------------------------------------------------------


def record_lines(record: TailorRecord) -> Iterator[tuple[str, str, str]]:
    """Yields title, result and reason of mixture, merge, head and evidence: for the terminal and the card."""
    found, merge, head = record.mixture, record.merge, record.head
    error = "" if found.expected_error is None else f"expected error of these weights {found.expected_error:.2f}; "
    whence = "" if found.samples is None else f"from {plural(found.samples, 'sample')} "
    matter = f"effective number of tasks {found.effective_tasks:.2f}"
    yield "mixture", _weights(found), f"{whence}by {found.method}; {error}{matter}"
    scale = merge.scale if isinstance(merge.scale, str) else f"{merge.scale:g}"
    as_it_is = f"the {'base' if merge.scale == 0 else 'last checkpoint'} as it is"
    yield "merge", as_it_is if merge.method == "last_task" else f"{merge.method}, scale {scale}", merge.why
    if head.kind == "fitted":
        parts = [(head.kept, "kept"), (head.labelled, "labelled"), (head.profiles, "profile")]
        rows = " + ".join(f"{count:,} {name}" for count, name in parts if count)
        loss = "" if head.log_loss is None else f"; log loss {head.log_loss:.2f}"
        old = "" if head.old_log_loss is None else f" (old head: {head.old_log_loss:.2f})"
        yield "head", "fitted to the merged encoder", f"{rows} samples{loss}{old}"
    else:
        yield "head", "the old one, with the site's class shares", str(head.note)
    if (own := record.expected.get("tailored")) is not None:
        titles = {"base": "base", "last": "last checkpoint"}
        others = "".join(f"   {titles[n]} {record.expected[n][0]:.0%}" for n in titles if n in record.expected)
        flatters = "; on kept samples that were trained on, so the truth may be lower" if head.trained_on else ""
        shares = f"{own[0]:.0%} right [{own[1]:.0%}, {own[2]:.0%}]{others}"
        yield "expected", shares, f"each with its own fitted head{flatters}"
    if record.simpler is not None:
        name, used = ("base", 0) if record.simpler == "base" else ("last checkpoint", 1)
        yield "simpler", f"the {name} cannot be told from it", f"--method last_task --scale {used} takes it"


def _weights(found: MixtureRecord) -> str:
    """Returns the largest weights with their intervals."""
    order = sorted(found.weights, key=lambda name: -found.weights[name])
    shown = [name for name in order[:SHOWN] if name == order[0] or found.weights[name] >= LEAST_SHOWN]
    parts = []
    for name in shown:
        ends = "" if found.intervals is None else " [{:.2f}, {:.2f}]".format(*found.intervals[name])
        short = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."
        parts.append(f"{short} {found.weights[name]:.2f}{ends}")
    if left := len(order) - len(shown):
        parts.append(f"{plural(left, 'other')} {max(0.0, 1 - sum(found.weights[name] for name in shown)):.2f}")
    return "   ".join(parts)


def card_section(record: TailorRecord) -> str:
    """Returns the section of the model card: what `record_lines` says, weights, and how to use the model."""
    lines = ["", "## Tailored to a site", ""]
    lines += [f"- {title}: {card_cell(result)} ({card_cell(reason)})" for title, result, reason in record_lines(record)]
    if record.likeliest:
        likely = ", ".join(f"{card_cell(name)} {share:.1%}" for name, share in record.likeliest.items())
        lines.append(f"- likeliest classes: {likely}")
    lines += [f"- warning: {text}" for text in record.warnings]
    lines += ["", "| task | weight | interval |", "| --- | ---: | --- |"]
    for name, weight in record.mixture.weights.items():
        ends = record.mixture.intervals
        lines.append(
            f"| {card_cell(name)} | {weight:.4f} | {'' if ends is None else '{:.3f} to {:.3f}'.format(*ends[name])} |"
        )
    lines += ["", "To use it:", "", "```", "tmx predict THIS_FOLDER photo.jpg", "```", ""]
    lines += ["```python", "import tunable_magmax as tmx", ""]
    lines += ['site = tmx.load_classifier("THIS_FOLDER")', "site.predict(inputs)", "```", ""]
    return "\n".join(lines)


# -- a model that is complete -----------------------------------------------------------------------------------------


def fingerprint(run: Run, sources: SiteSources, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a finished model is recognised by: options, and sizes and times of all files that it depends on."""
    known = sources.named()
    files = {name: value for name, value in known.items() if isinstance(value, Path | Samples)}
    return {
        "tailor": VERSION,
        "options": {key: str(value) for key, value in options.items()},
        "sources": {name: str(value) for name, value in known.items() if name not in files},
        "samples": {name: _identity(value) for name, value in files.items()},
        "run": run_identity(run),
    }


def run_identity(run: Run, others: Sequence[Path] = ()) -> str:
    """Returns a digest of names, sizes and times of all files of a run that models and heads depend on."""
    kept = [run.path / entry.path for entry in run.kept if entry is not None]
    head = [] if run.head is None else [run.head]
    profiles = [run.path / task.profile for task in run.record.tasks if task.profile is not None]
    inputs = [run.path / "run.json", run.base, *run.tasks, *head, *profiles, *kept, *others]
    return _digest([_identity(path) for path in inputs])


def _identity(path: SampleSource) -> str:
    if isinstance(path, Samples):
        return path.digest()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return _digest([str(path.resolve()), identities(file for file in files if file.is_file())])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True, repr=False)
class Tailored:
    """A tailored model, ready to use. `record` is what tmx-tailor.json holds.

    `complete`: the model was there already, made from the same inputs with the same options. It stands for its
    directory wherever a path is expected.
    """

    out: Path
    record: TailorRecord
    preference: Preference
    labels: tuple[str, ...]
    report: MergeReport
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    complete: bool = False
    temporary: TemporaryDirectory[str] | None = field(default=None, compare=False)
    """Where it lives if it was not asked to be kept."""

    def __fspath__(self) -> str:
        return str(self.out)

    def __repr__(self) -> str:
        merge, again = self.record.merge, ", which was there already" if self.complete else ""
        warned = f"; {plural(len(self.warnings), 'warning')}" if self.warnings else ""
        scale = merge.scale if isinstance(merge.scale, str) else f"{merge.scale:g}"
        return (
            f"Tailored({str(self.out)!r}{again}: {shown_shares(self.labels, self.preference.weights)};\n"
            f"  merged by {merge.method}, scale {scale}, head {self.record.head.kind}{warned})"
        )

    @cached_property
    def classifier(self) -> LoadedClassifier:
        """The model with its head, loaded when it is first used."""
        from tunable_magmax.workflows.predict import load_classifier

        return load_classifier(self.out)

    def predict(self, inputs: Any, top: int = 1) -> list[Prediction]:
        """Returns the likeliest class of each input, as `LoadedClassifier.predict` does."""
        return self.classifier.predict(inputs, top)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        about = {"already_complete": self.complete, "elements": self.report.elements, "files": dict(self.report.files)}
        record = {**asdict(self.record), "warnings": list(self.warnings)}
        return {"out": str(self.out), **record, **about, "seconds": round(self.seconds, 3)}


def read_finished(out: Path, labels: tuple[str, ...]) -> Tailored:
    """Reads a tailored model that is complete."""
    record, report = read_record(out), read_report(out)
    return Tailored(out, record, Preference.load(out / PREFERENCE), labels, report, record.warnings, complete=True)


def read_record(out: Path) -> TailorRecord:
    """Reads the record in a tailored model's directory."""
    return check(TailorRecord, read_json(out / RECORD), str(out / RECORD))
