"""`chipwise plan RECIPE --on TARGETS`."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import TYPE_CHECKING

from ..base import RecipeError, fact, invalid
from ..explain.terminal import answer
from . import options
from .options import flag, option

if TYPE_CHECKING:
    from ..recipe.recipe import Recipe

EVERYTHING = "v2-8,v3-8,v4-8,v5e-8,v5p-8,v6e-8,tpu7x-8,t4,v100,a100,h100"


@options.taking
def plan(
    *,
    recipe: options.Given,
    on: str = option("Targets such as v5e-8,v3-8,a100,h100:8,t4.", "TARGETS", default=EVERYTHING),
    exact: bool = options.EXACT,
    eval_every: str = options.EVAL_EVERY,
    prices: str | None = options.PRICES,
    largest_batch: bool = flag("Also search for the largest batch that fits each target."),
    host_cores: int | None = option("Cores of the feeding hosts. [this host's]", "N", min=1),
    lora: int | None = option("Of a published model: train adapters of rank N alone.", "N", min=1),
    like: Path | None = option("A run with --noise: plan to a --target, at each --batch.", "RUN"),
    target: str | None = option("Goal of --like, such as eval/accuracy=0.99.", "METRIC=VALUE"),
    better: options.Better,
    batch: str | None = option("Batches for --like: 64,512, or 64..4096 by doubling.", "BATCHES"),
    kernels: bool = flag("Show each target's costliest kernels, and what would help."),
    html: Path | None = options.HTML,
    json_: bool = options.JSON,
) -> None:
    """Predict before renting: whether a recipe fits, how fast it is, and the cost.

    RECIPE may be hf://OWNER/NAME or a folder with a config.json: fine-tuning of that model.

    \b
    Examples:
      chipwise plan mnist --on v5e-8,v6e-8,v3-8,a100,h100:8,t4,v100
      chipwise plan my_task.py:recipe --on v5e-1 --largest-batch --json
      chipwise plan mnist --like runs/mnist --target eval/accuracy=0.99 --batch 64..4096 \
--on t4,v5e-1
      chipwise plan gpt2-124m --on v5e-8,h100 --kernels
      chipwise plan gpt2-124m --on rtx-4090,h100:8 --prices live
      chipwise plan hf://Qwen/Qwen3-0.6B --set context=2048 --lora 16 --on t4,rtx-4090
    """
    options.only_look()
    from ..chips.targets import parse
    from ..explain import plan_kernels
    from ..explain.plan_parts import document, page, parts
    from ..explain.plan_progress import plan_progress
    from ..planner.ask import plan as make
    from ..planner.plan_to_target import plan_like

    gc.set_threshold(20_000)  # a seventh of the time to trace a net is collecting objects that stay
    loaded = _loaded(recipe, lora)
    targets = _names(on)
    batches = [] if batch is None else _batches(batch)
    if (like, target, batch).count(None) not in (0, 3) or (like is None and better.given):
        raise RecipeError("plan-like-incomplete")
    if like is not None and target is not None and batch is not None:
        make = functools.partial(
            plan_like, run=like, goal=target, batches=batches, better=better.given
        )
    for name in targets:
        parse(name)  # before the prices, which may take a minute
    known = options.priced(prices)
    with plan_progress(len(targets) * max(1, len(batches))) as reporter:
        plans = make(
            loaded,
            on=targets,
            prices=known,
            exact=exact,
            eval_every=eval_every,
            find_largest_batch=largest_batch,
            host_cores=host_cores,
            progress=reporter.progress,
            ready=reporter.ready,
        )
    report = document(loaded, plans)
    tables = plan_kernels.parts(report["plans"]) if kernels else ()
    answer(report, [*parts(report), *tables], html, json_, page(report))
    for one in plans:
        one.check()


def _loaded(given: options.Given, rank: int | None) -> Recipe:
    """The recipe, or the one that fine-tunes the published model that is named in its place."""
    from ..recipes import BUILT_IN

    described = given.recipe not in BUILT_IN
    if described:  # what reads published models takes half a second to load
        from ..data.sources import described as columns_of
        from ..deploy.fine_tuning import fine_tuning, is_described
        from ..recipe.source import spec_of

        described = is_described(given.recipe)
    if not described:
        if rank is not None:
            raise RecipeError("plan-lora", recipe=given.recipe, rank=rank, alpha=2 * rank)
        return given.load()
    if given.synthetic:
        raise RecipeError("plan-described-synthetic", path=given.recipe)
    recipe = fine_tuning(given.recipe, given.settings, given.data, rank)
    columns = columns_of(spec_of(recipe.task.train))
    options.say(
        fact(
            "plan-described",
            path=given.recipe,
            batch=recipe.batch,
            replicas=recipe.replicas,
            columns=columns,
            duration=str(recipe.duration),
            rank=rank,
        )
    )
    return recipe


def _batches(text: str) -> list[int]:
    """The batches of `64,512` or `64..4096`. Raises `RecipeError` for another text."""
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
