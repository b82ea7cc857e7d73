"""Writes docs/commands.md, the reference of all commands, from their help; `make docs` calls it."""

from __future__ import annotations

import re
from pathlib import Path

from tunable_magmax.cli.app import app


def commands() -> str:
    """Returns the help of every command as Markdown, with the examples as code."""
    list(app.subapps)  # imports all commands
    text = app.generate_docs(heading_level=1)
    text = re.sub(r"## Table of Contents\n\n(- .*\n)+\n", "", text)
    examples = r"(?<!```console\n)((?:^tmx .*\n)+)"
    return re.sub(examples, r"```console\n\1```\n", text, flags=re.MULTILINE)


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(commands(), encoding="utf-8")
