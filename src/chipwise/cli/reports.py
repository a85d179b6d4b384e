"""`chipwise report RUN`, `compare A B ...`, `track RUN`: reports a run, compares runs, sends one to
a tracker."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from ..base import ChipwiseError, RecipeError, RunError
from ..base.figures import one_line, without_secrets
from ..explain.terminal import answer
from . import options
from .options import argument, flag, option
from .standard_output import print_json


@options.taking
def report(
    run: Path = argument("A run folder, or the folder of a study."),
    html: Path | None = options.HTML,
    predictions: bool = flag(
        "Also predict the evaluation data: the worst, the best, the confused classes."
    ),
    recipe: str | None = options.OF_RUN,
    best: bool = options.BEST,
    eval_data: str | None = options.EVAL_DATA,
    json_: bool = options.JSON,
) -> None:
    """Report a run: settings, curves, where the time went, what to try. Compare a study's runs.

    \b
    Examples:
      chipwise report runs/mnist-1
      chipwise report runs/mnist-1 --html report.html --predictions
      chipwise report runs/mnist-1 --json
    """
    from ..explain.report.report_parts import parts
    from ..explain.report.run_report import report as make

    if (run / "study.json").exists():
        if predictions or best or recipe is not None or eval_data is not None:
            text = "{study} is a study: --predictions and its options are for one of its runs."
            raise RecipeError("gallery-of-study", text, study=run)
        unset = dict.fromkeys(("baseline", "target", "metric", "lower", "higher"))
        compare(sources=[str(run)], **unset, html=html, json_=json_)
        return
    if predictions:
        from ..deploy.model import trained
        from ..explain.report.prediction_gallery import gallery

        model = trained(run, recipe, options.warn, with_data=True, eval_data=eval_data, best=best)
        document = make(run, gallery(model))
    elif recipe is not None or best or eval_data is not None:
        text = "--recipe, --best and --eval-data are for --predictions: add it, or leave them out."
        raise RecipeError("gallery-option-unused", text)
    else:
        options.only_look()
        document = make(run)
    answer(document, parts(document), html, json_)


@options.taking
def compare(
    *,
    sources: list[str] = argument(
        "Runs, studies, records, folders of runs or records; LABEL=PATH names a row.", "A B ..."
    ),
    baseline: str | None = option("The row to compare the others with. [the first]", "A"),
    target: str | None = option(
        "Compare the time to 0.94 (of eval/accuracy), or to METRIC=VALUE.", "VALUE"
    ),
    metric: str | None = options.COMPARED,
    better: options.Better,
    html: Path | None = options.HTML,
    json_: bool = options.JSON,
) -> None:
    """Compare runs by result, speed and cost, and say which differences may be chance.

    The result comes first, with a verdict over seeds. Then follow examples/s with intervals, wall
    time, dollars and the time to a target. Rows may be of two models. Last comes what differs.

    \b
    Examples:
      chipwise compare runs/a runs/b
      chipwise compare runs/small-5 runs/large-5 --html compare.html
      chipwise compare mine=bench/ theirs=bench-b/ --baseline mine
      chipwise compare runs/a runs/b --target eval/accuracy=0.94 --json
    """
    from ..explain.compare.compare_parts import page, parts
    from ..explain.compare.comparison import compare as document

    compared = document(
        sources, baseline=baseline, target=target, metric=metric, better=better.given
    )
    answer(compared, parts(compared), html, json_, page(compared))


@options.taking
def track(
    run: Path = options.RUN,
    to: str = option(
        "wandb:PROJECT, mlflow:EXPERIMENT or trackio:PROJECT.", "SERVICE:NAME", MISSING
    ),
    follow: bool = flag(
        "Also send rows as they are written, until standard input ends. train --track runs this."
    ),
    json_: bool = options.JSON,
) -> None:
    """Send a tracker the rows of a run that it does not have yet. `train --track` sends them during
    training.

    \b
    Examples:
      chipwise track runs/mnist-1 --to wandb:mnist
      chipwise track runs/mnist-1 --to mlflow:mnist --json
    """
    options.only_look()
    from ..explain.track import sending

    try:
        if follow:
            log: Any = sending.TrackerLog(sys.stderr)
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                sending.follow(run, to)
            return
        with (
            contextlib.redirect_stdout(sys.stderr),
            contextlib.closing(sending.Sending(run, to)) as one,
        ):
            one.end()
    except ChipwiseError:
        raise
    except Exception as error:  # whatever a service's library raises
        text = "{to}: {reason}. The same command sends the rest."
        reason = one_line(without_secrets(f"{type(error).__name__}: {error}"))
        raise RunError("tracker-raised", text, to=to, reason=reason) from error
    id = one.sent.id
    how = one.sent.how
    if json_:
        print_json("track/1", {"run": str(run), "to": to, "id": id, "rows": one.rows, "how": how})
    else:
        print(f"{one.rows} rows sent to {to}, run {id}: {how}")
