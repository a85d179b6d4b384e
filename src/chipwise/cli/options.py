"""What commands share: options, what they mean for JAX before it starts, and the command as it was typed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DeviceError

if TYPE_CHECKING:
    from ..engine.on import On


def option(
    help: str, metavar: str | None = None, *, name: str | None = None, min: float | None = None
) -> Any:
    """An option, to be named in `Annotated`; `name` where it is not that of the parameter."""
    return typer.Option(*([name] if name else []), metavar=metavar, help=help, min=min)


Recipe = Annotated[str, typer.Argument(help="A built-in recipe (digits, mnist, ...) or path.py:name.")]
Devices = Annotated[
    str | None, option("Use N of the devices found; 'cpu' leaves an accelerator alone.", "N|cpu")
]
Simulate = Annotated[int | None, option("Make N CPU devices, on any machine, and use them.", "N", min=1)]
Set = Annotated[
    list[str] | None, option("Change a setting of the recipe; may be repeated.", "KEY=VALUE", name="--set")
]
Data = Annotated[str | None, option("Folder or URL with the data set; default: download.", "DIR")]
Synthetic = Annotated[
    bool, option("Made-up examples of the data set's shapes: speed without data.", name="--synthetic")
]
Workers = Annotated[
    str | None, option("Who reads streamed data: 4, threads:4 or processes:4. [by trial]", "N")
]
Exact = Annotated[
    bool, option("Add in a fixed order: the same bits on any number of devices.", name="--exact/--no-exact")
]
EvalEvery = Annotated[str, option("Such as 1ep, 500st, 10%, or 'end'.", "DURATION")]
LogEvery = Annotated[
    str | None, option("Between lines of metrics. [4% of the run, at most 200st]", "DURATION")
]
CheckpointEvery = Annotated[str | None, option("[5% of the run, at least 30 seconds apart]", "DURATION")]
Feed = Annotated[str, option("Keep the training data on the device, or stream it.", "auto|device|host")]
StepsPerCall = Annotated[int | None, option("With --no-exact, one device and data on it. [by trial]", "N")]
AtOnce = Annotated[
    int, option("Runs side by side, each in a process of its own, on the CPU: same bits.", "N")
]
Metric = Annotated[
    str | None, option("What to compare. [eval/accuracy, else eval/loss, else train/loss]", "NAME")
]
Quiet = Annotated[bool, option("No progress, only warnings and the result.", name="--quiet")]
Json = Annotated[bool, option("Print one JSON object, and nothing else, on standard output.", name="--json")]


def on(devices: str | None, simulate: int | None, **rest: Any) -> On:
    """The machine's side of a call; `--simulate` takes effect on JAX here."""
    count, platform = None, None
    if devices is not None:
        if devices.lower() == "cpu":
            platform = "cpu"
        elif devices.isdigit() and int(devices) > 0:
            count = int(devices)
        else:
            raise DeviceError("devices-option", devices=devices)
    if simulate is not None:
        from ..machine.detect import simulate as make

        make(simulate)
        platform = "cpu"
    from ..engine.on import On

    return On(count, platform, **rest)


def only_look() -> None:
    """For commands that compute nothing on a device: JAX starts without the accelerator, and holds none."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def again(context: typer.Context, **changed: str) -> str:
    """The command line of `context`: what was given there, and the options `changed` in its place."""
    words = ["chipwise", str(context.info_name)]
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        if name in changed:
            given, value = True, changed[name]
        if not given:
            continue
        if parameter.param_type_name == "argument":
            words.append(str(value))
        elif isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                words += [parameter.opts[0], str(one)]
    return shlex.join(words)


def train_line(recipe: str | Path, data: str | None, synthetic: bool = False, settings: Any = ()) -> str:
    """What to type to train a recipe: a built-in one, or a file that was written."""
    spec = f"{recipe}:recipe" if isinstance(recipe, Path) else recipe
    words = ["chipwise", "train", spec, *(word for text in settings for word in ("--set", text))]
    return shlex.join([*words, *(["--data", data] if data else []), *(["--synthetic"] if synthetic else [])])
