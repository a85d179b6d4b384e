"""`chipwise launch RECIPE --on TARGET --to PLACE`."""

from __future__ import annotations

import datetime
import math
import shlex
from collections.abc import Sequence
from dataclasses import MISSING, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import DeviceError, Fact, RecipeError, fact, say
from ..explain.terminal import console, grid
from . import options
from .options import flag, option
from .standard_output import print_json

if TYPE_CHECKING:
    from ..chips.prices import Price
    from ..launch.launch_job import LaunchJob
    from ..launch.places import Place
    from ..planner.plans import Plan
    from ..recipe.recipe import Recipe


@options.taking
def launch(
    recipe: options.Given,
    to: str = option(
        "Where to run: skypilot, dstack, slurm, gcloud, docker, kaggle, colab.",
        "PLACE",
        default=MISSING,
    ),
    on: str = option("Target such as v5e-8, a100:8 or t4.", "TARGET", default=MISSING),
    spot: bool = flag("Machines that may be preempted; the run resumes."),
    bucket: str | None = option("A bucket for the run folder, such as gs://NAME/FOLDER.", "URL"),
    cloud: str | None = option(
        "Let SkyPilot or dstack rent at: runpod, vast, lambda. [cheapest]", "CLOUD"
    ),
    zone: str | None = option("Google's zone of the TPU.", "ZONE"),
    partition: str | None = option("SLURM's partition.", "NAME"),
    account: str | None = option("SLURM account to charge.", "NAME"),
    sbatch: list[str] | None = option(
        "Another option of SLURM's sbatch, such as --constraint=a100; may be repeated.", "OPTION"
    ),
    track: list[str] | None = option(
        "Also send rows from there, as train does; may be repeated.", "SERVICE:NAME"
    ),
    package: str | None = option(
        "Source of chipwise for pip: a wheel, its URL, or git+URL.", "SPEC"
    ),
    also: list[str] | None = option("Another package for pip; may be repeated.", "SPEC"),
    out: Path = option("Folder for the files.", "DIR", default=Path("launch")),
    prices: str | None = options.PRICES,
    json_: bool = options.JSON,
) -> None:
    """Write job files for a place that rents chips, with the plan's time and cost. Nothing is
    started.

    \b
    Examples:
      chipwise launch cifar10-davidnet --on v5e-8 --spot --to skypilot --bucket gs://my-runs
      chipwise launch gpt2-124m --on rtx-4090 --to dstack --cloud vast --spot --bucket s3://my-runs
      chipwise launch digits --on a100 --to slurm
      chipwise launch mnist --on t4:2 --to kaggle
    """
    options.only_look()
    from ..base.files import replace_file
    from ..chips.targets import parse
    from ..launch import carried, launch_job as jobs, places
    from ..run.tracking import destination

    where = places.place(to)
    own = {"partition": partition, "account": account, "sbatch": sbatch}
    _check_used(where, bucket=bucket, cloud=cloud, zone=zone, **own)
    where = where.at(cloud)
    jobs.check_also(also or ())
    services = {destination(to)[0] for to in track or ()}
    loaded = recipe.load()
    data = jobs.local_data(recipe.data)
    words = recipe.words() if data is None else replace(recipe, data=None).words()
    words += [word for to in track or () for word in ("--track", to)]
    target = places.lent(where, parse(on))
    file = jobs.recipe_file(recipe.recipe)
    brought = carried.chipwise(package)
    modules, imports = carried.modules(file) if file else ({}, set())
    found = carried.requirements(imports | services, also or ())
    newest = services - {one.partition("==")[0] for one in found}  # not installed here
    more = [*found, *sorted(newest), *(also or ())]
    packages = jobs.packages(target, recipe.data, next(iter(brought), package), more)
    to_launch = jobs.LaunchJob(
        name=jobs.name_of(recipe.recipe),
        target=target,
        words=(recipe.recipe, *words),
        packages=packages,
        spot=spot,
        file=file,
        data=data,
        bucket=bucket,
        zone=zone,
        partition=partition,
        account=account,
        sbatch=tuple(sbatch or ()),
        carried={**modules, **brought},
    )
    jobs.check(to_launch)  # before the plan, which takes minutes
    places.check(where, to_launch)
    chosen = _planned(loaded, recipe.recipe, target.name, options.priced(prices))
    to_launch = replace(
        to_launch, hours=_hours(chosen), about=(*about(loaded, chosen, where, spot), *where.needs)
    )
    files = places.write(where, to_launch)
    for name, content in files.items():
        replace_file(out / name, content, "launch-file-unwritable")
    _show(where, to_launch, out, list(files), json_)


def _planned(recipe: Recipe, given: str, target: str, prices: Sequence[Price]) -> Plan:
    """The plan of a recipe, which was `given` by that name. Raises `DeviceError` if it cannot run
    there, or if this machine cannot plan."""
    from ..compile.answers import FAILED_HERE
    from ..planner.ask import plan

    # The cores of the host there are unknown
    (chosen,) = plan(recipe, [target], prices=prices, measure_feed=False)
    if (problem := chosen.problem) is not None:
        here = problem.code in (*FAILED_HERE, "compiler-missing")
        raise DeviceError(
            "launch-not-planned" if here else "launch-cannot-run",
            recipe=given,
            target=chosen.target,
            problem=problem,
        )
    return chosen


def about(recipe: Recipe, plan: Plan, where: Place, spot: bool) -> tuple[Fact, ...]:
    """The head of every job file: recipe and target, predicted time and cost."""
    from importlib.metadata import version

    from ..recipe.described import title

    lines = [
        fact(
            "launch-job",
            recipe=title({"name": recipe.name, "source": recipe.source}),
            target=plan.target,
        )
    ]
    if plan.wall_seconds is not None:
        today = datetime.date.today().isoformat()
        wall = plan.wall_seconds
        lines.append(
            fact(
                "launch-planned",
                date=today,
                version=version("chipwise"),
                seconds=wall.value,
                low=wall.low,
                high=wall.high,
            )
        )
    there = replace(
        plan, costs=tuple(cost for cost in plan.costs if where.takes(cost.cloud, cost.includes))
    )
    cost = there.cheapest(spot) or there.cheapest()
    if cost is None:
        kind = "free" if plan.target in where.free else where.unpriced
        return (*lines, fact(f"launch-price-{kind}"))
    kind = say(fact("launch-kind"), "spot" if cost.spot else "text")
    price = fact(
        "launch-costs",
        usd=cost.usd.value,
        low=cost.usd.low,
        high=cost.usd.high,
        hour=cost.usd_per_hour,
        kind=kind,
        cloud=cost.cloud,
        region=cost.region,
        day=cost.date,
    )
    return (*lines, price)


def _hours(plan: Plan) -> int:
    """The time limit for a queue: 1.5 times the slow end of the prediction, or a day if unknown."""
    wall = plan.wall_seconds
    return 24 if wall is None else max(1, math.ceil(1.5 * wall.high / 3600))


def _check_used(where: Place, **values: Any) -> None:
    """Raises `RecipeError` for an option that the place would ignore."""
    used = {
        "bucket": where.keeps,
        "cloud": where.name in ("skypilot", "dstack"),
        "zone": where.name == "gcloud",
    }
    for name, value in values.items():
        if value is not None and not used.get(name, where.name == "slurm"):
            raise RecipeError("launch-option-unused", place=where.name, option=f"--{name}")


def _show(where: Place, job: LaunchJob, out: Path, files: list[str], json_: bool) -> None:
    start = where.begin(job.name)
    stop = [word.format(name=job.name) for word in where.stop]
    if json_:
        document = {
            "place": where.name,
            "target": job.target.name,
            "files": [str(out / name) for name in files],
            "start": start or None,
            "stop": stop or None,
            "folder": str(out),
            "about": [line.json() for line in job.about],
        }
        print_json("launch/1", document)
        return
    rows: list[tuple[str, Any]] = [("job", line) for line in job.about[:1]]
    needs = where.needs
    rows += [("needs" if line in needs else "plan", line) for line in job.about[1:]]
    rows += [("file", out / name) for name in files]
    if start:
        rows.append(("start", f"cd {shlex.quote(str(out))} && {shlex.join(start)}"))
    if stop:
        rows.append(("end", f"cd {shlex.quote(str(out))} && {shlex.join(stop)}"))
    console(width=None).print(grid(rows))
