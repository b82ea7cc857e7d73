"""`tmx studio`."""

from __future__ import annotations

from pathlib import Path

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import is_quiet, note, show, show_result
from tunable_magmax.studio.options import StudioOptions


def studio(run_dir: Path, /, *, options: StudioOptions = parsed(StudioOptions)) -> None:
    """Find the right preference by hand and eye, on a page of this machine, and leave with a model.

    tmx studio RUN_DIR
    tmx studio RUN_DIR --inputs site/images --data site/test

    The page is for this machine only: it listens on 127.0.0.1, and its address holds a secret. Ctrl-C ends it. Needs
    the extras train and studio.

    Parameters
    ----------
    run_dir
        A run directory.
    """
    from tunable_magmax.runs.run import Run
    from tunable_magmax.studio.server import serve
    from tunable_magmax.studio.session import Studio

    opened = Studio(Run.current(run_dir), options)

    def announce(address: str) -> None:
        show_result({"address": address, "out": str(opened.out)}, [address])
        if is_quiet():  # without the address nobody finds the page
            show(f"{address}\n")
        note(f"models go to {opened.out}; Ctrl-C ends the studio")

    serve(opened, options.port, not options.no_browser, announce)
