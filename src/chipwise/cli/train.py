"""`chipwise train`, `sweep` and `eval`: trains, compares and evaluates runs."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import DivergedError, RecipeError, fact
from ..explain.terminal import console, grid, printed
from . import options
from .options import flag, option
from .standard_output import print_json

if TYPE_CHECKING:
    from ..recipe.recipe import Recipe
    from ..run.folder.result import Result


@options.taking
def train(
    *,
    recipe: options.Given,
    how: options.Training,
    run: Path | None = option("Run folder; a run in it is resumed. [runs/NAME-TIME]", "DIR"),
    stop_after: str | None = option(
        "Stop and save after this long; schedules stay the same.", "DURATION"
    ),
    keep_best: str | None = option(
        "Also keep the checkpoint with the best METRIC: eval/accuracy.", "METRIC"
    ),
    patience: str | None = option(
        "With --keep-best: stop after this long without a better one.", "DURATION"
    ),
    better: options.Better,
    eval_data: str | None = options.EVAL_DATA,
    keep: str | None = option(
        "Newest checkpoints to keep; or 5ep: also one every 5 epochs.", "N|DURATION"
    ),
    ledger: str | None = option(
        "Interval of digests: 1st for every step. [each log, evaluation and save]",
        "DURATION",
    ),
    kernels: str | None = option(
        "tuned: time the GPU's kernels once and keep them with the run. FILE: use those of a file.",
        "tuned|FILE",
    ),
    start: str | None = option(
        "Start from the weights of a run or a file, at step 0.", "RUN", name="--from"
    ),
    with_optimizer: bool = flag(
        "With --from RUN: also take its optimizer's state, to train on at another rate or length."
    ),
    fresh: bool = flag("Delete the run in the folder, with its checkpoints, and start at step 0."),
    changed_code: bool = flag("Resume although code, versions or settings changed."),
    json_: bool = options.JSON,
    quiet: bool = options.QUIET,
) -> None:
    """Train a recipe on all devices.

    \b
    Examples:
      chipwise train digits
      chipwise train my_task.py:recipe --set lr=0.2 --devices 4
      chipwise train mnist --data DIR --keep-best eval/accuracy --patience 5ep
      chipwise train mnist --data DIR --kernels tuned --run runs/mnist-tuned
      chipwise train mnist --data DIR --from runs/mnist --set lr=0.001 --run runs/mnist-2
      chipwise train mnist --from runs/mnist --with-optimizer --set duration=5ep --run runs/longer
    """
    if with_optimizer and start is None:
        raise RecipeError(
            "optimizer-of-which-run", "--with-optimizer needs --from RUN: name a run folder."
        )
    arguments = how.arguments  # first: they choose the devices before JAX starts
    from ..run.fit import fit

    loaded = _recipe(recipe, run, start, with_optimizer, eval_data)
    if not quiet:
        console(sys.stderr, width=None).print(grid(loaded.rows()))
    result = fit(
        loaded,
        run or _folder(loaded.name),
        better=better.given,
        stop_after=stop_after,
        fresh=fresh,
        keep_best=keep_best,
        patience=patience,
        changed_code=changed_code,
        keep=keep,
        ledger=ledger,
        progress=how.progress(quiet),
        **{**arguments, "on": replace(arguments["on"], kernels=kernels)},
    )
    if json_:
        print_json("train/1", result.to_json())
    else:
        console(width=None).print(grid(_rows(result, loaded.batch)))


@options.taking
def sweep(
    *,
    how: options.Training,
    recipe: str = options.RECIPE,
    set_: list[str] | None = option(
        "Values of a setting; every combination is trained.", "KEY=VALUE,VALUE"
    ),
    seeds: str = option(
        "3 means seeds 0 to 2; or list them, such as 0,3,7.", "N|LIST", default="3"
    ),
    run: Path | None = option(
        "The study's folder; finished runs are not repeated. [runs/NAME-TIME]", "DIR"
    ),
    metric: str | None = options.COMPARED,
    better: options.Better,
    data: str | None = options.DATA,
    synthetic: bool = options.SYNTHETIC,
    changed_code: bool = flag("Accept existing runs although code, versions or settings changed."),
    json_: bool = options.JSON,
    quiet: bool = options.QUIET,
) -> None:
    """Train every combination of settings with several seeds, and compare them.

    \b
    Examples:
      chipwise sweep mnist --seeds 5 --run runs/mnist-5
      chipwise sweep mnist --set lr=0.005,0.01,0.02 --seeds 3 --run runs/mnist-lr
      chipwise sweep digits --set lr=1e-3,3e-3 --set batch=32,64 --seeds 5
      chipwise sweep my_task.py:recipe --set warmup=5ep,10ep --metric eval/f1_macro --json

    A comma in brackets or quotes, or after a backslash, is part of the value. The same command with
    the same --run resumes after a stop, and more values or seeds extend the study.
    """
    from ..explain.compare.compare_parts import results
    from ..explain.compare.comparison import compare
    from ..study import grid as points
    from ..study.sweep import sweep as train_all

    settings = points.parse(set_ or ())
    file, _, name = recipe.partition(":")
    run = run or _folder(Path(name or file).stem)

    def compared(study) -> dict[str, Any]:
        return compare([str(study.folder)], metric=metric, better=better.given)

    def after_round(study) -> None:
        document = compared(study)
        if not quiet and not all(
            run.ended for point in study.points for run in point.runs.values()
        ):
            printed(console(sys.stderr, width=160), results(document))

    study = train_all(
        recipe,
        settings,
        data=data,
        synthetic=synthetic,
        seeds=points.seeds(seeds),
        run=run,
        progress=how.progress(quiet),
        after_round=after_round,
        metric=metric,
        better=better.given,
        changed_code=changed_code,
        **how.arguments,
    )
    if json_:
        found = compared(study)
        about = {name: found[name] for name in ("metric", "better", "baseline", "rows")}
        print_json("study/1", {"run": str(study.folder), **study.to_json(), **about})
    else:
        printed(console(width=160), results(compared(study)))
        print(f"run  {study.folder}")
    if not any(run.done for point in study.points for run in point.runs.values()):
        text = "Every run of {folder} diverged: try lower rates (--set lr=...)."
        raise DivergedError("every-run-diverged", text, folder=study.folder)


@options.taking
def evaluate_run(
    *,
    here: options.Here,
    batch: int | None = option("Examples to read at a time; changes no value.", min=1),
    data: str | None = options.DATA,
    eval_data: str | None = options.EVAL_DATA,
    of: options.OfRun,
    json_: bool = options.JSON,
) -> None:
    """Evaluate the newest checkpoint of a run, every example exactly once.

    \b
    Examples:
      chipwise eval runs/mnist-1
      chipwise eval runs/photos --best --eval-data packed/test
      chipwise eval runs/mnist-1 --batch 7 --simulate 8 --json
      chipwise eval runs/mine --recipe my_task.py:recipe
    """
    on = here.on()
    from ..run.evaluate import evaluate

    model = of.model(options.warn, data=data, with_data=True, eval_data=eval_data)
    metrics = evaluate(model.recipe, model.params, model.state, batch=batch, on=on)
    examples = len(model.recipe.task.eval or ())
    if json_:
        shown = {"run": of.run, "steps": model.steps, "examples": examples, "metrics": metrics}
        print_json("eval/1", shown)
        return
    for name, value in metrics.items():
        print(f"eval/{name}  {value:.6g}" if isinstance(value, float) else f"eval/{name}  {value}")


def _folder(name: str) -> Path:
    return Path(f"runs/{name}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}")


def _absolute(place: str) -> str:
    """A URL, or a path that holds in any folder."""
    from ..data.remote import is_url, local

    return place if is_url(place) else str(local(place).absolute())


def _recipe(
    given: options.Given,
    run: Path | None,
    start: str | None,
    with_optimizer: bool,
    eval_data: str | None,
) -> Recipe:
    """The recipe to train. *Arguments:* `start`: a run or a file with the weights to start from.
    `with_optimizer`: whether the optimizer's state of that run is taken too."""
    from ..study.study_runs import Origin

    weights = None
    sizes: list[str] = []
    if start is not None:
        from ..deploy.huggingface import settings_of
        from ..deploy.pretrained import pretrained
        from ..recipes import BUILT_IN

        if run is not None and run.absolute() == Path(start).absolute():
            raise RecipeError("from-itself", run=run)
        weights = pretrained(start, optimizer=with_optimizer)
        if weights.config:
            name, sizes = settings_of(start, weights.config)
            if given.recipe in BUILT_IN and given.recipe != name:
                raise RecipeError(
                    "weights-of-another-recipe", path=start, theirs=name, recipe=given.recipe
                )
            sizes = sizes if name == given.recipe else []
    recipe = Origin(given.recipe, (*sizes, *given.settings), given.data, given.synthetic).make()
    source = recipe.source or {}
    if eval_data is not None:
        from ..deploy.inputs import with_evaluation

        recipe = with_evaluation(recipe, eval_data)
        source = source | {"eval_data": _absolute(eval_data)}
    if weights is not None and start is not None:
        recipe = replace(recipe, task=weights.start(recipe.task))
        source = source | {"from": _absolute(start)}
        source |= {"with_optimizer": True} if with_optimizer else {}
    return replace(recipe, source=source)


def _rows(result: Result, batch: int) -> Iterator[tuple[str, Any]]:
    """What is printed of a result."""
    for name, value in result.metrics.items():
        if isinstance(value, float):
            yield name, f"{value:.6g}"
    speed = result.speed
    if speed.get("examples_per_second"):
        low, high = speed["examples_per_second_quartiles"]
        yield (
            "speed",
            fact(
                "train-speed", median=speed["examples_per_second"], low=low, high=high, batch=batch
            ),
        )
    share = speed["share_of_peak"]
    yield "share of peak", "unknown" if share is None else f"{share:.1%}"
    yield "seconds", ", ".join(f"{name} {value:.1f}" for name, value in result.seconds.items())
    if result.feed:
        yield "data", result.feed["verdict"]
    if result.kept:
        yield "best", fact("best-kept", **vars(result.kept))
    tuned = result.devices.get("kernels")
    yield "fingerprint", f"{result.fingerprint}, kernels {tuned}" if tuned else result.fingerprint
    yield "run", result.run
