"""`chipwise plan RECIPE --on TARGETS`."""

from __future__ import annotations

import functools
import gc
import itertools
from pathlib import Path

from ..errors import RecipeError, invalid
from ..explain.terminal import answer
from . import options
from .options import flag, option

EVERYTHING = "v2-8,v3-8,v4-8,v5e-8,v5p-8,v6e-8,tpu7x-8,t4,v100,a100,h100"


@options.taking
def plan(
    recipe: options.Given,
    on: str = option("Such as v5e-8,v3-8,a100,h100:8,t4.", "TARGETS", default=EVERYTHING),
    exact: bool = options.EXACT,
    eval_every: str = options.EVAL_EVERY,
    prices: str | None = options.PRICES,
    largest_batch: bool = flag("Also search for the largest batch that fits each target."),
    host_cores: int | None = option("Cores of the feeding hosts. [this host's]", "N", min=1),
    like: Path | None = option("A run with --noise: plan to a --target, at each --batch.", "RUN"),
    target: str | None = option("With --like: what to reach, such as eval/accuracy=0.99.", "METRIC=VALUE"),
    batch: str | None = option("With --like: 64,512, or 64..4096 by doubling.", "BATCHES"),
    kernels: bool = flag("Show each target's costliest kernels, and what would help."),
    html: Path | None = options.HTML,
    json_: bool = options.JSON,
) -> None:
    """Predict before renting: whether it fits, how fast it is, and what it costs.

    \b
    Examples:
      chipwise plan mnist --on v5e-8,v6e-8,v3-8,a100,h100:8,t4,v100
      chipwise plan my_task.py:recipe --on v5e-1 --largest-batch --json
      chipwise plan mnist --like runs/mnist --target eval/accuracy=0.99 --batch 64..4096 --on t4,v5e-1
      chipwise plan gpt2-124m --on v5e-8,h100 --kernels
    """
    options.only_look()
    from ..explain import plan_kernels, plan_page
    from ..explain.plan_progress import plan_progress
    from ..explain.plan_table import document, parts
    from ..planner.ask import plan as make
    from ..planner.like import plan_like

    gc.set_threshold(20_000)  # a seventh of the time to trace a net is collecting objects that stay
    loaded, targets = recipe.load(), _names(on)
    if (like, target, batch).count(None) not in (0, 3):
        text = "--like RUN, --target METRIC=VALUE and --batch 64..4096 belong together: give all three."
        raise RecipeError("plan-like-incomplete", text)
    if like is not None and target is not None and batch is not None:
        make = functools.partial(plan_like, run=like, goal=target, batches=_batches(batch))
    with plan_progress(len(targets)) as reporter:
        plans = make(
            loaded,
            on=targets,
            prices=prices,
            exact=exact,
            eval_every=options.interval(eval_every),
            find_largest_batch=largest_batch,
            measure_feed=recipe.data is not None,
            host_cores=host_cores,
            progress=reporter.progress,
            ready=reporter.ready,
        )
    report = document(loaded, plans)
    tables = plan_kernels.parts(report["plans"]) if kernels else ()
    answer(report, itertools.chain(parts(plans), tables), lambda: plan_page.render(report), html, json_)
    for one in plans:
        one.check()


def _batches(text: str) -> list[int]:
    """Batches of `64,512` or `64..4096`. Raises `RecipeError`."""
    first, dots, last = text.partition("..")
    words = [first, last] if dots else _names(text)
    if not all(word.isdecimal() and 0 < int(word) < 10**9 for word in words) or not words:
        raise invalid("plan-batches", "--batch", text, "64,512, or 64..4096 by doubling")
    numbers = [int(word) for word in words]
    if not dots:
        return numbers
    low, high = numbers
    return [low << n for n in range(max(high // low, 1).bit_length())]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
