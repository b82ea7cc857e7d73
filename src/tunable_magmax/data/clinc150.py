"""Opens CLINC150's JSON: an object from splits to lists of [text, intent] pairs."""

from __future__ import annotations

import json
from pathlib import Path

from tunable_magmax.data.samples import Samples
from tunable_magmax.data.splits import DataOptions, Split
from tunable_magmax.data.tables import text_samples
from tunable_magmax.errors import InputError, closest


def open_clinc150(options: DataOptions) -> Split:
    """Opens CLINC150: data_full.json, or a folder that holds it."""
    path = options.path
    if path.is_dir():
        files = [file for file in (path / "data_full.json", path / "data" / "data_full.json") if file.is_file()]
        files = files or sorted(path.glob("*.json"))
        if len(files) != 1:
            raise InputError(f"{path}: expected data_full.json of CLINC150, found {len(files)} JSON files")
        path = files[0]
    if path.suffix.lower() != ".json":
        raise InputError(f"{path}: expected CLINC150 as JSON (data_full.json); other tables are read by name: texts")
    return clinc150_split(path)


def clinc150_split(path: Path) -> Split:
    """Reads the splits train and test of a file such as CLINC150's."""
    return Split(read_clinc150(path, "train"), read_clinc150(path, "test"), {"split": "as found"})


def read_clinc150(path: Path, split: str | None = None) -> Samples:
    """Reads one split, by default `train`. Out-of-scope samples have splits of their own (`oos_train`, ...)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict) or not all(isinstance(pairs, list) for pairs in content.values()):
        raise InputError(f"{path}: expected a JSON object from splits to lists of [text, label] pairs")
    chosen = split or "train"
    if chosen not in content:
        raise InputError(f"{path}: no split {chosen!r}{closest(chosen, list(content))}, found {', '.join(content)}")
    pairs = content[chosen]
    for k, pair in enumerate(pairs, 1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise InputError(f"{path}: sample {k} of {chosen!r} is {pair!r}, expected [text, label]")
    if not pairs:
        raise InputError(f"{path}: the split {chosen!r} holds no samples")
    return text_samples(f"{path} ({chosen})", [text for text, _ in pairs], [label for _, label in pairs])
