"""The files that tailoring adds to a merged model, what is told of it, and how a complete one is recognised."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.config import LENIENT, check
from tunable_magmax.data.given import GivenSamples, Source
from tunable_magmax.engines.card import card_cell
from tunable_magmax.engines.log import read_report
from tunable_magmax.files import identities, read_json
from tunable_magmax.preference.preference import FILE, Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.showing import plural, shown_shares
from tunable_magmax.workflows.site import SiteSources

if TYPE_CHECKING:
    from tunable_magmax.merging.report import MergeReport

HEAD, PREFERENCE, RECORD = "head.safetensors", FILE, "tmx-tailor.json"
VERSION = 2
SHOWN, LEAST_SHOWN = 5, 0.01
"""So many tasks are named, those of largest weight, if they have at least so much."""
WIDTH, NAME_WIDTH = 80, 40
"""Columns of the summary, and of a task's name in it."""


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
    ood_share: float | None = None
    """The share of samples that are like none of the tasks'."""


@dataclass(frozen=True)
class MergeRecord:
    """The merge, and why it was taken. `tried`: candidates with their log loss, best first."""

    __pydantic_config__ = LENIENT
    method: str
    scale: float | str
    why: str
    effective_tasks: float
    tried: tuple[dict[str, Any], ...] = field(default=())
    judged_by: int = 0
    """Labelled samples that judged candidates."""


@dataclass(frozen=True)
class HeadRecord:
    """The head: "fitted" or "old", from how many samples, and its cross-validated log loss beside the old one's."""

    __pydantic_config__ = LENIENT
    kind: str
    note: str | None
    rows: int
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


# -- in words ---------------------------------------------------------------------------------------------------------


def summary_lines(record: TailorRecord) -> Iterator[str]:
    """Yields mixture, merge, head and expected accuracy, a line or two each, for screens of 80 columns."""
    found, merge, head = record.mixture, record.merge, record.head
    order = sorted(found.weights, key=lambda name: -found.weights[name])
    shown_tasks = [name for name in order[:SHOWN] if name == order[0] or found.weights[name] >= LEAST_SHOWN]
    parts = []
    for name in shown_tasks:
        pair = None if found.intervals is None else found.intervals[name]
        shown = name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 3]}..."
        parts.append(f"{shown} {found.weights[name]:.2f}{'' if pair is None else f' [{pair[0]:.2f}, {pair[1]:.2f}]'}")
    left = len(order) - len(shown_tasks)
    if left > 0:
        rest = max(0.0, 1 - sum(found.weights[name] for name in shown_tasks))
        parts.append(f"{plural(left, 'other')} {rest:.2f}")
    yield from _packed("mixture", parts)
    source = "" if found.samples is None else f"from {plural(found.samples, 'sample')} by {found.method}; "
    error = "" if found.expected_error is None else f"expected error {found.expected_error:.2f}; "
    yield f"{'':10}{source}{error}{merge.effective_tasks:.1f} tasks matter"
    scale = merge.scale if isinstance(merge.scale, str) else f"{merge.scale:g}"
    what = {"last_task": "the base as it is" if merge.scale == 0 else "the last checkpoint as it is"}
    yield from _wrapped("merge", f"{what.get(merge.method, f'{merge.method}, scale {scale}')}; {merge.why}")
    yield from _wrapped("head", head_words(head))
    if (own := record.expected.get("tailored")) is not None:
        titles = {"base": "base", "last": "last checkpoint"}
        others = [
            f"{title} {record.expected[name][0]:.0%}" for name, title in titles.items() if name in record.expected
        ]
        shares = [f"{own[0]:.0%} right [{own[1]:.0%}, {own[2]:.0%}]", *others]
        yield from _wrapped("expected", f"{', '.join(shares)}, heads fitted")
        if head.trained_on:
            yield f"{'':10}judged on kept samples that were trained on, so the truth may be lower"
    if record.simpler is not None:
        name, used = ("base", 0) if record.simpler == "base" else ("last checkpoint", 1)
        yield f"{'':10}the {name} is as good here: --method last_task --scale {used}"


def head_words(head: HeadRecord) -> str:
    """Returns what the head is, and from what."""
    if head.kind != "fitted":
        return f"the old one, with the site's shares; {head.note}"
    parts = [(head.kept, "kept"), (head.labelled, "labelled"), (head.profiles, "profile")]
    rows = " + ".join(f"{count:,} {name}" for count, name in parts if count)
    loss = "" if head.log_loss is None else f", log loss {head.log_loss:.2f}"
    old = "" if head.old_log_loss is None else f" (old head: {head.old_log_loss:.2f})"
    return f"fitted to {rows} samples{loss}{old}"


def _packed(title: str, parts: Sequence[str]) -> Iterator[str]:
    """Yields as many parts to a line as fit."""
    line = f"{title:10}"
    for k, part in enumerate(parts):
        if k and len(line) + len(part) > WIDTH:
            yield line.rstrip()
            line = " " * 10
        line += part + "  "
    yield line.rstrip()


def _wrapped(title: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, WIDTH, initial_indent=f"{title:10}", subsequent_indent=" " * 10)


def card_section(record: TailorRecord) -> str:
    """Returns the section of the model card: weights, merge, head, evidence, and how to use the model."""
    return "\n" + "\n".join(_card_lines(record)) + "\n"


def _card_lines(record: TailorRecord) -> Iterator[str]:
    found = record.mixture
    yield from ("## Tailored to a site", "")
    samples = "" if found.samples is None else f" from {plural(found.samples, 'sample')} of the site"
    error = "" if found.expected_error is None else f"; their expected error is {found.expected_error:.2f} (half-L1)"
    yield f"Weights by {found.method}{samples}{error}."
    yield from ("", "| task | weight | interval |", "| --- | ---: | --- |")
    for name, weight in found.weights.items():
        pair = None if found.intervals is None else found.intervals[name]
        shown = "" if pair is None else f"{pair[0]:.3f} to {pair[1]:.3f}"
        yield f"| {card_cell(name)} | {weight:.4f} | {shown} |"
    yield ""
    scale = record.merge.scale if isinstance(record.merge.scale, str) else f"{record.merge.scale:g}"
    yield f"Merged by `{record.merge.method}`, scale {scale} ({record.merge.why})."
    words = head_words(record.head)
    yield f"The head is {words}." if record.head.kind != "fitted" else f"The head was {words}."
    if record.likeliest:
        likely = ", ".join(f"{card_cell(name)} {share:.1%}" for name, share in record.likeliest.items())
        yield f"Likeliest classes: {likely}."
    for name, (value, low, high) in record.expected.items():
        yield f"Expected accuracy, {name}: {value:.1%} [{low:.1%}, {high:.1%}], with a fitted head."
    if record.expected and record.head.trained_on:
        yield "It was judged on samples that the tasks were trained on, so the truth may be lower."
    yield from (f"Warning: {text}." for text in record.warnings)
    yield from ("", "To use it:", "", "```", "tmx predict THIS_FOLDER photo.jpg", "```", "")
    yield from ("```python", "import tunable_magmax as tmx", "")
    yield from ('site = tmx.load_classifier("THIS_FOLDER")', "site.predict(inputs)", "```")


# -- a model that is complete -----------------------------------------------------------------------------------------


def fingerprint(run: Run, sources: SiteSources, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a finished model is recognised by: options, and sizes and times of all files that it depends on."""
    known = sources.named()
    files = {name: value for name, value in known.items() if isinstance(value, Path | GivenSamples)}
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
    inputs = [run.path / "run.json", run.base, *run.tasks, *head, *run.profile_files, *kept, *others]
    return _digest([_identity(path) for path in inputs])


def _identity(path: Source) -> str:
    if isinstance(path, GivenSamples):
        return path.digest()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return _digest([str(path.resolve()), identities(file for file in files if file.is_file())])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True, repr=False)
class Tailored:
    """A tailored model. `record` is what tmx-tailor.json holds; `seconds` by phase are in no file.

    `complete`: the model was there already, made from the same inputs with the same options. It stands for its
    directory wherever a path is expected.
    """

    out: Path
    record: TailorRecord
    preference: Preference
    labels: tuple[str, ...]
    report: MergeReport
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    complete: bool = False

    def __fspath__(self) -> str:
        return str(self.out)

    def __repr__(self) -> str:
        merge, again = self.record.merge, ", which was there already" if self.complete else ""
        told = f"; {plural(len(self.warnings), 'warning')}" if self.warnings else ""
        scale = merge.scale if isinstance(merge.scale, str) else f"{merge.scale:g}"
        return (
            f"Tailored({str(self.out)!r}{again}: {shown_shares(self.labels, self.preference.weights)};\n"
            f"  merged by {merge.method}, scale {scale}, head {self.record.head.kind}{told})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        about = {"already_complete": self.complete, "elements": self.report.elements, "files": dict(self.report.files)}
        record = {**asdict(self.record), "warnings": list(self.warnings), "notes": list(self.notes)}
        return {"out": str(self.out), **record, **about, "seconds": dict(self.seconds)}


def read_finished(out: Path, labels: tuple[str, ...]) -> Tailored:
    """Reads a tailored model that is complete."""
    record, report = read_record(out), read_report(out)
    return Tailored(out, record, Preference.load(out / PREFERENCE), labels, report, record.warnings, complete=True)


def read_record(out: Path) -> TailorRecord:
    """Reads the record in a tailored model's directory."""
    return check(TailorRecord, read_json(out / RECORD), str(out / RECORD))
