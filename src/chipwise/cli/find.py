"""`chipwise find-lr` and `chipwise bench --largest-batch`: a peak learning rate, and the largest batch, by
short trials."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..explain.terminal import console, lines, printed
from ..machine.hosts import hosts
from ..words.facts import fact
from . import options
from .options import option
from .standard_output import print_json

if TYPE_CHECKING:
    from ..engine.on import On


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


def largest_batch(recipe: options.Given, on: On, at_most: int | None, json_: bool) -> None:
    """Prints the largest batch that fits in memory."""
    from ..study.largest_batch import find_batch as find

    search = find(recipe.load(), on=on, at_most=at_most, progress="none" if json_ else "auto")
    if json_:
        print_json("find_batch/3", search.to_json())
        return
    from ..explain.advice import batch

    to = console()
    printed(to, batch(search))
    if search.batch is not None:
        commands = [f"{recipe.line('transfer', ())} --batch {search.batch}"]
        commands.append(recipe.line("bench", [f"batch={search.batch}"]))
        lines(to, "", fact("largest-is-not-best", commands=commands))
