"""How help is laid out: docstrings are wrapped for the source, and help for the terminal."""

from __future__ import annotations

import re
from typing import Any

from cyclopts.help import DefaultFormatter, HelpPanel


def unwrapped(text: str) -> str:
    """Joins the lines of each paragraph, but for examples: those are lines that begin with the program's name.

    >>> unwrapped("A sentence that\\n    goes on.\\n\\ntmx merge a\\ntmx merge b")
    'A sentence that goes on.\\n\\ntmx merge a\\ntmx merge b'
    """
    return "\n\n".join(
        part if part.startswith("tmx ") else re.sub(r"\s*\n\s*", " ", part) for part in text.split("\n\n")
    )


class UnwrappedHelp(DefaultFormatter):
    """The usual layout, with texts wrapped to the width of the terminal alone."""

    def __call__(self, console: Any, options: Any, panel: HelpPanel) -> None:
        """Prints a panel of options."""
        for entry in panel.entries:
            _unwrap(entry.description)
        super().__call__(console, options, panel)

    def render_description(self, console: Any, options: Any, description: Any) -> None:
        """Prints what a command does."""
        _unwrap(description)
        super().render_description(console, options, description)


def _unwrap(text: Any) -> None:
    from rich.text import Text

    plain = getattr(text, "primary_renderable", None)
    if isinstance(plain, Text):
        text.primary_renderable = Text(unwrapped(plain.plain))
