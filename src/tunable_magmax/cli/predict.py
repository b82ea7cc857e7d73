"""`tmx predict`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import show_result, table, working, wrapped
from tunable_magmax.errors import plural, shortened, some_of
from tunable_magmax.workflows.options import PredictOptions

if TYPE_CHECKING:
    from tunable_magmax.workflows.predict import Predictions


def predict(model: Path, /, *inputs: Path, options: PredictOptions = parsed(PredictOptions)) -> None:
    """Predict the classes of images or texts with a model, such as one that tmx tailor made.

    tmx predict site-model photo.jpg
    tmx predict site-model photos/ -o labels.csv
    tmx predict site-model --text "where is my card?"

    Inputs that cannot be read get no label; a warning names them. If none can be read, it is an error.

    Parameters
    ----------
    model
        A model directory with its head beside it, or a checkpoint of a run.
    inputs
        Image files, folders of images, .txt (a text a line), .csv, .jsonl or .parquet.
    """
    from tunable_magmax.workflows.predict import predict as classify

    with working() as progress:
        found = classify(model, inputs, options, progress)
    show_result(found.to_dict(), _labels(found) if options.out is None else _counts(found, options.out))


def _labels(found: Predictions) -> Iterator[str]:
    """Yields a line for each label of each input."""
    rows = []
    for prediction in found.predictions:
        name = prediction.input if prediction.text is None else shortened(" ".join(prediction.text.split()))
        top = [[label, f"{probability:.1%}"] for label, probability in prediction.top] or [["", ""]]
        rows += [[name if k == 0 else "", *cells] for k, cells in enumerate(top)]
    yield from table(rows, ["", "label", "probability"], fixed=3)


def _counts(found: Predictions, file: Path) -> Iterator[str]:
    """Yields where the labels are, and how often each was predicted."""
    counts = some_of((f"{label} {count:,}" for label, count in found.counts().items()), limit=8)
    yield from wrapped(f"{plural(len(found.predictions), 'input')} classified: {counts or 'no label'}", 2)
    yield f"written to {file}"
