"""How the command line reads options: their groups in the help, other names, and values that need a parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from cyclopts import Group, Parameter, Token

from tunable_magmax.engines.settings import Output, Place
from tunable_magmax.errors import InputError
from tunable_magmax.merging.options import MethodOptions, Options, WeightedOptions
from tunable_magmax.workflows.options import Checkpoints, Embedding, Reading, SiteSources

Kind = TypeVar("Kind")


def read_numbers(text: str) -> list[str] | dict[str, str]:
    """Splits numbers with commas between them, one for each task or by name; they stay text, which is exact.

    >>> read_numbers("3,1,0"), read_numbers("travel=7, bank=1/3")
    (['3', '1', '0'], {'travel': '7', 'bank': '1/3'})
    """
    parts = [part.strip() for part in text.split(",")]
    if all(map(_is_number, parts)):
        return parts
    pairs = [(name.strip(), value.strip()) for name, _, value in (part.rpartition("=") for part in parts)]
    if not all(name and _is_number(value) for name, value in pairs):
        raise InputError(f"{text!r} should be numbers with commas between them, as 3,1,0 or travel=7,bank=3")
    by_name = dict(pairs)
    if len(by_name) < len(pairs):
        raise InputError(f"{text!r} names a task twice")
    return by_name


def _is_number(word: str) -> bool:
    try:
        return bool([float(part) for part in word.split("/")])
    except ValueError:
        return False


def _numbers(_: Any, tokens: Sequence[Token]) -> list[str] | dict[str, str]:
    return read_numbers(tokens[0].value)


def _path(_: Any, tokens: Sequence[Token]) -> Path:
    return Path(tokens[0].value)


WHAT, HOW = Group("What is merged", sort_key=1), Group("How it is merged", sort_key=2)
SITE, DATA = Group("What is known of the site", sort_key=1), Group("How data are read", sort_key=3)
OUTPUT = Group("Output and resources", sort_key=4)
GROUPS = {
    Checkpoints: WHAT,
    **dict.fromkeys((MethodOptions, WeightedOptions, Options), HOW),
    SiteSources: SITE,
    **dict.fromkeys((Embedding, Reading), DATA),
    **dict.fromkeys((Output, Place), OUTPUT),
}
SIGNED = Parameter(allow_leading_hyphen=True)
"""For numbers: a negative one is refused as such, not as an unknown option."""
NUMBERS = Parameter(converter=_numbers, n_tokens=1, accepts_keys=False, allow_leading_hyphen=True, metavar="N,N,...")
A_FILE = Annotated[Any, Parameter(converter=_path, n_tokens=1, accepts_keys=False, metavar="PATH")]
NO_OPTION = Annotated[Any, Parameter(parse=False)]
TYPES: dict[str, Any] = {
    "method": str | None,
    "scale": Annotated[float | Literal["matched"] | None, SIGNED],
    "seed": int | None,
    "weights": Annotated[Any, NUMBERS],
    "start": Annotated[Any, NUMBERS, Parameter(name="--from")],
    "stop": Annotated[Any, NUMBERS, Parameter(name="--to")],
    "scope": Literal["model", "tensor"] | None,
    "out_dtype": Annotated[Literal["float64", "float32", "float16", "bfloat16"] | None, Parameter(name="--dtype")],
    **dict.fromkeys(("inputs", "labels", "labelled", "data", "preference"), A_FILE),
    **dict.fromkeys(("budget", "compare", "density", "normalize", "fitted_head", "raw"), NO_OPTION),
}
"""What the command line takes for options that take anything in Python, or that it does not have."""
NAMES = {
    "out": Parameter(name=["--out", "-o"]),
    "changes": Parameter(name="--set", negative=()),
    **dict.fromkeys(("scale", "seed", "alpha"), SIGNED),
}
"""Other names of options, and those that take negative numbers."""


@cache
def parsed(kind: type[Kind]) -> Kind:
    """Makes a class of options, and the groups in it, readable from the command line; returns its defaults."""
    for field in fields(kind):  # type: ignore[arg-type]
        if is_dataclass(field.default):
            parsed(type(field.default))  # type: ignore[arg-type]
    for holder in filter(is_dataclass, kind.__mro__):
        for name in holder.__annotations__:
            hint = get_type_hints(holder)[name]
            if name in TYPES and (hint in (Any, str | None) or TYPES[name] is NO_OPTION):
                holder.__annotations__[name] = TYPES[name]
            elif name in NAMES:
                holder.__annotations__[name] = Annotated[hint, NAMES[name]]
    listed = Parameter(name="*", group=GROUPS[kind]) if kind in GROUPS else Parameter(name="*")
    return listed(kind)()
