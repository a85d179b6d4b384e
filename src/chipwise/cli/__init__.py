"""The `chipwise` command: errors on one line, with the exit codes of `base.errors`.

`commands.toml` lists the commands by group, and `options.py` has the options that several share.
Each command imports its libraries when it is called, so that help and usage errors are fast.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pkgutil
import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from ..base import ending, errors, fact
from ..base.figures import one_line, printable
from ..machine.cluster import check_threads
from ..machine.plugins import hidden
from . import standard_output
from .exit_codes import INTERRUPTED, UNREAD, exit_codes

# Bytes. With 2 GB, XLA cannot start its threads, and the process ends by a signal
LEAST_ADDRESSES = 4_000_000_000
LONGEST = 300  # characters of an error's line, since an argument may be very long
_WORD = re.compile(r"\S{120,}")

COMMANDS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("commands.toml").read_text("utf-8")
)
"""Group to its commands, each with its place."""

UNLISTED = COMMANDS.pop("unlisted")
"""The commands that the help does not list. The others are in its order: first those for newcomers,
then by purpose."""


class _Grouped(typer.core.TyperGroup):
    """The main help with its commands in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for title, names in COMMANDS.items():
            with formatter.section(str(fact(title))):
                formatter.write_dl(
                    [
                        (f"{name:<{width}}", self.commands[name].get_short_help_str(90))
                        for name in names
                    ]
                )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        given = ctx.params
        if given.get("rejoin") and not given["processes"]:
            raise typer.BadParameter("--rejoin is for --processes N.")
        if given.get("processes") or given.get("restart"):
            from .local import run_local

            run_local(args, given["processes"], given["restart"], given["rejoin"])
        return super().resolve_command(ctx, args)


def _version(requested: bool) -> None:
    if requested:
        print(version("chipwise"))
        raise typer.Exit


def app() -> typer.Typer:
    """The command line as a Typer application."""
    commands = typer.Typer(
        cls=_Grouped, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
    )

    @commands.callback(
        help=str(fact("chipwise-help")),
        epilog=f"{exit_codes()}\n\nPrograms that type commands read `chipwise skill`.",
    )
    def chipwise(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=_version, is_eager=True, help="Print the version and exit."
            ),
        ] = False,
        processes: Annotated[
            int | None,
            typer.Option(
                min=1, metavar="N", help="Run COMMAND in N processes here, the hosts of one run."
            ),
        ] = None,
        restart: Annotated[
            int,
            typer.Option(
                min=0, metavar="N", help="Resume up to N times with the processes that are left."
            ),
        ] = 0,
        rejoin: Annotated[
            bool,
            typer.Option("--rejoin", help="Restart a lost process at once, with --processes."),
        ] = False,
    ) -> None:
        pass

    for group in (*COMMANDS.values(), UNLISTED):
        for name, place in group.items():
            commands.command(name)(pkgutil.resolve_name(f"{__name__}.{place}"))
    return commands


def _shown(error: errors.ChipwiseError) -> bool:
    """Whether this host shows `error`. Ends the other hosts too."""
    from ..machine.hosts import joined

    here = joined()
    if here is None:
        return True
    here.failed(error)
    return here.shows


def error_line(error: errors.ChipwiseError) -> str:
    """The error on one line. Shortens first long words, then the middle, since the end says what to
    do."""
    text = printable(" ".join(str(error).splitlines()))
    if len(text) <= LONGEST or isinstance(error, errors.Stopped):  # it ends with a command to copy
        return text
    text = _WORD.sub(lambda word: f"{word[0][:60]}…{word[0][-20:]}", text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 140]} … {text[-137:]}"


def own_code(error: Exception) -> errors.ChipwiseError | None:
    """The error to show in place of `error`, with the line of the user's code that raised it: the
    innermost one in a file that is not installed. Or an error about a variable that JAX refuses.
    Returns `None` for other errors, which are bugs of chipwise."""
    if isinstance(error, ValueError) and re.search("environment 'JAX_|JAX flag", str(error)):
        text = "{reason:plain}: unset the variable, or correct it."
        return errors.DeviceError("jax-setting", text, reason=one_line(error))
    from ..recipe.user_code import line_of

    if (at := line_of(error, installed=False)) is None:
        return None
    return errors.RecipeError(
        "own-code",
        file=at[0].partition(":")[0],
        line=at[1].lineno,
        function=at[1].name,
        error=type(error).__name__,
        reason=one_line(error),
    )


def _show(error: errors.ChipwiseError) -> int:
    """Shows an error and returns its exit code."""
    if _shown(error):
        _print(f"error: {error_line(error)}")
    return error.exit_code


def _print(line: str) -> None:
    """Prints a line to standard error, if anybody reads it."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line. *Returns* its exit code. Without `arguments`, exits with it
    instead."""
    ending.own = arguments is None
    with hidden():
        code = _run(arguments)
    if arguments is None:
        sys.exit(code)
    return code


def _check_addresses() -> None:
    """Raises `DeviceError` if the limit of addresses is one with which XLA would end the process by
    a signal."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESSES:
        raise errors.DeviceError("addresses-few", limit=limit, least=LEAST_ADDRESSES)


_NUMBERS = re.compile(r"(--?[\w-]+=)?[\d.,:%٪٫٬+eE_-]+")
_TEXTS = ("--prompt", "--stop")
"""Options whose values are text, which may be digits of any script."""


def _check_digits(arguments: list[str]) -> None:
    """Raises `RecipeError` for a number in the digits of another script, which Python would read
    in some places and not in others."""
    for before, one in itertools.pairwise(["", *arguments]):
        text = before in _TEXTS or one.partition("=")[0] in _TEXTS
        if not text and not one.isascii() and _NUMBERS.fullmatch(one):
            raise errors.invalid("digits-of-another-script", "a number", one, "the digits 0 to 9")


def _run(arguments: list[str] | None) -> int:
    from .options import HELD

    try:
        standard_output.prepare()
        _check_digits(sys.argv[1:] if arguments is None else arguments)
        check_threads(os.environ)
        _check_addresses()
        with HELD:
            app()(args=arguments)
        code = 0
    except errors.ChipwiseError as error:
        code = _show(error)
    except SystemExit as end:  # raised by typer: help, usage errors (2), typer.Exit
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == INTERRUPTED:  # not while training, where Ctrl-C is a request to stop
            _print("interrupted")
        if code == 1 and 1 in standard_output.unread:  # click has turned the broken pipe into 1
            code = UNREAD
    except Exception as error:
        in_own_code = own_code(error)
        if getattr(error, "errno", None) == errno.ENAMETOOLONG or "embedded null" in str(error):
            in_own_code = errors.unreadable(getattr(error, "filename", "a name"), error)
        if in_own_code is None:
            raise
        code = _show(in_own_code)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except errors.ChipwiseError as error:
        code = _show(error)
    except BrokenPipeError:
        code = code or UNREAD
    return code
