"""The files that tailoring adds to a merged model, and how a model that is complete already is recognised."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.checkpoints.partial import Partial
from tunable_magmax.data.given import GivenSamples, Source
from tunable_magmax.engines.card import card_cell
from tunable_magmax.engines.log import read_report
from tunable_magmax.files import identities, load_json, read_json, write_atomic
from tunable_magmax.preference.preference import FILE, Preference
from tunable_magmax.preference.prior import SitePrior
from tunable_magmax.runs.run import Run
from tunable_magmax.showing import number, shown_shares
from tunable_magmax.workflows.target import TargetReading, TargetSources

if TYPE_CHECKING:
    from tunable_magmax.merging.report import MergeReport

HEAD, PREFERENCE, RECORD = "head.safetensors", FILE, "tmx-tailor.json"
VERSION = 1
LIKELY = 10
"""How many of the likeliest classes a record and a card name."""


def prior_record(prior: SitePrior | None, classes: Sequence[str], logit_factor: float) -> dict[str, Any] | None:
    """Returns what the record says of a prior, whose shares are in the preference, and of the head that it is for."""
    if prior is None:
        return None
    shares = likeliest(prior, classes)
    return {"eps": prior.eps, "source": prior.source, "logit_factor": logit_factor, "likeliest": shares}


def factor_sentence(factor: float) -> str | None:
    """Says that a head was sharpened; None if it was not.

    >>> factor_sentence(3.4)
    "the head's logits were too flat for a prior, by the profiles' labelled rows: its logit scale is 3.4 times as large"
    """
    why = "the head's logits were too flat for a prior, by the profiles' labelled rows"
    return None if factor == 1 else f"{why}: its logit scale is {factor:g} times as large"


def likeliest(prior: SitePrior, classes: Sequence[str], count: int = LIKELY) -> dict[str, float]:
    """Returns the likeliest classes and their shares as a head of these classes has them: with what eps spreads.

    Equal shares are in the order of the classes' names.

    >>> likeliest(SitePrior({"cat": 1, "dog": 3}, eps=0.1), ["cat", "dog"], 1)
    {'dog': 0.725}
    """
    known = {name: prior.shares[name] for name in classes if prior.shares.get(name, 0.0) > 0}
    whole, even = sum(known.values()), prior.eps / len(classes)
    shares = {name: round((1 - prior.eps) * share / whole + even, 9) for name, share in known.items()}
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0]))[:count])


def weights_words(method: str) -> str:
    """Returns where weights come from.

    >>> weights_words("probe"), weights_words("weights")
    ('weights by probe', 'weights given by hand')
    """
    return "weights given by hand" if method == "weights" else f"weights by {method}"


def weights_error(found: Mapping[str, Any]) -> str:
    """Returns the expected error of a record's weights, as the end of a sentence; nothing is known of an opinion's.

    >>> weights_error({"method": "probe", "expected_error": 0.08}), weights_error({"expected_error": None})
    ('; expected error 0.08', '')
    """
    error = found["expected_error"]
    return "" if error is None else f"; expected error {error:.2f}"


def record_bytes(record: Mapping[str, Any]) -> bytes:
    """Returns the content of tmx-tailor.json: equal records are equal bytes."""
    return (json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def without_paths(text: str, paths: Sequence[Path | None]) -> str:
    """Returns a text in which paths are only names, so that equal inputs elsewhere give equal bytes.

    >>> without_paths("/data/site/images: 1 of 3 samples", [Path("/data/site"), Path("/data/site/images")])
    'images: 1 of 3 samples'
    >>> without_paths("/data/site-2/a.png is no image", [Path("/data/site")])
    '/data/site-2/a.png is no image'
    """
    named = {str(path): path.name for path in paths if path is not None and path.name}
    if not named:
        return text
    longest_first = "|".join(map(re.escape, sorted(named, key=len, reverse=True)))
    # Whole paths only: neither the end of another one, nor the beginning of a longer name.
    whole = rf"(?<![\w./-])(?:{longest_first})(?![\w-]|\.\w)"
    return re.sub(whole, lambda match: named[match[0]], text)


# -- the model card ---------------------------------------------------------------------------------------------------


def card_section(record: Mapping[str, Any], preference: Preference, labels: Sequence[str]) -> str:
    """Returns the section of the model card: weights, prior, scale, evidence, and how to use the model."""
    return "\n" + "\n".join(_card_lines(record, preference, labels)) + "\n"


def _card_lines(record: Mapping[str, Any], preference: Preference, labels: Sequence[str]) -> Iterator[str]:
    found, merge, prior = record["preference"], record["merge"], record["prior"]
    samples = f" from {found['samples']} samples of the site" if found["samples"] else ""
    yield from ("## Tailored to a site", "")
    words = weights_words(found["method"]).replace("weights", "Weights", 1)
    error = weights_error(found)
    yield f"{words}{samples}{error}{' (half-L1)' if error else ''}."
    yield from ("", "| task | weight | interval |", "| --- | ---: | --- |")
    ends = preference.intervals or [None] * len(labels)
    for label, weight, pair in zip(labels, preference.weights, ends, strict=True):
        shown = "" if pair is None else f"{pair[0]:.3f} to {pair[1]:.3f}"
        yield f"| {card_cell(label)} | {weight:.4f} | {shown} |"
    yield ""
    if prior is None:
        yield "The head has no site prior: all classes count alike."
    else:
        likely = ", ".join(f"{card_cell(name)} {share:.1%}" for name, share in prior["likeliest"].items())
        where = "the bias of the classifier" if record.get("own_head") else "the head's logits"
        yield f"Site prior, added to {where}: {likely}; {prior['eps']:.1%} of it is spread over all classes."
    yield f"Merged by `{merge['method']}` ({merge['why']}), scale {merge['scale']:g} ({merge['scale_from']})."
    yield from (f"{line[0].upper()}{line[1:]}." for line in evidence_lines(record))
    yield from (f"Warning: {text}." for text in record["warnings"])
    yield from ("", "To use it:", "", "```", "tmx predict THIS_FOLDER photo.jpg", "```", "")
    yield from ("```python", "import tunable_magmax as tmx", "")
    yield from ('site = tmx.load_classifier("THIS_FOLDER")', "site.predict(inputs)", "```")


def evidence_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Yields what profiles say about the head, and labels, or a probe, about the model.

    A check that gave a warning is told there.
    """
    if record["prior"] is not None:
        yield from filter(None, [factor_sentence(record["prior"].get("logit_factor", 1))])
    for part in ("choice", "scale_by_pairs", "check"):
        if record[part] is not None and not record[part].get("overshoots"):
            yield from (record[part][key] for key in ("sentence", "simpler") if record[part].get(key))


# -- a model that is complete -----------------------------------------------------------------------------------------


def fingerprint(run: Run, sources: TargetSources, reading: TargetReading, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a finished model is recognised by: options, and sizes and times of all files that it depends on."""
    known = sources.named()
    files = {name: value for name, value in known.items() if isinstance(value, Path | GivenSamples)}
    classifier = [reading.classifier, reading.classifier_checkpoint, run.head, run.classifier_checkpoint]
    inputs = [run.path / "run.json", run.base, *run.tasks, *filter(None, classifier), *run.profile_files]
    return {
        "tailor": VERSION,
        "options": {key: str(value) for key, value in options.items()},
        "sources": {name: str(value) for name, value in known.items() if name not in files},
        "samples": {name: _identity(value) for name, value in files.items()},
        "run": _digest([_identity(path) for path in inputs]),
    }


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
    record: Mapping[str, Any]
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
        merge, again = self.record["merge"], ", which was there already" if self.complete else ""
        prior = "no site prior" if self.record["prior"] is None else "with a site prior"
        told = f"; {number(len(self.warnings), 'warning')}" if self.warnings else ""
        return (
            f"Tailored({str(self.out)!r}{again}: {shown_shares(self.labels, self.preference.weights)};\n"
            f"  merged by {merge['method']}, scale {merge['scale']:g}, {prior}{told})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        record = {key: value for key, value in self.record.items() if key != "warnings"}
        files = dict(self.report.files)
        about = {"already_complete": self.complete, "elements": self.report.elements, "files": files}
        warned = {"warnings": list(self.warnings), "notes": list(self.notes)}
        return {"out": str(self.out), **record, **about, "seconds": dict(self.seconds), **warned}


def read_finished(out: Path, labels: tuple[str, ...]) -> Tailored:
    """Reads a tailored model that is complete."""
    record, report = read_json(out / RECORD), read_report(out)
    texts = (*record["warnings"], *report.warnings)
    return Tailored(out, record, Preference.load(out / PREFERENCE), labels, report, texts, complete=True)


# -- a model that was not finished ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unfinished:
    """A note in the directory of unfinished work: which tailoring it is of, and which merge that had come to.

    An estimate that is made again, on a GPU or with another number of threads, may differ in its last bits. Then what
    was merged cannot be continued, but it is no other user's work either.
    """

    out: Path
    fingerprint: Mapping[str, Any]
    merge: Mapping[str, Any] | None = None

    @property
    def file(self) -> Path:
        """Where the note is; it goes away together with the directory."""
        return Partial.of(self.out).path / "tailor.json"

    @property
    def content(self) -> dict[str, Any]:
        """What the note says."""
        content: dict[str, Any] = json.loads(json.dumps({"tailoring": self.fingerprint, "merge": self.merge}))
        return content

    def leave(self) -> None:
        """Leaves the note, once the merge has begun."""
        if self.file.parent.is_dir() and not self.file.exists():
            with suppress(OSError):  # the note is a help, and a full disk shows elsewhere
                write_atomic(self.file, json.dumps(self.content, indent=1).encode())

    def is_there(self) -> bool:
        """Whether there is unfinished work of this tailoring."""
        found = self._found()
        return found is not None and bool(found.get("tailoring") == self.content["tailoring"])

    def is_stale(self) -> bool:
        """Whether there is unfinished work of this tailoring that had come to another merge."""
        return self.is_there() and self._found() != self.content

    def _found(self) -> dict[str, Any] | None:
        try:
            found = load_json(self.file)
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None
