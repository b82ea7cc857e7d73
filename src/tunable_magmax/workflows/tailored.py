"""`Tailored`: a model that was made for a site; its record, as JSON and in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.config import LENIENT, check
from tunable_magmax.engines.outputs import card_cell, read_report
from tunable_magmax.errors import plural, shown_shares
from tunable_magmax.files import read_json
from tunable_magmax.preference.preference import FILE, Preference

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.workflows.predict import LoadedClassifier, Prediction

HEAD, PREFERENCE, RECORD = "head.safetensors", FILE, "tmx-tailor.json"
VERSION = 4
SHOWN, LEAST_SHOWN = 5, 0.01
"""So many tasks are named, those of largest weight, if they have at least so much."""


HOW_TO_USE = """To use it: `tmx predict THIS_FOLDER INPUTS`, or

```python
import tunable_magmax as tmx

tmx.load_classifier("THIS_FOLDER").predict(inputs)
```
"""


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

    @property
    def shown_scale(self) -> str:
        """The scale for people."""
        return self.scale if isinstance(self.scale, str) else f"{self.scale:g}"


@dataclass(frozen=True)
class HeadRecord:
    """The head: "fitted" or "old", from how many samples, and its cross-validated log loss beside the old one's."""

    __pydantic_config__ = LENIENT
    kind: str
    note: str | None
    """Why it is the old one."""
    kept: int = 0
    labelled: int = 0
    profiles: int = 0
    trained_on: bool = False
    """Whether kept samples were trained on, so that they flatter."""
    log_loss: float | None = None
    old_log_loss: float | None = None
    digest: str | None = None
    embedded: int = 0
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
    warnings: tuple[str, ...] = field(default=())
    version: int = VERSION

    def to_json(self) -> str:
        """Returns the file's text; equal records are equal bytes."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


# -- in words ---------------------------------------------------------------------------------------------------------


def record_lines(record: TailorRecord) -> Iterator[tuple[str, str, str]]:
    """Yields title, result and reason of mixture, merge, head and evidence: for the terminal and the card."""
    found, merge, head = record.mixture, record.merge, record.head
    whence = "" if found.samples is None else f"from {plural(found.samples, 'sample')} "
    error = "" if found.expected_error is None else f"expected error of these weights {found.expected_error:.2f}; "
    matter = f"effective number of tasks {found.effective_tasks:.2f}"
    yield "mixture", _weights(found), f"{whence}by {found.method}; {error}{matter}"
    made = f"{merge.method}, scale {merge.shown_scale}"
    if merge.method == "last_task":
        made = f"the {'base' if merge.scale == 0 else 'last checkpoint'} as it is"
    yield "merge", made, merge.why
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
        shares = "{:.0%} right [{:.0%}, {:.0%}]".format(*own)
        yield "expected", f"{shares}{others}", f"each with its own fitted head{flatters}"
    if record.simpler is not None:
        name, used = ("base", 0) if record.simpler == "base" else ("last checkpoint", 1)
        yield "simpler", f"the {name} cannot be told from it", f"--method last_task --scale {used} takes it"


def _weights(found: MixtureRecord) -> str:
    """Returns the largest weights with their intervals."""
    order = sorted(found.weights, key=lambda name: -found.weights[name])
    shown = [name for name in order[:SHOWN] if name == order[0] or found.weights[name] >= LEAST_SHOWN]
    ends = {} if found.intervals is None else {n: " [{:.2f}, {:.2f}]".format(*found.intervals[n]) for n in shown}
    parts = [f"{name} {found.weights[name]:.2f}{ends.get(name, '')}" for name in shown]
    if left := len(order) - len(shown):
        parts.append(f"{plural(left, 'other')} {max(0.0, 1 - sum(found.weights[name] for name in shown)):.2f}")
    return "   ".join(parts)


def card_section(record: TailorRecord) -> str:
    """Returns the section of the model card: what `record_lines` says, weights, and how to use the model."""
    lines = [f"- {title}: {card_cell(result)} ({card_cell(reason)})" for title, result, reason in record_lines(record)]
    lines += [f"- warning: {text}" for text in record.warnings]
    lines += ["", "| task | weight | interval |", "| --- | ---: | --- |"]
    ends = record.mixture.intervals
    for name, weight in record.mixture.weights.items():
        interval = "" if ends is None else "{:.3f} to {:.3f}".format(*ends[name])
        lines.append(f"| {card_cell(name)} | {weight:.4f} | {interval} |")
    return "\n".join(["", "## Tailored to a site", "", *lines, "", HOW_TO_USE])


# -- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Tailored:
    """A tailored model, ready to use. `record` is what tmx-tailor.json holds.

    `complete`: the model was there already, made from the same inputs with the same options. It stands for its
    directory wherever a path is expected.
    """

    out: Path
    record: TailorRecord
    preference: Preference
    report: MergeReport
    seconds: float = 0.0
    complete: bool = False
    temporary: TemporaryDirectory[str] | None = field(default=None, compare=False)
    """Where it lives if it was not asked to be kept."""

    def __fspath__(self) -> str:
        return str(self.out)

    def __repr__(self) -> str:
        merge, weights = self.record.merge, self.record.mixture.weights
        shares = shown_shares(list(weights), list(weights.values()))
        made = f"merged by {merge.method}, scale {merge.shown_scale}, head {self.record.head.kind}"
        return f"Tailored({str(self.out)!r}: {shares};\n  {made})"

    @classmethod
    def read(cls, out: Path, **about: Any) -> Tailored:
        """Reads a tailored model's directory."""
        return cls(out, read_record(out), Preference.load(out), read_report(out), **about)

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
        return {"out": str(self.out), **asdict(self.record), **about, "seconds": round(self.seconds, 3)}


def read_record(out: Path) -> TailorRecord:
    """Reads the record in a tailored model's directory."""
    return check(TailorRecord, read_json(out / RECORD), str(out / RECORD))
