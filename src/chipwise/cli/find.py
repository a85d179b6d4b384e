"""`chipwise find-lr`: a peak learning rate, by a short trial."""

from __future__ import annotations

from ..base import fact
from ..explain.terminal import console, printed
from ..machine.hosts import hosts
from . import options
from .options import option
from .standard_output import print_json


@options.taking
def find_lr(
    recipe: options.Given,
    here: options.Here,
    low: float = option("The first rate.", default=1e-5),
    high: float = option("The last rate.", default=10.0),
    steps: int = option("Steps, one rate each.", "N", default=100),
    workers: str | None = options.WORKERS,
    json_: bool = options.JSON,
) -> None:
    """Find a peak learning rate: one short run whose rate grows with every step.

    \b
    Examples:
      chipwise find-lr digits
      chipwise find-lr cifar10-davidnet --steps 200 --high 1
    """
    on = here.on(workers=workers)
    from ..explain import advice
    from ..study.find_lr import find_lr as find

    progress = "none" if json_ else "auto"
    search = find(recipe.load(), low=low, high=high, steps=steps, on=on, progress=progress)
    if json_:
        print_json("find_lr/3", search.to_json())
        return
    printed(console(), advice.rates(search))
    if not hosts().first:  # host 0 says it
        return
    settings = [f"{key}={value:g}" for key, value in search.settings.items()]
    print(fact("next", command=recipe.line("train", settings)))
