"""Tokens of a trained language model on chips that you do not have: latency, tokens/s, dollars a million.

    python examples/plan_tokens.py gpt2-124m --on t4,h100,v5e-1 --prompt 512 --tokens 200 --texts 1,8,64
    python examples/plan_tokens.py llama-8b --set shards=1 --on h100,v6e-1 --json

Each chip's own compiler compiles the two programs that `chipwise generate` runs; their kernels are timed as
those of training in `chipwise plan`. Each device writes texts of its own, block by block: a target of several
devices writes as many times more. A plan's run is a million new tokens, without starting; texts that wait for
others of their block are not counted. No measurement on a chip has tested these plans: their intervals are
those of training.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from rich.table import Table

import chipwise as cw
from chipwise.chips.catalogue import peak_flops_per_device
from chipwise.chips.prices import load as load_prices
from chipwise.chips.targets import Target, parse
from chipwise.deploy.generation import decode_programs, lengths
from chipwise.engine.blueprint import Blueprint, Whole, tracing
from chipwise.engine.layout import Layout
from chipwise.engine.state import abstract_model, count, nbytes
from chipwise.errors import invalid
from chipwise.explain import plan_table, terminal
from chipwise.hlo.kernel import costliest
from chipwise.machine.plugins import hidden
from chipwise.planner.compile_step import Answers, cache_folder, compile_steps
from chipwise.planner.plan_advice import lacks
from chipwise.planner.plans import Plan, Plans, costs
from chipwise.planner.time_step import memory_needed, one_call, sources, timed
from chipwise.planner.tracing import Traceable, TracedStep, forget_traces
from chipwise.recipe import precision
from chipwise.recipe.recipe import Recipe
from chipwise.words.facts import fact

RUN = 1_000_000
"""New tokens that a plan's seconds and dollars are for."""


@hidden()  # tracing starts JAX
def plan_generation(
    recipe: Recipe,
    on: Sequence[str],
    *,
    prompt: int,
    tokens: int,
    rows: Sequence[int] = (8,),
    prices: str | Path | None = None,
) -> Plans:
    """Predicts memory, speed and cost of the tokens that the recipe's model writes on each target of `on`.

    *Arguments:* `prompt`, `tokens`: of a text, old and new; `rows`: texts that a device writes at once, each
    number with a plan of its own; `prices`: as in `cw.plan`.

    *Returns* plans whose `step_seconds` are one token of each of a device's texts, whose
    `examples_per_second` are new tokens a second of the whole target, prompts included, and whose
    `wall_seconds` and costs are of a million; `seconds["first_token"]` is the wait for a text's first token.
    Raises `RecipeError` for a task without `decode`, or lengths above its context; `DeviceError`,
    `DataError` as `cw.plan`.
    """
    context = recipe.task.context
    if context is None:
        raise invalid("plan-tokens", "the recipe", recipe.name, "a task with decode, as that of gpt2-124m")
    if prompt < 1 or tokens < 1 or prompt + tokens - 1 > context:
        raise invalid("plan-tokens", "prompt+tokens", f"{prompt}+{tokens}", f"at most {context} together")
    if not rows or min(rows) < 1:
        raise invalid("plan-tokens", "texts at once", list(rows), "1 or more")
    table, today = load_prices(prices), datetime.date.today()
    targets = {one.name: one for one in map(parse, on)}.values()
    made: dict[int, Plan] = {}
    try:
        blocks = [_block(recipe, prompt, tokens, each) for each in dict.fromkeys(rows)]
        cases = [(target, step) for step in blocks for target in targets]
        for place, answers in compile_steps(cases, cache=cache_folder(None)):
            one = _plan(*cases[place], answers, prompt, tokens)
            if one.wall_seconds is not None:
                priced = costs(cases[place][0], table, one.wall_seconds, today)
                one = dataclasses.replace(one, costs=priced)
            made[place] = one
    finally:
        forget_traces()
    return Plans(made[place] for place in range(len(cases)))


def _block(recipe: Recipe, prompt: int, tokens: int, rows: int) -> TracedStep:
    """The programs of one device, in a layout of their own: shards are not for what is only read."""
    both, how = lengths(recipe.task.context, prompt, tokens), (np.float32(0.8), np.uint32(0))
    with tracing(recipe.name):
        params, state = abstract_model(recipe)
        model = jax.eval_shape(lambda tree: precision.cast(tree, recipe.precision), params), state
        made = decode_programs(recipe, model, rows, *both, how, 40)
    named = zip(("prefill", "token"), made, strict=True)
    cache = nbytes(made[1][1][1])
    return Blueprint(
        recipe=recipe,
        layout=Layout(rows, 1, 1, True),
        resident=True,
        programs=tuple(Traceable.of(name, *program) for name, program in named),
        calls=1,
        size=0,
        parameters=count(params),
        parameter_bytes=nbytes(model[0]),
        optimizer_bytes=0,
        state_bytes=nbytes(state) + cache,
        data_bytes=0,
        whole=Whole(nbytes(model[0]), 0),
    )


def _plan(target: Target, step: TracedStep, answers: Answers, prompt: int, tokens: int) -> Plan:
    """The plan without its costs."""
    recipe, problems = step.recipe, [one.problem for one in answers.values() if one.problem is not None]
    rows, memory = step.layout.batch, memory_needed(step, target, answers)
    problem = lacks(target, step.programs[1].contents(target.chip).dtypes) or next(iter(problems), None)
    if problem is None and memory is not None and not memory.fits:
        problem = fact(
            "texts-do-not-fit",
            "does not fit: a device needs {needed:bytes} of {available:bytes}: fewer texts at once take less",
            needed=memory.needed, available=memory.available,
        )  # fmt: skip
    plan = Plan(
        target=f"{target.name} at {rows}",
        chip=target.chip.name,
        chips=target.chips,
        devices=target.devices,
        devices_found=target.devices,
        batch=rows * target.devices,
        replicas=target.devices,
        replicas_per_device=1,
        precision=recipe.precision,
        parameters=step.parameters,
        problem=problem,
        memory=memory,
    )
    if problem is not None:
        return plan
    before, token = (one_call(step, target, answers[one.name]) for one in step.programs)
    million = before.plus(token.times(tokens)).times(RUN / (rows * tokens * target.devices))
    kernels = timed(target, recipe.precision, answers["token"].kernels)
    peak, flops = peak_flops_per_device(target.chip, recipe.precision), answers["token"].flops
    first = before.plus(token).value
    about = fact(
        "tokens-planned",
        "{million:,} new tokens, {tokens} after each prompt of {prompt}, {rows:count text} at once on a "
        "device; a first token comes after {first:ms}",
        million=RUN, tokens=tokens, prompt=prompt, rows=rows, first=first,
    )  # fmt: skip
    return dataclasses.replace(
        plan,
        step_seconds=token,
        step_parts={"token": token.value, "prefill": before.value},
        kernels=costliest(kernels),
        bound=max(kernels, key=lambda one: one.seconds).bound,
        examples_per_second=million.inverse(RUN),
        flops_per_step_per_device=flops,
        share_of_peak=None if peak is None else flops / token.value / peak,
        seconds={"first_token": first, "write": million.value},
        wall_seconds=million,
        notes=(about, *sources(target, recipe.precision)),
    )


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Plans new tokens on absent chips.")
    parser.add_argument("recipe")
    parser.add_argument("--on", default="t4,l4,a100,h100", help="targets, as of chipwise plan")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=200, help="new ones")
    parser.add_argument("--texts", default="1,8,64", help="at once on a device")
    parser.add_argument("--prices", metavar="FILE")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(given)
    recipe = cw.load(asked.recipe, asked.set, synthetic=True)
    rows = [int(one) for one in asked.texts.split(",")]
    lengths = {"prompt": asked.prompt, "tokens": asked.tokens, "rows": rows}
    plans = plan_generation(recipe, asked.on.split(","), **lengths, prices=asked.prices)
    if asked.json:
        print(json.dumps([one.to_json() for one in plans]))
    else:
        for part in plan_table.parts(plans):
            if isinstance(part, Table):
                for column, name in {2: "ms a token", 3: "tokens/s", 6: "1M tokens"}.items():
                    part.columns[column].header = name
            terminal.console().print(part)


if __name__ == "__main__":
    main()
