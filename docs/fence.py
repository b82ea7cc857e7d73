"""Shows the examples in docstrings as code, for the Python reference of the site."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^(?:>>> .*\n?)(?:(?!\n).+\n?)*", re.MULTILINE)


class Fence(Extension):
    """Puts fences around the lines from >>> to the next empty one."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called once for each module, class, function and attribute."""
        if obj.docstring and ">>> " in obj.docstring.value:
            shown = re.sub(r"  # doctest: .*", "", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(lambda lines: f"```pycon\n{lines[0].rstrip()}\n```\n", shown)
