"""`chipwise check` and `chipwise transfer`: advice on a recipe without running it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..base import Fact, RecipeError, fact, plain
from ..explain.terminal import console, lines, printed
from . import options
from .options import flag, option
from .standard_output import print_json

if TYPE_CHECKING:
    from ..study.transfer import Transfer


@options.taking
def check(
    recipe: options.Given,
    on: str | None = option("Also warn about this device, such as v3-8 or a100:8.", "TARGET"),
    summary: bool = flag("The model: layers, shapes, parameters, FLOPs and bytes."),
    json_: bool = options.JSON,
) -> None:
    """Warn about settings that are probably mistakes, one line each. Exit code 0 even with
    warnings.

    \b
    Examples:
      chipwise check cifar10-davidnet --set weight_decay=1.25e-4
      chipwise check mnist --set batch=100 --on v3-8
      chipwise check my_task.py:recipe --json
      chipwise check cifar10-davidnet --summary
    """
    options.only_look()
    from ..recipe.check import check as look

    loaded = recipe.load()
    findings = look(loaded, on)
    model = None
    if summary:
        from ..explain import model_summary

        model = model_summary.layers(loaded)
    if json_:
        made: dict[str, Any] = {
            "recipe": loaded.name,
            "on": on,
            "findings": [finding.json() for finding in findings],
        }
        if model is not None:
            made["layers"] = plain(model)
        print_json("check/1", made)
        return
    if model is not None:
        printed(console(width=None), model_summary.parts(loaded, model))
    for finding in findings:
        print(f"warning: {finding}")
    if not findings:
        print(fact("no-findings", recipe=loaded.name))


@options.taking
def transfer(
    *,
    recipe: options.Given,
    batch: int | None = option("The new global batch.", "N"),
    replicas: int | None = option("The new number of replicas.", "N"),
    duration: str | None = option("The new length, such as 48ep.", "DURATION"),
    lr: float | None = option("Peak rate to use instead of the rule's; the decay compensates."),
    like: str | None = option(
        "Derive the length from this run's noise scale; needs --batch, --target.", "RUN"
    ),
    target: str | None = option("Goal of --like.", "METRIC=VALUE"),
    better: options.Better,
    json_: bool = options.JSON,
) -> None:
    """Move a recipe to another batch, number of replicas or length, and explain each change.

    \b
    Examples:
      chipwise transfer cifar10-davidnet --batch 128
      chipwise transfer mnist --batch 1024 --replicas 32
      chipwise transfer my_task.py:recipe --batch 64 --set lr=0.2 --json
      chipwise transfer mnist --batch 1024 --like runs/mnist --target eval/accuracy=0.99
    """
    options.only_look()
    from ..explain import advice
    from ..study.critical_batch import critical_batch
    from ..study.transfer import transfer as move

    old = recipe.load()
    told = list[Fact]()
    if like is not None or target is not None or better.given:
        if like is None or target is None or batch is None or duration is not None:
            text = "--like RUN takes --target METRIC=VALUE and --batch N, and says the duration."
            raise RecipeError("transfer-like", text)
        law = critical_batch(old, like, target, better.given)
        told = [law.told(steps := law.steps(batch))]
        duration = f"{steps.steps}st"
    moved = move(old, batch=batch, replicas=replicas, duration=duration, lr=lr)
    if json_:
        print_json("transfer/1", moved.to_json() | ({"like": told[0].json()} if told else {}))
        return
    to = console()
    printed(to, advice.moved(moved))
    lines(
        to,
        "",
        *told,
        next_line(recipe, moved, batch=batch, replicas=replicas, duration=duration, lr=lr),
    )


def next_line(given: options.Given, moved: Transfer, **asked: object) -> Fact:
    """The next step, which trains the recipe that `moved` made of `given`: a command with `--set`,
    or a line of Python if a length within a schedule changed. *Arguments:* `asked`: the arguments
    that `transfer` was called with."""
    again = replace(given, set_=[*given.settings, *moved.settings])
    try:
        same = again.load().describe() == moved.recipe.describe()
    except RecipeError:  # a function of the step has no peak
        same = False
    if same:
        return fact("next", command=given.line("train", moved.settings))
    words = ", ".join(f"{name}={value!r}" for name, value in asked.items() if value is not None)
    how = [f"{given.settings}"] if given.settings else []
    how += [f"data={given.data!r}"] if given.data else []
    how += ["synthetic=True"] * given.synthetic
    loaded = f"cw.load({', '.join([repr(given.recipe), *how])})"
    code = f"cw.fit(cw.transfer({loaded}, {words}).recipe)"
    return fact("next-in-python", code=code)
