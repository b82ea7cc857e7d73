"""`tmx predict`: its options, and the labels as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from tunable_magmax.cli.merge_options import Json
from tunable_magmax.cli.terminal import plain_warnings, progress_bars, show, table
from tunable_magmax.errors import InputError, shortened, some_of
from tunable_magmax.showing import plural

if TYPE_CHECKING:
    from tunable_magmax.workflows.predict import Predictions

SUFFIXES = (".csv", ".json", ".jsonl")


@Parameter(name="*", group=Group("Model and reading", sort_key=1))
@dataclass(frozen=True)
class PredictOptions:
    """The head, and how inputs are read."""

    head: Path | None = None
    """The head. Default: the one beside the model, or of the run that the model comes from."""
    prior: Literal["auto", "none"] = "auto"
    """The site prior in the head's file: auto adds it, none leaves it out."""
    top: int = 1
    """Show so many of the likeliest classes."""
    split: str | None = None
    """Of data with several."""
    text_column: str | None = None
    """Default: text, sentence, query, ..."""
    batch: int = 64
    """So many inputs at a time."""
    device: str | None = None
    """Default: the GPU if there is one."""


_OPTIONS = PredictOptions()


def predict(
    model: Path,
    /,
    *inputs: Path,
    text: list[str] | None = None,
    options: PredictOptions = _OPTIONS,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Json = False,
) -> None:
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
    text
        Classify this text; repeatable.
    out
        Write the labels to this file: .csv, .json or .jsonl.
    quiet
        No progress bars and no table.
    """
    if out is not None and out.suffix.lower() not in SUFFIXES:
        raise InputError(f"{out}: the name of a file of labels must end in one of {', '.join(SUFFIXES)}")
    from tunable_magmax.files import write_atomic
    from tunable_magmax.workflows.options import Reading
    from tunable_magmax.workflows.predict import predict as predict_files

    with plain_warnings(), progress_bars(quiet or as_json) as progress:
        values = asdict(options)
        chosen = {name: values.pop(name) for name in ("head", "prior", "top")}
        found = predict_files(model, inputs, texts=text or (), **chosen, reading=Reading(**values), progress=progress)
    if out is not None:
        write_atomic(out, found.to_bytes(out.suffix.lower()))
    if as_json:
        show(found.to_bytes(".json").decode())
    elif not quiet:
        lines = summary_lines(found, out) if out is not None else label_lines(found)
        show("".join(f"{line}\n" for line in lines))


def label_lines(found: Predictions) -> Iterator[str]:
    """Yields a line for each input."""
    from tunable_magmax.workflows.predict import printable

    top = max((len(prediction.top) for prediction in found.predictions), default=1) or 1
    rows = [["", *["label", "probability"] * top]]
    for prediction in found.predictions:
        shown = prediction.input if prediction.text is None else shortened(" ".join(prediction.text.split()))
        shown = printable(shown)
        cells = [cell for label, probability in prediction.top for cell in (label, f"{probability:.1%}")]
        rows.append([shown, *cells, *[""] * (2 * top - len(cells))])
    yield from table(rows)
    yield from _prior_lines(found)


def summary_lines(found: Predictions, file: Path) -> Iterator[str]:
    """Yields where the labels are, and how often each was predicted."""
    from tunable_magmax.workflows.predict import printable

    counts = some_of((f"{label} {count:,}" for label, count in found.counts().items()), limit=8)
    yield f"{plural(len(found.predictions), 'input')} classified: {counts or 'no label'}"
    yield printable(f"written to {file}")
    yield from _prior_lines(found)


def _prior_lines(found: Predictions) -> Iterator[str]:
    if found.prior:
        yield "with the site prior in the model's head (--prior none leaves it out)"
