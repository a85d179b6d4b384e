"""Places that rent chips, and their job files. Nothing here starts anything.

A place says which targets it has (`offers`), writes its files (`files`), and has the commands that start the
job (`start`) and stop the billing (`stop`). The templates are in `templates/`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jinja2

from ..chips.targets import Target, names, parse
from ..errors import DeviceError, RecipeError, near
from . import names as called
from .job import Job
from .notebook import notebook

Files = dict[str, str]


@dataclass(frozen=True)
class Place:
    """`offers`: whether it has a target. `tool`: the program that starts the job; `None` if a person does.
    `stop`: the command that stops the billing. `keeps`: it needs a bucket for the run folder; with `google`,
    only a Google bucket. `sends`: a local data folder can be used there."""

    name: str
    offers: Callable[[Target], bool]
    files: Callable[[Job], Files]
    tool: str | None
    start: Callable[[Job], list[str]] | None
    stop: Callable[[Job], list[str]] | None
    keeps: bool = False
    sends: bool = False
    spot: bool = True
    image: bool = False
    google: bool = False


def place(name: str) -> Place:
    """The place called `name`. Raises `RecipeError` with the nearest name otherwise."""
    if name not in PLACES:
        raise RecipeError("launch-place-unknown", place=name, hint=near(name, PLACES), places=list(PLACES))
    return PLACES[name]


def offered(where: Place) -> list[Target]:
    """All targets of the catalogue that `where` has."""
    return [target for target in map(parse, names()) if where.offers(target) and not target.rented_as]


def check(where: Place, job: Job) -> None:
    """Raises `DeviceError` or `RecipeError` for what the place cannot do."""
    if not where.offers(job.target):
        has = [target.name for target in offered(where)]
        raise DeviceError("launch-not-offered", place=where.name, target=job.target.name, has=has)
    if where.keeps and job.bucket is None:
        raise RecipeError("launch-without-bucket", place=where.name)
    if where.google and not str(job.bucket).startswith("gs://"):
        raise RecipeError("launch-bucket-of-google", place=where.name, bucket=job.bucket)
    if job.data is not None and not where.sends:
        raise RecipeError("launch-data-local", place=where.name, data=job.data)
    if where.image and job.image is None:
        raise RecipeError("launch-without-image", place=where.name)
    if job.spot and not where.spot:
        raise RecipeError("launch-no-spot", place=where.name)


def write(where: Place, job: Job) -> Files:
    """The place's files by name. Raises as `check` does."""
    check(where, job)
    return where.files(job)


# ---- the texts


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        loader=jinja2.PackageLoader("chipwise.launch", "templates"),
    )
    environment.filters |= {
        "sh": lambda value: (
            shlex.join(value) if isinstance(value, (list, tuple)) else shlex.quote(str(value))
        ),
        "yaml": json.dumps,  # JSON strings are valid YAML
        "comment": lambda about: "".join(f"# {_one_line(line)}\n" for line in about).rstrip("\n"),
    }
    return environment


def _one_line(line: object) -> str:
    return re.sub(r"[^\x20-\x7e\u00a0-\uffff]", " ", str(line))


def _text(template: str, job: Job, **more: Any) -> str:
    return _environment().get_template(template).render(job=job, **more)


def _moved(job: Job, folder: str) -> Job:
    """The job with its recipe file in `folder`."""
    if job.file is None:
        return job
    attribute = job.words[0].partition(":")[2]
    recipe = f"{folder}/{job.file.name}" + (f":{attribute}" if attribute else "")
    return replace(job, words=(recipe, *job.words[1:]))


def _skypilot(job: Job) -> Files:
    tpu = job.target.chip.kind == "TPU"
    scheme, _, name, *folders = str(job.bucket).split("/")
    values = {
        "bucket": f"{scheme}//{name}",  # SkyPilot mounts whole buckets
        "folder": "".join(f"{one}/" for one in folders),
        "accelerators": called.skypilot(job.target),
        "nodes": 1 if tpu else job.target.hosts,  # a TPU slice is one node of SkyPilot's
        "runtime": called.RUNTIMES[called.short(job.target)] if tpu else None,
    }
    return {f"{job.name}.yaml": _text("skypilot.yaml.jinja", _moved(job, "/recipe"), **values)}


def _slurm(job: Job) -> Files:
    there = job if job.file is None else _moved(job, str(job.file.absolute().parent))
    a_host = job.target.chips // job.target.hosts
    return {f"{job.name}.sbatch": _text("slurm.sbatch.jinja", there, a_host=a_host)}


def _gcloud(job: Job) -> Files:
    version = called.short(job.target)
    values = {"type": called.google_type(job.target), "runtime": called.RUNTIMES[version]}
    there = _moved(job, ".")
    return {
        f"{job.name}.sh": _text("gcloud.sh.jinja", there, zone=zone(job), **values),
        f"{job.name}.host.sh": _text("host.sh.jinja", there),
    }


def _gke(job: Job) -> Files:
    labels, resource, a_host = called.gke(job.target) or ({}, "", 0)
    values = {"labels": labels, "resource": resource, "a_host": a_host}
    there = _moved(job, "/app")
    return {
        f"{job.name}.yaml": _text("gke.yaml.jinja", there, **values),
        f"{job.name}.Dockerfile": _text("Dockerfile.jinja", there),
    }


def _docker(job: Job) -> Files:
    there = _moved(job, "/app")
    return {
        f"{job.name}.Dockerfile": _text("Dockerfile.jinja", there),
        f"{job.name}.sh": _text("docker.sh.jinja", there),
    }


def _notebook(where: str) -> Callable[[Job], Files]:
    return lambda job: {f"{job.name}.ipynb": notebook(where, _moved(job, "."))}


def _lends(where: str) -> Callable[[Target], bool]:
    return lambda target: target.name in called.NOTEBOOKS[where]


def zone(job: Job) -> str | None:
    """The Google zone of a TPU: the requested one, or one that has the version."""
    return job.zone or called.ZONES.get(called.short(job.target))


PLACES: dict[str, Place] = {
    one.name: one
    for one in (
        Place(
            "skypilot", lambda target: called.skypilot(target) is not None, _skypilot, "sky",
            lambda job: ["sky", "jobs", "launch", "--yes", "--name", job.name, f"{job.name}.yaml"],
            lambda job: ["sky", "jobs", "cancel", "--yes", "--name", job.name],
            keeps=True, sends=True,
        ),
        Place(
            "slurm", called.gpu, _slurm, "sbatch",
            lambda job: ["sbatch", f"{job.name}.sbatch"],
            lambda job: ["scancel", "--name", job.name],
            sends=True, spot=False,
        ),
        Place(
            "gcloud", lambda target: called.google_type(target) is not None, _gcloud, "gcloud",
            lambda job: ["bash", f"{job.name}.sh"],
            lambda job: ["bash", f"{job.name}.sh", "stop"],
            keeps=True, google=True,
        ),
        Place(
            "gke", lambda target: called.gke(target) is not None, _gke, "kubectl",
            lambda job: ["kubectl", "apply", "-f", f"{job.name}.yaml"],
            lambda job: ["kubectl", "delete", "jobset", job.name],
            keeps=True, google=True, image=True,
        ),
        Place(
            "docker", lambda target: target.hosts == 1 and (called.gpu(target) or target.chip.kind == "TPU"),
            _docker, "docker",
            lambda job: ["bash", f"{job.name}.sh"],
            lambda job: ["docker", "stop", job.name],
            sends=True, spot=False,
        ),
        Place("kaggle", _lends("kaggle"), _notebook("kaggle"), None, None, None, spot=False),
        Place("colab", _lends("colab"), _notebook("colab"), None, None, None, spot=False),
    )
}  # fmt: skip
