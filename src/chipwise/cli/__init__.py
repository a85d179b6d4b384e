"""The `chipwise` command: one thin file a subcommand, errors on one line, documented exit codes."""

from __future__ import annotations

import sys

import typer

from ..errors import ChipwiseError
from ..words.figures import printable

HELP = "Train one recipe unchanged on any number of devices, to the same bits."
# \b keeps the lines that follow it, up to the next empty one, as they are.
EXIT_CODES = """\b
Exit codes:
  0    done
  1    unexpected
  2    wrong recipe, setting or option
  3    data missing, damaged, empty or not of one shape
  4    the devices asked for are not there or do not fit
  5    the run folder: unwritable, full, in use, damaged or of another recipe
  6    the loss became NaN or infinite
  75   stopped by SIGTERM or Ctrl-C, and saved: resume with --run
  130  left at once, by Ctrl-C before training began or by a second one
"""
_INTERRUPTED = 130


def app() -> typer.Typer:
    """The command line as a Typer application."""
    from .bench import bench
    from .bench_feed import bench_feed
    from .check import check
    from .chips import chips
    from .compare import compare
    from .devices import devices
    from .eval import evaluate_run
    from .find_batch import find_batch
    from .find_lr import find_lr
    from .inspect import inspect
    from .pack import pack
    from .plan import plan
    from .prices import prices
    from .report import report
    from .show import show
    from .sweep import sweep
    from .train import train
    from .transfer import transfer

    made = typer.Typer(
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )

    @made.callback(help=HELP, epilog=EXIT_CODES)
    def chipwise() -> None:
        pass

    made.command("train", epilog=EXIT_CODES)(train)
    made.command("eval", epilog=EXIT_CODES)(evaluate_run)
    made.command("devices", epilog=EXIT_CODES)(devices)
    made.command("plan", epilog=EXIT_CODES)(plan)
    made.command("sweep", epilog=EXIT_CODES)(sweep)
    made.command("find-lr", epilog=EXIT_CODES)(find_lr)
    made.command("find-batch", epilog=EXIT_CODES)(find_batch)
    made.command("transfer", epilog=EXIT_CODES)(transfer)
    made.command("check", epilog=EXIT_CODES)(check)
    made.command("pack", epilog=EXIT_CODES)(pack)
    made.command("inspect", epilog=EXIT_CODES)(inspect)
    made.command("bench", epilog=EXIT_CODES)(bench)
    made.command("compare", epilog=EXIT_CODES)(compare)
    made.command("report", epilog=EXIT_CODES)(report)
    made.command("bench-feed", epilog=EXIT_CODES)(bench_feed)
    made.command("show", epilog=EXIT_CODES)(show)
    made.command("chips", epilog=EXIT_CODES)(chips)
    made.command("prices", epilog=EXIT_CODES)(prices)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code; ends the process when called as a script."""
    try:
        app()(args=arguments)
        code = 0
    except ChipwiseError as error:
        print(f"error: {printable(' '.join(str(error).splitlines()))}", file=sys.stderr)
        code = error.exit_code
    except SystemExit as leave:  # how typer ends: help, usage errors (2), typer.Exit
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        if code == _INTERRUPTED:  # while training, Ctrl-C is a request to stop and does not come here
            print("interrupted", file=sys.stderr)
    if arguments is None:
        sys.exit(code)
    return code
