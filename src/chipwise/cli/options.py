"""Options that commands share, their effect on JAX before it starts, and command lines to show."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..errors import DeviceError

if TYPE_CHECKING:
    from ..engine.on import On
    from ..recipe import recipe as recipes


def option(
    help: str, metavar: str | None = None, *, name: str | None = None, min: float | None = None
) -> Any:
    """An option for `Annotated`; `name` if it differs from the parameter's."""
    return typer.Option(*([name] if name else []), metavar=metavar, help=help, min=min)


Recipe = Annotated[str, typer.Argument(help="A built-in recipe (digits, mnist, ...) or path.py:name.")]
Devices = Annotated[str | None, option("Use N of the devices found; 'cpu' ignores accelerators.", "N|cpu")]
Simulate = Annotated[int | None, option("Simulate and use N CPU devices.", "N", min=1)]
HostCount = Annotated[
    int | None, option("Number of hosts, if not set by the environment.", "N", name="--hosts", min=1)
]
HostIndex = Annotated[int | None, option("Number of this host, from 0.", "I", name="--host", min=0)]
Coordinator = Annotated[str | None, option("Address of host 0.", "ADDRESS")]
NoCache = Annotated[bool, option("Neither use nor store compiled programs.", name="--no-cache")]
Set = Annotated[
    list[str] | None, option("Change a setting of the recipe; may be repeated.", "KEY=VALUE", name="--set")
]
Data = Annotated[str | None, option("Folder or URL with the data set; default: download.", "DIR")]
Synthetic = Annotated[
    bool, option("Random examples of the data set's shapes: speed without data.", name="--synthetic")
]
Workers = Annotated[
    str | None, option("What reads streamed data: 4, threads:4 or processes:4. [by trial]", "N")
]
Exact = Annotated[
    bool, option("Add in a fixed order: the same bits on any number of devices.", name="--exact/--no-exact")
]
ShardOptimizer = Annotated[
    bool | None,
    option(
        "Split the optimizer's state over the devices. [if it saves much memory]",
        name="--shard-optimizer/--no-shard-optimizer",
    ),
]
EvalEvery = Annotated[str, option("Such as 1ep, 500st, 10%, or 'end'.", "DURATION")]
LogEvery = Annotated[
    str | None, option("Between lines of metrics. [4% of the run, at most 200st]", "DURATION")
]
CheckpointEvery = Annotated[str | None, option("[5% of the run, at least 30 seconds apart]", "DURATION")]
Feed = Annotated[str, option("Keep the training data on the device, or stream it.", "auto|device|host")]
StepsPerCall = Annotated[int | None, option("With --no-exact, one device and data on it. [by trial]", "N")]
Metric = Annotated[
    str | None, option("What to compare. [eval/accuracy, else eval/loss, else train/loss]", "NAME")
]
OfRun = Annotated[
    str | None,
    option("The run's recipe, if it is not built in: files named in a run are not executed.", "FILE:NAME"),
]
Prices = Annotated[
    str | None, option("Your own prices instead of the bundled ones.", "FILE", name="--prices")
]
Html = Annotated[Path | None, option("Write one self-contained page.", "FILE")]
Quiet = Annotated[bool, option("No progress, only warnings and the result.", name="--quiet")]
Json = Annotated[bool, option("Print one JSON object, and nothing else, on standard output.", name="--json")]


# ---- groups of options: a command has a parameter for a group, and `taking` makes options of its fields


@dataclass(frozen=True)
class Given:
    """A recipe, its data and its settings."""

    recipe: Recipe
    data: Data = None
    synthetic: Synthetic = False
    set_: Set = None

    @property
    def settings(self) -> list[str]:
        return self.set_ or []

    def load(self) -> recipes.Recipe:
        from ..recipe.settings import load

        return load(self.recipe, self.settings, self.data, self.synthetic)

    @property
    def origin(self) -> str | None:
        from ..recipe.settings import origin

        return origin(self.recipe, self.settings, self.data, self.synthetic)

    def words(self, settings: Sequence[str] | None = None) -> list[str]:
        """The command line after a recipe: `settings`, by default its own, and its data."""
        settings = self.settings if settings is None else settings
        words = [word for text in settings for word in ("--set", text)]
        return words + (["--data", self.data] if self.data else []) + ["--synthetic"] * self.synthetic

    def train_line(self, changed: Sequence[str] = ()) -> str:
        """The command that trains the recipe with settings `changed`."""
        return shlex.join(["chipwise", "train", self.recipe, *self.words([*self.settings, *changed])])


HELD = contextlib.ExitStack()
"""What a command changes in its process until it ends, when `main` closes it."""


@dataclass(frozen=True)
class Here:
    """Devices of this machine."""

    devices: Devices = None
    simulate: Simulate = None
    hosts: HostCount = None
    host: HostIndex = None
    coordinator: Coordinator = None
    no_cache: NoCache = False

    def on(self, **how: Any) -> On:
        """The machine's settings for a call. Applies `--simulate` to JAX, and joins the hosts; from now on,
        only host 0 prints."""
        count, platform = None, None
        if self.devices is not None:
            if self.devices.lower() == "cpu":
                platform = "cpu"
            elif self.devices.isdecimal() and int(self.devices) > 0:
                count = int(self.devices)
            else:
                text = "--devices {given}: expected a number of at least 1, or cpu."
                raise DeviceError("devices-option", text, given=self.devices)
        if self.simulate is not None:
            from ..machine.detect import simulate

            simulate(self.simulate)
            platform = "cpu"
        if not self.no_cache:
            from ..data.remote import home
            from ..machine.compilation_cache import cached_in

            HELD.enter_context(cached_in(home() / "programs"))
        from ..engine.on import On
        from ..machine.hosts import hosts

        here = hosts(self.hosts, self.host, self.coordinator)
        if here.count > 1:
            # The libraries that connect the hosts print to standard output
            sys.stdout = os.fdopen(os.dup(1), "w")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not here.first:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (to the end of the process)

        return On(count, platform, **how)


def interval(eval_every: str) -> str | None:
    """The argument of `fit` and `plan` for `--eval-every`."""
    return None if eval_every == "end" else eval_every


@dataclass(frozen=True)
class Hardware(Here):
    """Devices of this machine, with the order of additions, the feed and the sharding."""

    exact: Exact = True
    feed: Feed = "auto"
    workers: Workers = None
    shard_optimizer: ShardOptimizer = None

    @property
    def how(self) -> dict[str, Any]:
        how = {"exact": self.exact, "feed": self.feed, "workers": self.workers}
        return {**how, "shard_optimizer": self.shard_optimizer}


@dataclass(frozen=True)
class Training(Hardware):
    """The options of a run: those of the machine, and intervals of steps."""

    eval_every: EvalEvery = "1ep"
    log_every: LogEvery = None
    checkpoint_every: CheckpointEvery = None
    steps_per_call: StepsPerCall = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments for `fit` and `sweep`."""
        return {
            "on": self.on(**self.how),
            "eval_every": interval(self.eval_every),
            "log_every": self.log_every,
            "checkpoint_every": self.checkpoint_every,
            "steps_per_call": self.steps_per_call,
        }


def taking(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with options for the fields of each parameter that is a group."""
    types = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in types.items() if is_dataclass(kind)}
    members = {name: [field.name for field in fields(kind)] for name, kind in groups.items()}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            inner, hints = inspect.signature(groups[name]), get_type_hints(groups[name], include_extras=True)
            parameters += [p.replace(annotation=hints[p.name]) for p in inner.parameters.values()]
        else:
            parameters.append(parameter.replace(annotation=types[name]))
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        grouped = {name: kind(**{m: values.pop(m) for m in members[name]}) for name, kind in groups.items()}
        command(**grouped, **values)

    del run.__wrapped__  # type: ignore[attr-defined]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def only_look() -> None:
    """Makes JAX start without accelerators, for commands that compute nothing on a device."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def given(context: typer.Context) -> dict[str, str]:
    """The parameters that were typed, by name, each with its flag."""
    typed = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            off = context.params.get(str(parameter.name)) is False
            flags = (off and parameter.secondary_opts) or parameter.opts
            typed[str(parameter.name)] = flags[0]
    return typed


def again(context: typer.Context, **changed: str) -> str:
    """The command line of `context`, with other values for the options `changed`."""
    words, typed = ["chipwise", str(context.info_name)], given(context)
    for parameter in context.command.params:
        name = str(parameter.name)
        if name not in typed and name not in changed:
            continue
        value = changed.get(name, context.params.get(name))
        if parameter.param_type_name == "argument":
            words.append(str(value))
        elif isinstance(value, bool):
            words.append(typed[name])
        else:
            for element in value if isinstance(value, (list, tuple)) else [value]:
                words += [parameter.opts[0], str(element)]
    return shlex.join(words)
