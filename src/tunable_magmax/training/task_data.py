"""A task's data as training loops have it: a file, texts with labels, or a data set of dicts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunable_magmax.checkpoints.model_config import are_generic
from tunable_magmax.data.class_names import with_names
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import open_samples
from tunable_magmax.data.tables import LABEL_COLUMNS, TEXT_COLUMNS, text_samples
from tunable_magmax.errors import InputError, some_of

LABELS = ("labels", "label_ids", *LABEL_COLUMNS)
WANTED = (
    "give a path (a .csv of text and label, class folders of images), pairs of a text and its label, or a data set "
    "whose items are dicts with 'text' (or 'input_ids') and 'label'"
)


def task_samples(data: Any, model: Any = None, tokenizer: Any = None) -> Samples:
    """Returns a task's data as labelled samples.

    Labels that are numbers get the names in the model's configuration. Items with tokens alone are decoded.

    >>> samples = task_samples([("hello", "greeting"), ("bye", "parting"), ("good bye", "parting")])
    >>> samples.classes, samples.labels
    (('greeting', 'parting'), (0, 1, 1))
    >>> task_samples([{"text": "hello", "label": 0}]).classes
    ('0',)
    """
    if isinstance(data, Samples):
        return data
    names = _class_names(data, model)
    if isinstance(data, str | os.PathLike):
        samples = open_samples(os.fspath(data))
        return samples if samples.labels is None or not names else with_names(samples, [*names.values()])
    items = _items(data)
    texts = [_text(item, tokenizer) for item in items]
    labels = [_label(item, names) for item in items]
    return text_samples(f"{len(items)} samples of {type(data).__name__}", texts, labels)


def _items(data: Any) -> list[Any]:
    """Returns all items of a data set; of torch's, which need not be iterable, by their positions."""
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping):
        items = [data[position] for position in range(len(data))]
    elif isinstance(data, Iterable) and not isinstance(data, Mapping):
        items = list(data)
    else:
        raise InputError(f"data is a {type(data).__name__}: {WANTED}")
    if not items:
        raise InputError(f"data is an empty {type(data).__name__}: give at least one sample")
    return items


def _text(item: Any, tokenizer: Any) -> str:
    if isinstance(item, Mapping):
        text = next((item[key] for key in TEXT_COLUMNS if isinstance(item.get(key), str)), None)
        if text is None and "input_ids" in item and tokenizer is not None:
            text = tokenizer.decode(_plain(item["input_ids"]), skip_special_tokens=True)
        if text is not None:
            return str(text)
        raise InputError(f"an item of the data has {some_of(item)}: {WANTED}")
    if isinstance(item, Sequence) and len(item) == 2 and isinstance(item[0], str):
        return item[0]
    raise InputError(f"an item of the data is a {type(item).__name__}: {WANTED}")


def _label(item: Any, names: Mapping[int, str]) -> str:
    key = next((key for key in LABELS if key in item), None) if isinstance(item, Mapping) else 1
    if key is None:
        raise InputError(f"an item of the data has {some_of(item)}, and no label: {WANTED}")
    label = _plain(item[key])
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise InputError(f"a label of the data is {label!r}, expected the name of a class, or its index")
    if isinstance(label, str):
        return label
    if label < 0:
        raise InputError(f"a label of the data is {label}, which stands for none: leave out samples without a label")
    return names.get(label, str(label))


def _class_names(data: Any, model: Any) -> dict[int, str]:
    """Returns the names of class indices: as the model's configuration has them, else the data set's own."""
    known = getattr(getattr(model, "config", None), "id2label", None) or {}
    named = {int(key): str(known[key]) for key in sorted(known, key=int)}
    if not are_generic(list(named.values())):
        return named
    features = getattr(data, "features", None)
    feature = (
        next((features[key] for key in LABELS if key in features), None) if isinstance(features, Mapping) else None
    )
    return dict(enumerate(getattr(feature, "names", None) or ())) or named


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
