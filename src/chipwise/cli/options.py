"""Options that several commands share, and what they mean for JAX before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DeviceError

if TYPE_CHECKING:
    from ..engine.on import On

Devices = Annotated[
    str | None,
    typer.Option(metavar="N|cpu", help="Use N of the devices found; 'cpu' leaves an accelerator alone."),
]
Simulate = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Make N CPU devices, on any machine, and use them.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe; may be repeated."),
]
Data = Annotated[
    str | None, typer.Option(metavar="DIR", help="Folder or URL with the data set; default: download.")
]
Synthetic = Annotated[
    bool, typer.Option("--synthetic", help="Made-up examples of the data set's shapes: speed without data.")
]
Workers = Annotated[
    str | None,
    typer.Option(metavar="N", help="Who reads streamed data: 4, threads:4 or processes:4. [by trial]"),
]
Exact = Annotated[
    bool,
    typer.Option("--exact/--no-exact", help="Add in a fixed order: the same bits on any number of devices."),
]
EvalEvery = Annotated[str, typer.Option(metavar="DURATION", help="Such as 1ep, 500st, 10%, or 'end'.")]
LogEvery = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="Between lines of metrics. [4% of the run, at most 200st]"),
]
CheckpointEvery = Annotated[
    str | None, typer.Option(metavar="DURATION", help="[5% of the run, at least 30 seconds apart]")
]
Feed = Annotated[
    str,
    typer.Option(metavar="auto|device|host", help="Keep the training data on the device, or stream it."),
]
StepsPerCall = Annotated[
    int | None,
    typer.Option(metavar="N", help="With --no-exact, one device and data on it. [by trial]"),
]
AtOnce = Annotated[
    int,
    typer.Option(metavar="N", help="Runs side by side, each in a process of its own, on the CPU: same bits."),
]
Metric = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What to compare. [eval/accuracy, else eval/loss, else train/loss]"),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only warnings and the result.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, and nothing else, on standard output.")
]


def on(devices: str | None, simulate: int | None, **rest: Any) -> On:
    """The machine's side of a call; `--simulate` takes effect on JAX here."""
    count, platform = None, None
    if devices is not None:
        if devices.lower() == "cpu":
            platform = "cpu"
        elif devices.isdigit() and int(devices) > 0:
            count = int(devices)
        else:
            raise DeviceError(f"--devices {devices}: expected a number of at least 1, or cpu.")
    if simulate is not None:
        from ..machine.simulate import simulate as make

        make(simulate)
        platform = "cpu"
    from ..engine.on import On

    return On(count, platform, **rest)
