"""Options that several commands share, and what they mean for JAX before it starts."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import DeviceError

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
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, and nothing else, on standard output.")
]


def choose(devices: str | None, simulate: int | None) -> tuple[int | None, str | None]:
    """The device count and platform to ask for; `--simulate` takes effect on JAX here."""
    count, platform = None, None
    if devices is not None:
        if devices.lower() == "cpu":
            platform = "cpu"
        elif devices.isdigit() and int(devices) > 0:
            count = int(devices)
        else:
            raise DeviceError(f"--devices {devices}: expected a number of at least 1, or cpu.")
    if simulate is not None:
        from ..devices.simulate import simulate as make

        make(simulate)
        platform = "cpu"
    return count, platform
