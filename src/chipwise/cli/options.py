"""Options that commands share, their effect on JAX before it starts, and command lines to show."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..base import DeviceError, RecipeError, Say
from ..base.files import to_write
from .standard_output import opened

if TYPE_CHECKING:
    from ..chips.prices import Price
    from ..deploy.model import Trained
    from ..recipe import recipe as recipes
    from ..run.on import On


def option(
    help: str,
    metavar: str | None = None,
    default: Any = None,
    *,
    name: str | None = None,
    min: Any = None,
) -> Any:
    """An option, as the default of a command's parameter or of a group's field. See `taking`.

    *Arguments:* `default`: `MISSING` if it must be given. `name`: the option's name, if it is not
    the parameter's, such as `--from`.
    """

    def made(flag: str) -> Any:
        checked = (
            (lambda path: Path(to_write(path, flag)))
            if flag in ("--run", "--out", "--html")
            else None
        )
        return typer.Option(name or flag, metavar=metavar, help=help, min=min, parser=checked)

    return field(default=default, metadata={"made": made})


def flag(help: str, name: str | None = None) -> Any:
    """An option without a value: off unless it is given."""
    return option(help, default=False, name=name)


def argument(help: str, metavar: str | None = None, default: Any = MISSING) -> Any:
    """An argument, as `option`. It must be given unless it has a default."""
    return field(
        default=default, metadata={"made": lambda _: typer.Argument(metavar=metavar, help=help)}
    )


RECIPE = argument("A built-in recipe (digits, mnist, ...) or path.py:name.")
RUN = argument("A run folder.")
SET = option("Change a setting of the recipe; may be repeated.", "KEY=VALUE")
DATA = option("Folder or URL with the data set. [MNIST and CIFAR-10 are downloaded]", "DIR")
SYNTHETIC = flag("Random examples of the data set's shapes: speed without data.")
WORKERS = option("Readers of streamed data: 4, threads:4 or processes:4. [found by trial]", "N")
EXACT = option(
    "Add in a fixed order: the same bits on any number of devices.",
    default=True,
    name="--exact/--no-exact",
)
EVAL_EVERY = option(
    "Interval of evaluations: 1ep, 500st, 10%, or 'end'.", "DURATION", default="1ep"
)
METRIC = option("Metric to compare. [eval/accuracy, else eval/loss, else train/loss]", "NAME")
COMPARED = option("Metric to compare. [eval/accuracy, else eval/loss, else the first]", "NAME")
OF_RUN = option(
    "The run's recipe, if not built in: files named in a run are not executed.", "FILE:NAME"
)
EVAL_DATA = option(
    "Evaluate on this instead: a packed folder or .npz, such as a third split.", "PATH"
)
BEST = flag("The checkpoint that --keep-best kept, instead of the newest.")
PRICES = option("Take prices from your own file, or read today's: live. [bundled]", "FILE|live")
HTML = option("Write one self-contained page.", "FILE")
QUIET = flag("No progress, only warnings and the result.")
JSON = flag("Print one JSON object, and nothing else, on standard output.")


# ---- groups of options: a command has a parameter for a group, and `taking` makes options of its
# fields


@dataclass(frozen=True)
class Given:
    """A recipe, its data and its settings."""

    recipe: str = RECIPE
    data: str | None = DATA
    synthetic: bool = SYNTHETIC
    set_: list[str] | None = SET

    @property
    def settings(self) -> list[str]:
        return self.set_ or []

    def load(self) -> recipes.Recipe:
        from ..recipes.load import load

        loaded = load(self.recipe, self.settings, self.data, self.synthetic)
        return replace(loaded, source={"recipe": self.recipe})

    def words(self, settings: Sequence[str] | None = None) -> list[str]:
        """The command line after a recipe: `settings`, by default its own, and its data."""
        settings = self.settings if settings is None else settings
        words = [word for text in settings for word in ("--set", text)]
        return (
            words + (["--data", self.data] if self.data else []) + ["--synthetic"] * self.synthetic
        )

    def line(self, command: str, changed: Sequence[str]) -> str:
        """The command line for `command` of the recipe with settings `changed`."""
        return shlex.join(
            ["chipwise", command, self.recipe, *self.words([*self.settings, *changed])]
        )


@dataclass(frozen=True)
class Better:
    """The directions in which metrics are better, whatever a recipe or a run says."""

    lower: list[str] | None = option(
        "Lower values of METRIC are better; may be repeated.", "METRIC"
    )
    higher: list[str] | None = option(
        "Higher values of METRIC are better; may be repeated.", "METRIC"
    )

    @property
    def given(self) -> dict[str, str]:
        from ..recipe.direction import bare  # only for commands that are given it

        lower, higher = (
            {bare(name) for name in names or ()} for names in (self.lower, self.higher)
        )
        if both := sorted(lower & higher):
            wrong = "{metrics:and}: given to both --lower and --higher."
            raise RecipeError("better-twice", wrong, metrics=both)
        return dict.fromkeys(lower, "lower") | dict.fromkeys(higher, "higher")


@dataclass(frozen=True)
class OfRun:
    """The trained model of a run folder."""

    run: str = RUN
    recipe: str | None = OF_RUN
    best: bool = BEST

    def model(self, say: Say, **data: Any) -> Trained:
        """The model of the newest checkpoint, or of the best one. *Arguments:* `data`: what of the
        run's data is needed, see `deploy.model.trained`."""
        from ..deploy.model import trained

        return trained(self.run, self.recipe, say, best=self.best, **data)


HELD = contextlib.ExitStack()
"""The changes of a command to its process. `main` undoes them when the command ends."""


@dataclass(frozen=True)
class Here:
    """Devices of this machine."""

    devices: str | None = option("Use N of the devices found; 'cpu' ignores accelerators.", "N|cpu")
    simulate: int | None = option("Simulate and use N CPU devices.", "N", min=1)
    hosts: int | None = option("Number of hosts, if not set by the environment.", "N", min=1)
    host: int | None = option("Number of this host, from 0.", "I", min=0)
    coordinator: str | None = option("Address of host 0.", "ADDRESS")
    no_cache: bool = flag("Neither use nor store compiled programs.")
    portable: bool = flag("Compile for x86-64 CPUs in general, not for this one.")

    def on(self, **how: Any) -> On:
        """The machine's settings for a call. Applies `--simulate` and `--portable` to JAX, and
        joins the hosts. From then on, only host 0 prints."""
        count, platform = None, None
        if self.portable:
            from ..machine.portable_cpu import portable

            portable()
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
            from ..base.files import home
            from ..machine.compilation_cache import cached_in

            HELD.enter_context(cached_in(home() / "programs"))
        from ..machine.hosts import hosts
        from ..run.on import On

        here = hosts(self.hosts, self.host, self.coordinator)
        if here.count > 1:
            # The libraries that connect the hosts print to standard output
            sys.stdout = opened(os.dup(1))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not here.first:
            # Open to the end of the process
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115

        return On(count, platform, **how)


@dataclass(frozen=True)
class Hardware(Here):
    """Devices of this machine, with the order of additions, the feed and the sharding."""

    exact: bool = EXACT
    feed: str = option(
        "Keep the data on the device, or stream it.", "auto|device|host", default="auto"
    )
    workers: str | None = WORKERS
    shard_optimizer: bool | None = option(
        "Split the optimizer's state over the devices. [if it saves much memory]",
        name="--shard-optimizer/--no-shard-optimizer",
    )

    shares: str | None = option("Blocks for each device, such as 3,3,2. [equally many]", "N,N,...")
    steps_per_call: str = option(
        "Run up to N steps of a small net in one call of a CPU or GPU; auto: if it pays. [1]",
        "N|auto",
        default="1",
    )

    @property
    def how(self) -> dict[str, Any]:
        how: dict[str, Any] = {"exact": self.exact, "feed": self.feed, "workers": self.workers}
        if self.shares is not None:
            numbers = self.shares.split(",")
            whole = all(number.isdecimal() for number in numbers)
            how["shares"] = tuple(map(int, numbers)) if whole else self.shares
        most = self.steps_per_call
        how["steps_per_call"] = int(most) if most.isdecimal() else most
        return {**how, "shard_optimizer": self.shard_optimizer}


@dataclass(frozen=True)
class Training(Hardware):
    """The options of a run: those of the machine, and intervals of steps."""

    eval_every: str = EVAL_EVERY
    log_every: str | None = option(
        "Interval of rows of metrics. [4% of the run, at most 200st]", "DURATION"
    )
    checkpoint_every: str | None = option(
        "Interval of checkpoints. [5% of the run, at least 30 seconds]", "DURATION"
    )
    stuck: str = option(
        "Stop the run after this long without progress; 0 disables.", "SECONDS", default="300s"
    )
    verify: str = option(
        "Share of replicas to compute again on another device, such as 1%.", "PERCENT", default="0%"
    )
    noise: bool = flag("Measure the gradient noise scale, for plan --like and transfer --like.")
    track: list[str] | None = option(
        "Also send rows to wandb:PROJECT, mlflow:EXPERIMENT or trackio:PROJECT; may be repeated. "
        "Later: chipwise track RUN.",
        "SERVICE:NAME",
    )
    lines: bool = flag("Print a line an epoch with every metric, instead of a bar.")

    def progress(self, quiet: bool) -> str:
        """The argument of `fit` and `sweep`."""
        return "none" if quiet else "lines" if self.lines else "auto"

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments for `fit` and `sweep`."""
        return {
            "on": self.on(**self.how, stuck=self.stuck, verify=self.verify, noise=self.noise),
            "eval_every": self.eval_every,
            "log_every": self.log_every,
            "checkpoint_every": self.checkpoint_every,
            "track": self.track or (),
        }


def taking(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as Typer reads it: with options for the fields of each parameter that is a
    group."""
    types = get_type_hints(command)
    groups: dict[str, Any] = {name: kind for name, kind in types.items() if is_dataclass(kind)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            hints = get_type_hints(groups[name])
            parameters += [
                _typer(part.name, hints[part.name], part) for part in fields(groups[name])
            ]
        else:
            parameters.append(_typer(name, types[name], parameter.default))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        grouped = {
            name: kind(**{part.name: values.pop(part.name) for part in fields(kind)})
            for name, kind in groups.items()
        }
        command(**grouped, **values)

    del run.__wrapped__  # type: ignore[attr-defined]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _typer(name: str, kind: Any, made: Any) -> inspect.Parameter:
    """The parameter from which Typer makes an option or an argument."""
    default: Any = inspect.Parameter.empty
    if isinstance(made, Field):
        kind = Annotated[kind, made.metadata["made"](f"--{name.strip('_').replace('_', '-')}")]
        default = default if made.default is MISSING else made.default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def say(said: object) -> None:
    """Prints a line beside the output."""
    typer.echo(str(said), err=True)


def priced(given: str | None) -> tuple[Price, ...]:
    """The prices of `--prices`, after lines that say what was read today."""
    from ..chips.live_prices import prices

    read = prices(given)
    for line in read.said:
        say(line)
    return read.prices


def warn(warning: object) -> None:
    typer.echo(f"warning: {warning}", err=True)


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
