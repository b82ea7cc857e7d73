"""Kept samples: a few raw samples of each class of a task, as files in the run that a person can open.

Texts are `kept/TASK-DIGEST.csv` with the columns `text` and `label`; pictures are `kept/TASK-DIGEST/CLASS/N.png`, with
`labels.csv` beside the class folders, which names each file's class exactly. run.json says which of them are a task's,
and what their digest is. They stay in the run: nothing that leaves it holds them.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from tunable_magmax.data.arrays import KEPT_STREAM, drawn
from tunable_magmax.data.images import open_image_files, pillow
from tunable_magmax.data.samples import Samples, Unreadable, text_samples, warn_unreadable
from tunable_magmax.data.tables import csv_rows
from tunable_magmax.errors import InputError
from tunable_magmax.files import (
    is_plain_name,
    read_whole,
    refuse_half_characters,
    write_atomic,
    write_folder,
)
from tunable_magmax.runs.run import KEPT, Evidence, KeptEntry, Run, file_name

KEEP = 20
"""How many samples of each class are kept by default."""
MOST_KEPT = 5000
"""Of a task with more classes than this number allows, fewer samples of each are kept: they are in memory at a time."""
TASK_BYTES = 64 << 20
"""The most that the kept samples of a task may take; fewer of each class are kept where they would take more."""
LARGEST_FILE = 256 << 20
"""Bytes of the largest file of kept samples that is read."""
INDEX = "labels.csv"


def keep_samples(
    run: Run,
    task: str,
    samples: Samples,
    *,
    per_class: int = KEEP,
    source: Evidence,
    size: tuple[int, int] | None = None,
    seed: int = 0,
) -> KeptEntry | None:
    """Writes a few samples of each class of a task into the run, and returns what to register or enter of them.

    A seeded draw takes `per_class` samples of each class; with 0 nothing is kept, and None is returned. Samples that
    are there twice count once; unreadable ones are replaced by others of their class and named in one warning.
    Pictures are made smaller until they just cover `size` (height, width), what the encoder's processor resizes to, and
    never larger. They are PNG, so that their pixels stay as they are and JPEG's blocks do not show in small pictures.

    >>> keep_samples(run, "travel", samples, source="training").path  # doctest: +SKIP
    'kept/travel-1c9d23ab.csv'
    """
    if per_class < 0:
        raise InputError(f"--keep is {per_class}: give a number of samples of each class, 0 to keep none")
    if per_class == 0:
        return None
    names = tuple(samples.present_classes())
    for name in samples.classes:
        try:
            refuse_half_characters(name.replace("\0", "\ud800"))
        except ValueError:
            raise InputError(f"{samples.origin}: the class {name!r} is no UTF-8 text: give it another name") from None
    per_class = min(per_class, max(1, MOST_KEPT // len(names)))
    chosen = _chosen(samples, per_class, size, seed)
    while sum(len(content) for _, content in chosen) > TASK_BYTES:
        per_class -= 1
        chosen = [each for _, own in groupby(chosen, itemgetter(0)) for each in islice(own, per_class)]
    if not chosen:
        told = f"{samples.origin}: nothing is kept of {task}: one sample of each class takes more than 64 MiB"
        warnings.warn(told, stacklevel=3)
        return None
    files: dict[str, bytes] = {}
    if samples.kind == "text":
        index = _table([("text", "label"), *((content.decode(), name) for name, content in chosen)])
    else:
        rows = []
        for number, (name, content) in enumerate(chosen, 1):
            file = f"{file_name(name)}/{number}.png"
            files[file] = content
            rows.append((file, name, hashlib.sha256(content).hexdigest()))
        index = files[INDEX] = _table([("file", "label", "sha256"), *rows])
    digest = _digest(task, source, samples.kind, names, index)
    path = f"{KEPT}/{file_name(task)}-{digest[:8]}" + (".csv" if samples.kind == "text" else "")
    _put(run.path / path, index, files)
    return KeptEntry(path, samples.kind, source, len(chosen), per_class, names, digest)


def _chosen(samples: Samples, per_class: int, size: tuple[int, int] | None, seed: int) -> list[tuple[str, bytes]]:
    """Draws and encodes samples of each class; returns them with their classes, one class after the other."""
    labels, order = samples.require_labels(), drawn(range(len(samples)), seed, KEPT_STREAM)
    place = {position: k for k, position in enumerate(order)}
    waiting: dict[int, list[int]] = {label: [] for label in sorted(set(labels))}
    for position in order:
        waiting[labels[position]].append(position)
    held: dict[int, dict[int, bytes]] = {label: {} for label in waiting}  # by class and place in the draw
    failed: dict[int, Unreadable] = {}
    seen: set[bytes] = set()
    tried = 0
    while True:
        wanted: list[int] = []
        for label, left in waiting.items():
            missing = per_class - len(held[label])
            wanted += left[:missing]
            del left[:missing]
        if not wanted:
            break
        tried += len(wanted)
        wanted.sort()
        for position, value in zip(wanted, samples.load(wanted), strict=True):
            content = value if isinstance(value, Unreadable) else _encoded(value, size)
            if isinstance(content, Unreadable):
                failed[position] = content
            elif (digest := hashlib.sha256(content).digest()) not in seen:
                seen.add(digest)
                held[labels[position]][place[position]] = content
    warn_unreadable(samples.origin, failed, tried)
    return [(samples.classes[label], rows[k]) for label, rows in held.items() for k in sorted(rows)]


def _encoded(value: Any, size: tuple[int, int] | None) -> bytes | Unreadable:
    if isinstance(value, str):
        try:
            refuse_half_characters(value)
        except ValueError as error:
            return Unreadable(repr(value[:40]), str(error))
        return value.encode()
    image, buffer = value.convert("RGB"), io.BytesIO()
    share = 1.0 if size is None else max(size[0] / image.height, size[1] / image.width)
    if share < 1:
        shape = (max(1, round(image.width * share)), max(1, round(image.height * share)))
        image = image.resize(shape, pillow().Resampling.BICUBIC)
    # Pixels alone, not what the camera wrote beside them. More compression takes three times as long for 7 %.
    pillow().frombytes("RGB", image.size, image.tobytes()).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _put(place: Path, index: bytes, files: Mapping[str, bytes]) -> None:
    """Writes the files, complete or not at all; what has this name and other content was damaged."""
    if not files:
        write_atomic(place, index)
        return

    def fill(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    write_folder(place, fill)


def _table(rows: Sequence[Sequence[str]]) -> bytes:
    buffer = io.StringIO(newline="")
    # All cells in quotes, so that ends of lines and spaces inside them stay as they are.
    csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return buffer.getvalue().encode()


def _digest(task: str, source: str, kind: str, classes: Sequence[str], index: bytes) -> str:
    about = json.dumps([task, source, kind, list(classes)]).encode()
    return hashlib.sha256(hashlib.sha256(about).digest() + index).hexdigest()


# -- reading ----------------------------------------------------------------------------------------------------------


def open_kept(run: Run, task: int) -> Samples | None:
    """Opens the samples that are kept of a task (from 0), labelled by its classes; None if there are none.

    Files that are damaged, or not those that run.json names, are refused.
    """
    entry, label = run.kept[task], run.names[task]
    if entry is None:
        return None
    place = run.path / entry.path
    try:
        if not is_plain_name(entry.path, depth=2) or not entry.path.startswith(f"{KEPT}/"):
            raise ValueError(f"they must be in {KEPT}/")
        index = read_whole(place if entry.kind == "text" else place / INDEX, LARGEST_FILE)
        if _digest(label, entry.source, entry.kind, entry.classes, index) != entry.digest:
            raise ValueError("they were changed, or are of another task or run")
        rows = csv_rows(index.decode())[1:]
        labels = tuple(entry.classes.index(name) for _, name, *_ in rows)
        pictures = [_checked(place, name, digest) for name, _, digest in rows] if entry.kind == "image" else []
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(
            f"{place}: not the samples of {label} that were kept ({error}); keep them again with "
            f"{run.how_to_add('--data', f'{label}=DATA')}, or keep none with --keep 0 beside it"
        ) from None

    origin = f"kept samples of task {label!r}"
    if pictures:
        return replace(open_image_files(pictures, origin), classes=entry.classes, labels=labels)

    opened = text_samples(origin, [text for text, *_ in rows])
    return replace(opened, classes=entry.classes, labels=labels)


def _checked(folder: Path, name: str, digest: str) -> Path:
    """Returns the file of a picture that is as it was kept."""
    if not is_plain_name(name, depth=2):
        raise ValueError(f"{name!r} is not a file of it")
    if hashlib.sha256(read_whole(folder / name, LARGEST_FILE)).hexdigest() != digest:
        raise ValueError(f"{name} was changed")
    return folder / name
