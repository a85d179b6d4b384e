"""Facts: codes with numbers, for findings, warnings, advice and errors.

Code passes facts on and compares their codes. `say` turns them into text where they are shown. The
sentence of an error is beside its `raise`. Sentences that several places use, or that plans,
reports and comparisons compose or store, are in the `.toml` files of `messages/`:
`resumed = "Resumed at step {step} of {total}."`

A code with several texts is a table there: `[code]`, `text = "..."`, `remedy = "..."`. Braces
contain the name of a number, with a format of Python or one of `FORMATS`.
"""

from __future__ import annotations

import functools
import string
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.resources import files
from typing import Any

from . import figures


@dataclass(frozen=True)
class Fact:
    """A stable `code`, its `numbers` by name, and a `sentence` unless `messages/` has one for the
    code.

    `str(fact)` is its text, and `fact.json()` its form in documents. Facts are equal if code and
    numbers are.
    """

    code: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    sentence: str | None = field(default=None, compare=False, repr=False)

    def __getitem__(self, name: str) -> Any:
        return self.numbers[name]

    def __str__(self) -> str:
        return say(self)

    def json(self) -> dict[str, Any]:
        """An object with `code`, `text` and the numbers. Nested facts have the same form."""
        return {"code": self.code, "text": str(self), **plain(self.numbers)}


Say = Callable[[Fact], None]
"""A function that shows a fact, as the command line does."""


def silent(_: Fact) -> None:
    """Shows nothing."""


def plain(value: Any) -> Any:
    """A value as JSON: facts with their sentences, dataclasses as objects."""
    if isinstance(value, Fact):
        return value.json()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def fact(code: str, sentence: str | None = None, /, **numbers: Any) -> Fact:
    """`fact("resumed", "Resumed at step {step} of {total}.", step=40, total=100)`."""
    return Fact(code, numbers, sentence)


def say(fact: Fact, part: str = "text") -> str:
    """The sentence of a fact. Raises `KeyError` for a code without that text, and for a missing
    number."""
    own = fact.sentence if part == "text" else None
    return _FORMATTER.vformat(texts(fact.code)[part] if own is None else own, (), fact.numbers)


def text_of(part: str = "text") -> Any:
    """A property of a class that has a `fact`: one of its texts."""
    return property(lambda self: say(self.fact, part))


def texts(code: str) -> Mapping[str, str]:
    """The texts of a code by part. Raises `KeyError` if there is none."""
    entry = catalogue()[code]
    return {"text": entry} if isinstance(entry, str) else entry


@functools.cache
def catalogue() -> dict[str, Any]:
    """Every code with its text or texts. Raises `ValueError` if a code is in two files."""
    entries: dict[str, Any] = {}
    for file in sorted(
        files(__package__).joinpath("messages").iterdir(), key=lambda file: file.name
    ):
        if file.name.endswith(".toml"):
            for code, text in tomllib.loads(file.read_text(encoding="utf-8")).items():
                if code in entries:
                    raise ValueError(
                        f"messages/{file.name}: the code {code} is in another file too"
                    )
                entries[code] = text
    return entries


def _steps(steps: tuple[int, int]) -> str:
    first, last = steps
    return f"in step {last}" if first == last else f"between steps {first} and {last}"


def _checkpoint(step: int | None) -> str:
    return (
        "There is no checkpoint yet."
        if step is None
        else f"The last good checkpoint is of step {step}."
    )


FORMATS: dict[str, Callable[[Any], str]] = {
    "bytes": figures.byte_size,  # 1.81 GB
    "seconds": figures.or_unknown(figures.duration),  # 3.1 min
    "ms": figures.or_unknown(lambda seconds: f"{figures.digits(1e3 * seconds)} ms"),  # 0.222 ms
    "figure": figures.or_unknown(figures.figure),  # 0.9694, four digits
    "share": figures.or_unknown(figures.share),  # 21 %
    "whole": figures.or_unknown("{:,.0f}".format),  # 12,345
    "dollars": figures.dollars,  # $12.30
    "digits": figures.digits,  # 0.0123, 1,235
    "and": figures.listed,  # a, b and c
    "or": lambda words: figures.listed(words, "or"),  # a, b or c
    "list": lambda words: ", ".join(map(str, words)),  # a, b, c
    "few": figures.few,  # a, b, c and 1,204 more
    # batch: 24 there, 12 now; lr: 0.1 there, 0.2 now
    "changes": lambda rows: "; ".join(
        f"{name}: {old!r} there, {new!r} now" for name, old, new in rows
    ),
    "each": lambda facts: "; ".join(map(str, facts)),
    "remedy": lambda reason: say(reason, "remedy"),  # of a fact: its other text
    "said": lambda text: f" JAX says: {text.rstrip('.')}." if text else "",  # nothing of ""
    # ": " and the text on one line, or "" for ""
    "words": lambda text: f": {figures.one_line(text)}" if text else "",
    # "line 7: ", or "" for None
    "line": lambda number: "" if number is None else f"line {number}: ",
    # --set a=1 --set b=2
    "set": lambda settings: " ".join(f"--set {setting}" for setting in settings),
    "near": lambda word: f" Did you mean '{word}'?" if word else "",  # nothing of None
    "sentences": lambda facts: " ".join(map(str, facts)),  # one after another
    "tails": lambda facts: "".join(f"; {fact}" for fact in facts),  # "; a; b", or nothing
    "brackets": lambda facts: f" ({', '.join(map(str, facts))})" if facts else "",
    "sections": lambda parts: ", ".join(
        f"{name} {figures.duration(s)}" for name, s in parts.items()
    ),
    # 5.0 min (4.8 min to 5.1 min)
    "span-seconds": lambda span: figures.spread(span, figures.duration),
    "steps": _steps,  # in step 8, between steps 5 and 8
    "checkpoint": _checkpoint,  # The last good checkpoint is of step 40.
    "way": lambda way: f", {way} is better" if way else "",  # nothing of None
    # Hosts 1, 3
    "hosts": lambda numbers: f"host{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}",
    "adapted": lambda rank: f" by adapters of rank {rank}" if rank else "",
    "plain": lambda text: figures.printable(str(text)),  # foreign text, safe on one line
}
"""The formats of `{number:...}`, besides those of Python and `{n:count step}`."""


class _Formatter(string.Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        if spec.startswith("count "):
            return figures.counted(value, spec.removeprefix("count "))
        if spec in FORMATS:
            return FORMATS[spec](value)
        return super().format_field(value, spec)


_FORMATTER = _Formatter()
