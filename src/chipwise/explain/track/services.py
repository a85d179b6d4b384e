"""The services that receive rows. Each is a function that begins a run called `title` in the
project or experiment `name`, or resumes the run `id`. It returns a `Tracker`, whose functions may
raise anything."""

from __future__ import annotations

import functools
import html
import posixpath
import re
import secrets
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

Values = Mapping[str, Any]


class Tracker(NamedTuple):
    """A run of a service.

    *Fields:*

    - `id`: the run's id at the service.
    - `row(step, values)`, `text(step, name, text)` and `picture(step, name, pixels)`: send values,
      a text and a picture at any step, which may have others. `pixels` are `(height, width, 3)`
      uint8.
    - `end(failed, summary)`: ends the run, and waits until all is sent.
    """

    id: str
    row: Callable[[int, Values], Any]
    text: Callable[[int, str, str], Any]
    picture: Callable[[int, str, Any], Any]
    end: Callable[[bool, Values], Any]


def _wandb(name: str, title: str, settings: Values, id: str | None) -> Tracker:
    wandb = import_module("wandb")
    entity, _, project = name.rpartition("/")
    # Only rows are sent: not this process's output, nor the load of a machine that may not be the
    # run's.
    quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
    run = wandb.init(
        entity=entity or None,
        project=project,
        name=title,
        id=id,
        resume="allow" if id else None,
        config=settings,
        allow_val_change=True,
        save_code=False,
        settings=quiet,
    )
    run.define_metric("*", step_metric="step")  # W&B's own step only rises

    def end(failed: bool, summary: Values) -> None:
        run.summary.update(summary)
        run.finish(exit_code=int(failed))

    def row(step: int, values: Values) -> None:
        run.log({"step": step, **values})

    def text(step: int, name: str, text: str) -> None:
        row(step, {name: wandb.Html(f"<pre>{html.escape(text)}</pre>", data_is_not_path=True)})

    return Tracker(
        run.id, row, text, lambda step, name, pixels: row(step, {name: wandb.Image(pixels)}), end
    )


def _mlflow(name: str, title: str, settings: Values, id: str | None) -> Tracker:
    client = import_module("mlflow").MlflowClient()
    made = import_module("mlflow.entities")
    resumes = id is not None
    if id is None:
        known = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if known is None else known.experiment_id
        id = str(client.create_run(experiment, run_name=title).info.run_id)
        params = [made.Param(_key(key), str(value)) for key, value in settings.items()]
        for first in range(0, len(params), 100):  # so many are allowed in a request
            client.log_batch(id, params=params[first : first + 100])
    client.update_run(id, status="RUNNING")

    @functools.cache
    def had(key: str) -> set[int]:
        """The steps of a number that are there already. The last row may be, unknown to us."""
        return {metric.step for metric in client.get_metric_history(id, key)} if resumes else set()

    def row(step: int, values: Values) -> None:
        now, numbers = int(1000 * time.time()), [(_key(key), v) for key, v in values.items()]
        new = [made.Metric(key, v, now, step) for key, v in numbers if step not in had(key)]
        client.log_batch(id, new)

    def end(failed: bool, summary: Values) -> None:
        client.log_batch(
            id, tags=[made.RunTag(_key(key), str(value)) for key, value in summary.items()]
        )
        client.set_terminated(id, "FAILED" if failed else "FINISHED")

    def text(step: int, name: str, text: str) -> None:
        client.log_text(id, text, f"texts/{_key(name)}/{step}.txt")

    def picture(step: int, name: str, pixels: Any) -> None:
        client.log_image(id, pixels, key=_key(name), step=step, synchronous=True)

    return Tracker(id, row, text, picture, end)


def _key(name: str) -> str:
    """`name` in the form that MLflow accepts: a path of letters, digits and some signs."""
    return posixpath.normpath(re.sub(r"[^\w./ -]", "_", name)).strip("./")[:250] or "_"


def _trackio(name: str, title: str, settings: Values, id: str | None) -> Tracker:
    id = id or f"{title}-{secrets.token_hex(3)}"  # it is resumed by the name
    trackio = import_module("trackio")
    run = trackio.init(
        project=name,
        name=id,
        resume="allow",
        config=settings,
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )

    def end(failed: bool, summary: Values) -> None:
        run.log({f"final/{key}": value for key, value in summary.items()})
        run.finish()

    def row(step: int, values: Values) -> None:
        run.log(dict(values), step=step)

    def text(step: int, name: str, text: str) -> None:
        row(step, {name: trackio.Markdown(f"~~~~text\n{text}\n~~~~")})

    return Tracker(
        id, row, text, lambda step, name, pixels: row(step, {name: trackio.Image(pixels)}), end
    )


BEGIN = {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
