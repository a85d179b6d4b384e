"""`chipwise report RUN` and `chipwise compare A B ...`: the report of a run, and a comparison of runs."""

from __future__ import annotations

from pathlib import Path

from ..errors import RecipeError
from ..explain.terminal import answer
from . import options
from .options import argument, flag, option


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
        compare(sources=[str(run)], baseline=None, target=None, html=html, json_=json_)
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
        "Runs, studies, records, folders of runs or records; LABEL=PATH names a row.",
        "A B ...",
    ),
    baseline: str | None = option("The row to compare the others with. [the first]", "A"),
    target: str | None = option("Also the time to 0.94 (eval/accuracy), or to METRIC=VALUE.", "VALUE"),
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

    compared = document(sources, baseline=baseline, target=target)
    answer(compared, parts(compared), lambda: compare_page.render(compared), html, json_)
