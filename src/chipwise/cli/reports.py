"""`chipwise report RUN`, `compare A B ...`, `track RUN`: reports a run, compares runs, sends one on."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import MISSING
from pathlib import Path

from ..errors import ChipwiseError, RecipeError, RunError
from ..explain.terminal import answer
from ..words.figures import one_line
from . import options
from .options import argument, flag, option
from .standard_output import print_json


@options.taking
def report(
    run: Path = argument("A run folder, or the folder of a study."),
    html: Path | None = options.HTML,
    predictions: bool = flag("Also predict the evaluation data: the worst, the best, the confused classes."),
    recipe: str | None = options.OF_RUN,
    best: bool = options.BEST,
    eval_data: str | None = options.EVAL_DATA,
    json_: bool = options.JSON,
) -> None:
    """Report a run: settings, curves, where the time went, what was slow, what to try. A study is compared.

    \b
    Examples:
      chipwise report runs/mnist-1
      chipwise report runs/mnist-1 --html report.html --predictions
      chipwise report runs/mnist-1 --json
    """
    from ..explain.report import report_page, report_text
    from ..explain.report.run_report import report as make

    if (run / "study.json").exists():
        compare(sources=[str(run)], baseline=None, target=None, metric=None, html=html, json_=json_)
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
    answer(document, report_text.parts(document), lambda: report_page.render(document), html, json_)


@options.taking
def compare(
    sources: list[str] = argument(
        "Runs, studies, records, folders of runs or records; LABEL=PATH names a row.", "A B ..."
    ),
    baseline: str | None = option("The row to compare the others with. [the first]", "A"),
    target: str | None = option("Also the time to 0.94 (eval/accuracy), or to METRIC=VALUE.", "VALUE"),
    metric: str | None = option("What to compare. [eval/accuracy, else eval/loss]", "NAME"),
    html: Path | None = options.HTML,
    json_: bool = options.JSON,
) -> None:
    """Compare runs: whose result is better and whether that means anything, who is faster, what it costs.

    The result comes first, with a verdict over seeds; then examples/s with intervals, wall time, dollars
    and the time to a target. Rows may be of two models. Then it shows what differs.

    \b
    Examples:
      chipwise compare runs/a runs/b
      chipwise compare runs/small-5 runs/large-5 --html compare.html
      chipwise compare mine=bench/ theirs=bench-b/ --baseline mine
      chipwise compare runs/a runs/b --target eval/accuracy=0.94 --json
    """
    from ..explain.compare import compare_page
    from ..explain.compare.compare_table import parts
    from ..explain.compare.comparison import compare as document

    compared = document(sources, baseline=baseline, target=target, metric=metric)
    answer(compared, parts(compared), lambda: compare_page.render(compared), html, json_)


@options.taking
def track(
    run: Path = options.RUN,
    to: str = option("wandb:PROJECT, mlflow:EXPERIMENT or trackio:PROJECT.", "SERVICE:NAME", MISSING),
    follow: bool = flag("Also rows to come, until standard input ends: what train --track starts."),
    json_: bool = options.JSON,
) -> None:
    """Send the rows of a run, those that are not yet there, to a tracker. `train --track` does it meanwhile.

    \b
    Examples:
      chipwise track runs/mnist-1 --to wandb:mnist
      chipwise track runs/mnist-1 --to mlflow:mnist --json
    """
    options.only_look()
    from ..track import sending

    try:
        if follow:
            sending.follow(run, to)
            return
        with contextlib.redirect_stdout(sys.stderr), contextlib.closing(sending.Sending(run, to)) as one:
            one.end()
    except ChipwiseError:
        raise
    except Exception as error:  # whatever a service's library raises
        text = "{to}: {reason}. The same command sends the rest."
        reason = one_line(f"{type(error).__name__}: {error}")
        raise RunError("tracker-raised", text, to=to, reason=reason) from error
    id, how = one.sent.id, one.sent.how
    if json_:
        print_json("track/1", {"run": str(run), "to": to, "id": id, "rows": one.rows, "how": how})
    else:
        print(f"{one.rows} rows sent to {to}, run {id}: {how}")
