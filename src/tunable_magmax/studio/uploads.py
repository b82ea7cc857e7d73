"""Samples that the page sends: bounded in size and number, stored under names of our own.

What a browser calls a file is never a path here. It gives two things: the kind of file, by its ending, and the label,
by the folder that it was in.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tunable_magmax.data.images import IMAGE_SUFFIXES, open_image_files
from tunable_magmax.data.source import SampleSource
from tunable_magmax.data.tables import TABLE_SUFFIXES
from tunable_magmax.errors import InputError, plural, shortened
from tunable_magmax.evaluation.labelled import mostly_known
from tunable_magmax.files import write_atomic
from tunable_magmax.studio.guard import Refused

FILE_BYTES, TOTAL_BYTES, FILES, UPLOADS = 32 << 20, 512 << 20, 2000, 8
NO_LABEL = "(no class folder)"
SUFFIXES = IMAGE_SUFFIXES | TABLE_SUFFIXES


@dataclass
class Upload:
    """Samples in a folder of the studio's output: pictures as 000000.png and so on, or one table."""

    folder: Path
    size: int = 0
    """Bytes of all files."""
    files: list[tuple[Path, str]] = field(default_factory=list)
    """Each file, and the label that its folder says."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        return self.folder.name

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

    def begin(self) -> Upload:
        """Begins a new upload in a folder that did not exist."""
        if len(self._uploads) >= UPLOADS:
            raise Refused(413, f"there are {UPLOADS} sets of samples already: remove one first")
        self.folder.mkdir(parents=True, exist_ok=True)
        upload = Upload(Path(tempfile.mkdtemp(dir=self.folder)))
        self._uploads[upload.name] = upload
        return upload

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
