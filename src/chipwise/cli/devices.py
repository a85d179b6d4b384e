"""`chipwise devices`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import options


def devices(
    json_: options.Json = False,
    simulate: options.Simulate = None,
    path: Annotated[
        Path, typer.Option(metavar="DIR", help="Where runs would be written; its disk is reported.")
    ] = Path("."),
) -> None:
    """Show where this runs, on which devices, and what would go wrong. Exit code 4 if something would.

    \b
    chipwise devices
    chipwise devices --json
    chipwise devices --simulate 8
    """
    # Only looking: do not reserve three quarters of a GPU that somebody may be training on.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if simulate is not None:
        from ..machine.simulate import simulate as make

        make(simulate)
    from ..machine.report import look

    report = look(path)
    if json_:
        print(json.dumps(report.to_json()))
    else:
        report.render(Console(file=sys.stdout, highlight=False))
    if report.failed:
        raise typer.Exit(4)
