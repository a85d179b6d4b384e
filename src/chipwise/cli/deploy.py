"""`chipwise predict`, `generate` and `export`: the output of a trained model, and the model in
other formats."""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import Fact, fact
from ..base.figures import printable
from . import options
from .options import flag, option
from .standard_output import print_json

if TYPE_CHECKING:
    from ..deploy.model import Trained


@options.taking
def predict(
    *,
    here: options.Here,
    data: str | None = option(
        "Images, a packed folder, .npy or .npz. [the evaluation data]", "PATH"
    ),
    out: Path = option("A .parquet, .csv or .jsonl file.", "FILE", default=Path("predictions.csv")),
    top: int = option("Number of classes in a row.", "N", default=1, min=1),
    probabilities: bool = flag("Add the probabilities of all classes."),
    of: options.OfRun,
    batch: int | None = option("Examples to read at a time; changes no output.", "N", min=1),
    workers: str | None = options.WORKERS,
    fresh: bool = flag("Replace an existing file."),
    json_: bool = options.JSON,
    quiet: bool = options.QUIET,
) -> None:
    """Predict with a trained model, every example once and in order.

    \b
    Examples:
      chipwise predict runs/mnist --out predictions.csv
      chipwise predict runs/flowers --data PHOTOS --out labels.parquet --top 3
      chipwise predict runs/mine --recipe my_task.py:recipe --data new.npz --out new.jsonl

    Predictions do not depend on the number of devices.
    """
    on = here.on(workers=workers)
    from ..deploy.predictions import predict as predicted

    def say(message: Fact) -> None:
        if message.code != "predict-done" or not quiet:
            options.say(message)

    model = of.model(say, with_data=data is None)
    predictions = predicted(
        model,
        _source(model, data),
        on=on,
        batch=batch,
        out=out,
        top=top,
        probabilities=probabilities,
        fresh=fresh,
        say=say,
    )
    if json_:
        shown = {
            "run": of.run,
            "steps": model.steps,
            "examples": predictions.examples,
            "out": str(predictions.file),
            "accuracy": predictions.accuracy,
            "seconds": round(predictions.seconds, 4),
        }
        print_json("predict/1", shown)
        return
    print(fact("predicted", examples=predictions.examples, seconds=predictions.seconds))
    if predictions.accuracy is not None:
        print(fact("predicted-right", accuracy=predictions.accuracy))
    print(fact("written", path=predictions.file))


@options.taking
def generate(
    *,
    here: options.Here,
    prompt: list[str] | None = option("Text to continue; may be repeated. [an empty one]", "TEXT"),
    tokens: int = option("Most new tokens.", "N", default=200, min=1),
    temperature: float = option(
        "Temperature of the draws; 0 takes the most probable token.", "T", default=0.8, min=0
    ),
    top_k: int = option("Draw among the K most probable tokens; 0: all.", "K", default=40, min=0),
    seed: int = option("Seed of the draws.", "N", default=0, min=0),
    stop: list[str] | None = option("Text at which to stop; may be repeated.", "TEXT"),
    tokenizer: Path | None = option("A tokenizer.json. [that of the run's data]", "FILE"),
    of: options.OfRun,
    batch: int | None = option(
        "Number of prompts to compute together; another number rounds differently.", "N", min=1
    ),
    json_: bool = options.JSON,
) -> None:
    """Continue a prompt with a trained language model, token by token.

    \b
    Examples:
      chipwise generate runs/text --prompt "One morning"
      chipwise generate runs/text --prompt "He" --prompt "She" --tokens 50 --temperature 0
      chipwise generate runs/text --prompt "Q: Why? A:" --stop "Q:" --seed 1

    A draw depends on the seed, the prompt and its number, not on other prompts or the number of
    devices.
    """
    on = here.on()
    from ..deploy.generation import generate as generated

    prompts = prompt or [""]
    stream = not json_ and len(prompt or "1") == 1
    begun = iter(prompts)

    def show(number: int, piece: str) -> None:
        if stream:
            print(_shown(next(begun, "") + piece), end="", flush=True)

    found = generated(
        of.model(options.say),
        prompts,
        on=on,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k or None,
        seed=seed,
        stop=stop or (),
        tokenizer=tokenizer,
        batch=batch,
        show=show,
    )
    if json_:
        print_json("generate/1", {"run": of.run, **dataclasses.asdict(found), "prompts": prompts})
        return
    texts = [_shown(one + text) for one, text in zip(prompts, found.texts, strict=True)]
    print(_shown(next(begun, "")) if stream else "\n\n".join(texts))
    count = sum(map(len, found.tokens))
    options.say(
        fact(
            "generated",
            tokens=count,
            rate=count / max(found.seconds, 1e-9),
            seconds=found.seconds,
            first=found.first_seconds,
        )
    )


@options.taking
def export(
    *,
    to: str = option("The format.", "stablehlo|onnx|safetensors|huggingface|peft", default=MISSING),
    out: Path | None = option(
        "The file, or for huggingface and peft the folder. [the run's name with the "
        "format's ending]",
        "FILE",
    ),
    data: str | None = option(
        "Examples to compare on, as in predict. [the evaluation data]", "PATH"
    ),
    examples: int = option("Number of examples to compare on.", "N", default=1000, min=1),
    batch: int | None = option(
        "Export a program for exactly N examples at a time. [for any number]", "N", min=1
    ),
    of: options.OfRun,
    fresh: bool = flag("Replace an existing file."),
    json_: bool = options.JSON,
) -> None:
    """Write a trained model in another format, and check it by running it.

    \b
    Examples:
      chipwise export runs/mnist --to onnx --out mnist.onnx
      chipwise export runs/mnist --to stablehlo
      chipwise export runs/mine --recipe my_task.py:recipe --to safetensors
      chipwise export runs/text --to huggingface
      chipwise export runs/lora --to peft

    The exported model takes data as stored, such as uint8 pixels, in a batch of any size, or of
    --batch.
    """
    options.only_look()
    from ..deploy.export import export as exported

    model = of.model(options.say)
    result = exported(
        model,
        to,
        out,
        data=_source(model, data),
        examples=examples,
        batch=batch,
        fresh=fresh,
        say=options.say,
    )
    if json_:
        about = {"run": of.run, **dataclasses.asdict(result), "file": str(result.file)}
        print_json("export/1", about)
        return
    print(fact("exported" if result.data else "exported-weights", **dataclasses.asdict(result)))
    if result.labels_differ is not None:
        print(fact("exported-labels"))
    if result.batch is not None:
        print(fact("exported-batch", batch=result.batch))
    print(fact("written", path=result.file))


def _shown(text: str) -> str:
    """The text that a model wrote, with its lines and tabs. Other control characters are
    escaped."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def _source(model: Trained, data: str | None) -> Any:
    """The source for `--data`: a folder or file of examples, or the recipe's data set in another
    folder."""
    from ..deploy.inputs import open_for
    from ..run.predict import inputs_of

    return None if data is None else open_for(model.recipe, data, inputs_of(model.recipe))
