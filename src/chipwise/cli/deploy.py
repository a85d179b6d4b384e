"""`chipwise predict` and `export`: predictions of a trained model, and the model in other formats."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DataError
from ..words.facts import Fact, fact
from . import options
from .options import option

if TYPE_CHECKING:
    from ..deploy.model import Trained

Run = Annotated[str, typer.Argument(help="A run folder.")]


@options.taking
def predict(
    run: Run,
    here: options.Here,
    data: Annotated[
        str | None, option("Images, a packed folder, .npy or .npz. [the evaluation data]", "PATH")
    ] = None,
    out: Annotated[Path, option("A .parquet, .csv or .jsonl file.", "FILE")] = Path("predictions.csv"),
    top: Annotated[int, option("Number of classes in a row.", "N", min=1)] = 1,
    probabilities: Annotated[
        bool, option("Also the probabilities of all classes.", name="--probabilities")
    ] = False,
    recipe: options.OfRun = None,
    batch: Annotated[int | None, option("Examples to read at a time; changes no output.", "N", min=1)] = None,
    workers: options.Workers = None,
    fresh: Annotated[bool, option("Replace an existing file.", name="--fresh")] = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Predict with a trained model, every example once and in order.

    \b
    Examples:
      chipwise predict runs/mnist --out predictions.csv
      chipwise predict runs/flowers --data PHOTOS --out labels.parquet --top 3
      chipwise predict runs/mine --recipe my_task.py:recipe --data new.npz --out new.jsonl

    The same command continues after a stop. Predictions do not depend on the number of devices.
    """
    on = here.on(workers=workers)
    from ..deploy.model import trained
    from ..deploy.predictions import predict as predicted

    def say(message: Fact) -> None:
        if message.code != "predict-done" or not quiet:
            typer.echo(str(message), err=True)

    model = trained(run, recipe, say, with_data=data is None)
    settings: dict[str, Any] = {"top": top, "probabilities": probabilities, "fresh": fresh, "say": say}
    predictions = predicted(model, _source(model, recipe, data), on=on, batch=batch, out=out, **settings)
    if json_:
        summary = {
            "run": run,
            "steps": model.steps,
            "examples": predictions.examples,
            "out": str(predictions.file),
            "accuracy": predictions.accuracy,
            "seconds": round(predictions.seconds, 4),
        }
        print(json.dumps(summary))
        return
    print(fact("predicted", examples=predictions.examples, seconds=predictions.seconds))
    if predictions.accuracy is not None:
        print(fact("predicted-right", accuracy=predictions.accuracy))
    print(fact("written", path=predictions.file))


@options.taking
def export(
    run: Run,
    to: Annotated[str, option("The format.", "stablehlo|onnx|safetensors|saved-model|torch|keras")],
    out: Annotated[Path | None, option("The file. [the run's name with the format's ending]", "FILE")] = None,
    data: Annotated[
        str | None, option("Examples to compare on, as in predict. [the evaluation data]", "PATH")
    ] = None,
    examples: Annotated[int, option("Number of examples to compare on.", "N", min=1)] = 1000,
    recipe: options.OfRun = None,
    module: Annotated[
        str | None, option("For torch and keras: the model that the task was made from.", "FILE:NAME")
    ] = None,
    fresh: Annotated[bool, option("Replace an existing file.", name="--fresh")] = False,
    json_: options.Json = False,
) -> None:
    """Write a trained model in another format, and check it by running it.

    \b
    Examples:
      chipwise export runs/mnist --to onnx --out mnist.onnx
      chipwise export runs/mnist --to stablehlo
      chipwise export runs/mine --recipe my_task.py:recipe --to safetensors

    The exported model takes data as stored, such as uint8 pixels, in a batch of any size.
    """
    options.only_look()
    from ..deploy.export import export as exported
    from ..deploy.model import trained

    def say(message: Fact) -> None:
        typer.echo(str(message), err=True)

    model = trained(run, recipe, say)
    result = exported(
        model, to, out, data=_source(model, recipe, data), module=_module(module), examples=examples,
        fresh=fresh, say=say,
    )  # fmt: skip
    if json_:
        print(json.dumps({"run": run, **dataclasses.asdict(result), "file": str(result.file)}))
        return
    print(fact("exported", **dataclasses.asdict(result)))
    if result.labels_differ is not None:
        print(fact("exported-labels"))
    print(fact("written", path=result.file))


def _module(given: str | None) -> Any:
    """The object of a `FILE:NAME` on the command line: a model, or a function that makes one."""
    if given is None:
        return None
    from ..recipe.settings import RECIPE_MODULE, import_file

    path, _, name = given.partition(":")
    if not Path(path).is_file():
        raise DataError("module-not-found", given=given)
    value = getattr(import_file(f"{RECIPE_MODULE}{Path(path).stem}", path), name, None)
    if value is None:
        raise DataError("module-not-found", given=given)
    return value


def _source(model: Trained, recipe: str | None, data: str | None) -> Any:
    """The source for `--data`: a folder or file of examples, or the recipe's data set in another folder."""
    if data is None:
        return None
    from ..deploy.inputs import open_data
    from ..deploy.model import settings_of
    from ..engine.predict import inputs_of
    from ..engine.stored import read_run
    from ..recipe.settings import load

    try:
        return open_data(data, inputs_of(model.recipe))
    except DataError as error:
        if error.code != "predict-data-unknown":
            raise
        try:
            spec = recipe or (read_run(model.run).source or {})["recipe"]
            return load(spec, settings_of(model.run), data).task.eval
        except Exception:
            raise error from None
