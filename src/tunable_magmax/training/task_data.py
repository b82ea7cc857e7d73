"""A task's data as training loops have it: a file, pairs of input and label, or a data set of texts or pictures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tunable_magmax.data.class_names import with_names
from tunable_magmax.data.images import pillow, to_rgb
from tunable_magmax.data.samples import Kind, Samples, indexed
from tunable_magmax.data.source import open_samples
from tunable_magmax.data.tables import LABEL_COLUMNS, TEXT_COLUMNS
from tunable_magmax.errors import InputError, some_of

IMAGE_COLUMNS = ("image", "img", "picture", "pixel_values")
LABELS = ("labels", "label_ids", *LABEL_COLUMNS)
WANTED = (
    "give a path (a .csv of text and label, class folders of images), pairs of an input and its label, or a data set "
    "whose items are such pairs, or dicts with 'text', 'input_ids', 'image' or 'pixel_values', and 'label'"
)


def task_samples(data: Any, names: Mapping[int, str], tool: Any = None) -> Samples:
    """Returns a task's data as labelled samples, whose inputs are read when they are asked for.

    `names`: the classes that numbers stand for. `tool`: the tokenizer, which decodes items that hold tokens alone, or
    the image processor, whose normalisation of pixel values is undone.

    >>> samples = task_samples([("hello", "greeting"), ("bye", "parting"), ("good bye", "parting")], {})
    >>> samples.classes, samples.labels
    (('greeting', 'parting'), (0, 1, 1))
    """
    if isinstance(data, Samples):
        return data
    if isinstance(data, str | os.PathLike):
        samples = open_samples(os.fspath(data))
        if samples.labels is None:
            raise InputError(
                f"{samples.origin} holds no labels: add a column 'label', or put images into class folders"
            )
        return with_names(samples, [*names.values()]) if names else samples
    data = _listed(data)
    first = _input(data[0], tool)
    classes, labels = indexed(
        [names.get(label, str(label)) if isinstance(label, int) else label for label in _labels(data)]
    )

    def load(positions: Sequence[int]) -> Iterator[Any]:
        return (_input(data[position], tool) for position in positions)

    kind: Kind = "text" if isinstance(first, str) else "image"
    return Samples(f"{len(data)} samples of {type(data).__name__}", kind, len(data), load, classes, labels)


def first_input(data: Any, tool: Any) -> Kind:
    """Returns the kind of a data set's inputs by its first item, which must be readable and labelled."""
    if isinstance(data, Samples | str | os.PathLike):
        return task_samples(data, {}, tool).kind
    data = _listed(data)
    kind: Kind = "text" if isinstance(_input(data[0], tool), str) else "image"
    _label(_target(data[0]))
    return kind


def data_names(data: Any) -> tuple[str, ...]:
    """Returns the names of a data set's class indices: those of a ClassLabel, or `classes`; none if it has none."""
    features = getattr(data, "features", None)
    held = [features[key] for key in LABELS if key in features] if isinstance(features, Mapping) else []
    named = getattr(held[0], "names", None) if held else getattr(data, "classes", None)
    if named is None and hasattr(data, "dataset"):  # a part of another data set
        return data_names(data.dataset)
    return tuple(map(str, named or ()))


def _listed(data: Any) -> Any:
    """Returns a data set that has a length and positions, as it is before any transform."""
    if hasattr(data, "with_format") and hasattr(data, "features"):
        plain = data.with_format(None)
        data = plain if len(plain) and _held(plain[0], (*TEXT_COLUMNS, *IMAGE_COLUMNS)) is not None else data
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) and isinstance(data, Iterable):
        data = list(data)
    if not hasattr(data, "__getitem__") or isinstance(data, Mapping):
        raise InputError(f"data is a {type(data).__name__}: {WANTED}")
    if not len(data):
        raise InputError(f"data is an empty {type(data).__name__}: give at least one sample")
    return data


def _labels(data: Any) -> list[int | str]:
    """Returns the label of each item; whole columns are read without the inputs beside them."""
    key = next((key for key in LABELS if key in (getattr(data, "column_names", None) or ())), None)
    targets = data[key] if key is not None else getattr(data, "targets", None)
    if targets is None or len(targets) != len(data):
        targets = map(_target, map(data.__getitem__, range(len(data))))
    return [_label(target) for target in targets]


def _target(item: Any) -> Any:
    label = _held(item, LABELS) if isinstance(item, Mapping) else item[1]
    if label is None:
        raise InputError(f"an item of the data has {some_of(item)}, and no label: {WANTED}")
    return label


def _label(value: Any) -> int | str:
    label = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise InputError(f"a label of the data is {label!r}, expected the name of a class, or its index")
    if isinstance(label, int) and label < 0:
        raise InputError(f"a label of the data is {label}, which stands for none: leave out samples without a label")
    return label


def _held(item: Any, keys: Sequence[str]) -> Any:
    """Returns what a dict holds under the first of some keys that it has."""
    return next((item[key] for key in keys if key in item), None) if isinstance(item, Mapping) else None


def _input(item: Any, tool: Any) -> Any:
    """Returns an item's text or picture."""
    texts = [item[key] for key in TEXT_COLUMNS if isinstance(item.get(key), str)] if isinstance(item, Mapping) else []
    if texts:
        return texts[0]
    if isinstance(item, Mapping):
        value = _held(item, IMAGE_COLUMNS)
    else:
        value = item[0] if isinstance(item, tuple | list) and len(item) == 2 else None
    if isinstance(value, str):
        return value
    if hasattr(value, "convert"):
        return to_rgb(value, pillow())
    if value is not None and len(getattr(value, "shape", ())) == 3:
        return _picture(np.asarray(value), tool)
    if isinstance(item, Mapping) and "input_ids" in item and hasattr(tool, "decode"):
        return str(tool.decode(np.asarray(item["input_ids"]).tolist(), skip_special_tokens=True))
    shown = some_of(item) if isinstance(item, Mapping) else f"a {type(item).__name__}"
    raise InputError(f"an item of the data has {shown}, and nothing that can be embedded: {WANTED}")


def _picture(values: Any, tool: Any) -> Any:
    """Returns a picture of uint8, or what an image processor made pixel values [3, h, w] of."""
    if values.dtype == np.uint8:
        values = values.transpose(1, 2, 0) if values.shape[0] == 3 else values
    else:
        if not hasattr(tool, "image_mean"):
            raise InputError("the data holds pixel values: give the image processor that made them (processing_class)")
        scaled = values.transpose(1, 2, 0)
        if getattr(tool, "do_normalize", True):
            scaled = scaled * np.asarray(tool.image_std) + np.asarray(tool.image_mean)
        factor = tool.rescale_factor if getattr(tool, "do_rescale", True) else 1.0
        values = (scaled / factor).round().clip(0, 255).astype(np.uint8)
    return to_rgb(pillow().fromarray(np.ascontiguousarray(values)), pillow())
