"""Samples of a site on the page: files that it sends, their estimate, and the task that each is like.

What a browser calls a file is never a path here. It gives two things: the kind of file, by its ending, and the label,
by the folder that it was in.
"""

from __future__ import annotations

import base64
import io
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from tunable_magmax.data.images import IMAGE_SUFFIXES, open_image_files
from tunable_magmax.data.samples import Samples, Unreadable
from tunable_magmax.data.source import SampleSource, open_samples
from tunable_magmax.data.tables import TABLE_SUFFIXES
from tunable_magmax.errors import InputError, plural, shortened
from tunable_magmax.evaluation.accuracy import known_labels, mostly_known
from tunable_magmax.files import write_atomic
from tunable_magmax.preference.base_features import farthest
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.site import Site, estimate
from tunable_magmax.studio.guard import Refused
from tunable_magmax.studio.points import Preset
from tunable_magmax.workflows.options import SiteSources

FILE_BYTES, TOTAL_BYTES, FILES, UPLOADS = 32 << 20, 512 << 20, 2000, 8
NO_LABEL = "(no class folder)"
SUFFIXES = IMAGE_SUFFIXES | TABLE_SUFFIXES
THUMBNAIL = 96
LONGEST_TEXT = 300
MOST_SHOWN = 200
USUAL_OUTSIDE = 0.05
"""The share of a task's own samples that are farther away than its limit."""


@dataclass
class Upload:
    """Samples in a folder of the studio's output: pictures as 000000.png and so on, or one table."""

    folder: Path
    size: int = 0
    """Bytes of all files."""
    files: list[tuple[Path, str]] = field(default_factory=list)
    """Each file, and the label that its folder says."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def room(self) -> int:
        """Returns how many bytes the next file may have; a full upload is refused."""
        if len(self.files) >= FILES:
            raise Refused(413, f"these are more than {FILES:,} files, the most that the studio takes")
        return min(FILE_BYTES, TOTAL_BYTES - self.size)

    def check(self, name: str) -> str:
        """Returns the ending of a file's name, which says what it is; other kinds are refused."""
        suffix = PurePosixPath(name.replace("\\", "/")).suffix.lower()
        if suffix not in SUFFIXES:
            shown = shortened(name.replace("\0", "?"))
            raise InputError(f"{shown!r}: expected a picture or a table, one of {', '.join(sorted(SUFFIXES))}")
        is_table = suffix in TABLE_SUFFIXES
        if self.files and (is_table or self.files[0][0].suffix in TABLE_SUFFIXES):
            raise InputError("give pictures, or one table of texts, not both and not several tables")
        return suffix

    def add(self, name: str, content: bytes) -> None:
        """Stores a file under a name of its own. Threads may call it at once."""
        folder = PurePosixPath(name.replace("\\", "/")).parent.name
        with self._lock:
            suffix = self.check(name)
            if len(content) > self.room():
                raise Refused(413, f"these are more than {TOTAL_BYTES:,} bytes, the most that the studio takes")
            path = self.folder / f"{len(self.files):06d}{suffix}"
            write_atomic(path, content)
            self.files.append((path, folder or NO_LABEL))
            self.size += len(content)

    def samples(self, classes: Collection[str]) -> SampleSource:
        """Returns the table, or the pictures, with labels if most of these are classes."""
        if not self.files:
            raise InputError("there are no samples yet: choose pictures or a table first")
        paths, labels = [path for path, _ in self.files], [label for _, label in self.files]
        if paths[0].suffix in TABLE_SUFFIXES:
            return paths[0]
        pictures = open_image_files(paths, f"{plural(len(paths), 'picture')} from the page", self.folder)
        known = mostly_known(sum(label in classes for label in labels), len(labels))
        return pictures.labelled(labels) if known else pictures


class Uploads:
    """The uploads of a session, in `folder`, which belongs to the studio."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._uploads: dict[str, Upload] = {}

    def begin(self) -> str:
        """Begins a new upload in a folder that did not exist; returns its name."""
        if len(self._uploads) >= UPLOADS:
            raise Refused(413, f"there are {UPLOADS} sets of samples already: remove one first")
        self.folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        self._uploads[folder.name] = Upload(folder)
        return folder.name

    def get(self, name: str) -> Upload:
        """Returns an upload of this session."""
        if name not in self._uploads:
            raise Refused(404, f"there are no samples {shortened(name)!r}")
        return self._uploads[name]

    def remove(self, name: str) -> None:
        """Removes an upload and its files."""
        upload = self.get(name)
        del self._uploads[name]
        shutil.rmtree(upload.folder, ignore_errors=True)


# -- the estimate -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assigned:
    """A sample: the task that it is most like, how sure that is, and whether it is far from all of them."""

    task: int
    share: float
    outside: bool


@dataclass(frozen=True, eq=False)
class SiteSamples:
    """Samples of a site with their estimate, the `preset`.

    `known`: the class of the head that a sample's label is, by position. `facts`: how far to trust them, for the page.
    `upload`: the upload that they are.
    """

    samples: Samples
    known: Mapping[int, str]
    preset: Preset
    assigned: Mapping[int, Assigned]
    facts: dict[str, Any]
    upload: str | None = None
    warnings: Sequence[str] = ()

    @property
    def labelled(self) -> bool:
        """Whether models are measured on their labels."""
        return mostly_known(len(self.known), len(self.samples))

    def to_dict(self) -> dict[str, Any]:
        """Returns how far to trust them, for the page."""
        return {**self.facts, "upload": self.upload, "warnings": self.warnings}

    def shown(self, start: int, count: int, group: str, tasks: int) -> dict[str, Any]:
        """Returns some samples of a group for the page, with small pictures or the beginning of their texts."""
        if group not in ("all", "outside", *(f"task-{t}" for t in range(tasks))):
            raise InputError(f"show is {shortened(group)!r}, expected all, outside or task-0 to task-{tasks - 1}")
        wanted = [position for position in range(len(self.samples)) if group in self._groups(position)]
        page = wanted[start : start + min(count, MOST_SHOWN)]
        rows = []
        for position, value in zip(page, self.samples.load(page), strict=True):
            own = self.assigned.get(position)
            row = {"task": None, "share": None, "outside": None} if own is None else vars(own)
            text = value[:LONGEST_TEXT] if isinstance(value, str) else None
            shown = {"label": self._label(position), "picture": thumbnail(value), "text": text}
            rows.append({**row, "id": position, **shown})
        return {"total": len(self.samples), "start": start, "shown": len(wanted), "samples": rows}

    def _groups(self, position: int) -> set[str]:
        own = self.assigned.get(position)
        return {"all"} if own is None else {"all", f"task-{own.task}", "outside" if own.outside else ""}

    def _label(self, position: int) -> str | None:
        """Returns the label of a sample, as a class of the head if it is one."""
        labels = self.samples.labels
        return self.known.get(position) or (None if labels is None else self.samples.classes[labels[position]])


def estimate_site(site: Site, classes: Sequence[str], use_labels: bool, file: Path) -> SiteSamples:
    """Estimates weights from a site's inputs, by their labels if `use_labels` and most have one; saves the preference.

    `classes`: those of the head.
    """
    samples = open_samples(site.sources.inputs)
    known, unknown = known_labels(samples, classes) if samples.labels is not None else ({}, [])
    labelled = use_labels and mostly_known(len(known), len(samples))
    by_labels = replace(site, sources=SiteSources(labelled=site.sources.inputs))
    preference = estimate(by_labels if labelled else site)
    preference.save(file)
    assigned = assign(site, preference)
    some, copies = assigned.values(), site.facts.get("copies", 0)
    facts = {
        "kind": samples.kind,
        "samples": len(samples),
        "distinct": (len(site.rows) or len(samples)) - copies,
        "copies": copies,
        "unreadable": site.facts.get("unreadable", 0),
        "labelled": len(known),
        "unknown_labels": len(unknown),
        "tasks": Counter(item.task for item in some),
        "outside": sum(item.outside for item in some) / len(some) if some else None,
        "usual_outside": USUAL_OUTSIDE,
        "expected_error": preference.expected_error,
    }
    names = {position: classes[index] for position, index in known.items()}
    return SiteSamples(samples, names, Preset("samples", "from samples", preference, file), assigned, facts)


def assign(site: Site, preference: Preference) -> dict[int, Assigned]:
    """Returns what a probe on the base's embeddings says of each readable input, by its position.

    Tasks count by the preference's weights. Empty where profiles are missing.
    """
    if None in site.run.profiles:
        return {}
    features, fitted = np.asarray(site.base_features), site.probe
    weights = np.asarray(preference.weights)
    shares = fitted.likelihoods(fitted.probe.posterior(features)) * weights
    shares /= shares.sum(axis=1, keepdims=True)
    far = fitted.probe.distances(features) > farthest(fitted, weights)
    return {
        position: Assigned(int(shares[row].argmax()), float(shares[row].max()), bool(far[row]))
        for position, row in site.rows.items()
    }


def thumbnail(value: Any) -> str | None:
    """Returns a small PNG of a picture as the address of an image; None for texts, and for what cannot be read."""
    if isinstance(value, str | Unreadable):
        return None
    small = value.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    content = io.BytesIO()
    small.save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
