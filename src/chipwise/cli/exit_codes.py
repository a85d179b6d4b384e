"""The exit codes of every command, and what they mean."""

from __future__ import annotations

from ..base import errors, fact

INTERRUPTED = 130
UNREAD = 141  # as of a program that SIGPIPE ends


def exit_codes() -> str:
    """Every exit code and its meaning, which is the first line of the error's docstring."""
    kinds: list[type[errors.ChipwiseError]] = [
        errors.ChipwiseError,
        *errors.ChipwiseError.__subclasses__(),
    ]
    own = {0: "exit-done", INTERRUPTED: "exit-interrupted", UNREAD: "exit-unread"}
    meanings = {code: str(fact(name)) for code, name in own.items()}
    meanings |= {kind.exit_code: str(kind.__doc__).splitlines()[0] for kind in kinds}
    rows = [f"  {code:<4} {meanings[code]}" for code in sorted(meanings)]
    return "\n".join(["\b", "Exit codes:", *rows])  # \b: the following lines are not wrapped
