"""Places that rent chips, and their job files. Nothing here starts anything.

A place says which targets it has (`offers`), writes its files (`files`), and has the commands that start the
job (`start`) and stop the billing (`stop`). The templates are in `templates/`. A table of a place's names
lists only the chips that the place has.

SkyPilot's names are those of its catalogue (`sky show-gpus`). Google's types and runtime versions:
https://cloud.google.com/tpu/docs/runtimes; SkyPilot's own default runtime for v5litepod is that of v5p.
"""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2

from ..chips.prices import OWNED
from ..chips.targets import Target, names, parse
from ..errors import DeviceError, RecipeError, near
from ..words.facts import fact
from ..words.figures import printable
from .carried import Carried
from .launch_job import LaunchJob

Files = dict[str, str | bytes]

# ---- the names of chips at each place

SKYPILOT_GPUS = {
    "p100": "P100", "p100-sxm2": "P100", "v100": "V100", "v100-pcie": "V100",
    "v100-32gb": "V100-32GB", "t4": "T4", "rtx-3090": "RTX3090", "rtx-4090": "RTX4090", "a10g": "A10G",
    "l4": "L4", "a100": "A100", "a100-80gb": "A100-80GB", "a100-pcie": "A100-80GB", "l40s": "L40S",
    "h100": "H100", "h100-pcie": "H100", "h200": "H200", "b200": "B200", "gb200": "GB200",
}  # fmt: skip
RUNTIMES = {
    "v2": "tpu-ubuntu2204-base", "v3": "tpu-ubuntu2204-base", "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e",
}  # fmt: skip
"""Software of a TPU VM. TPU7x has none."""

ZONES = {
    "v2": "us-central1-b", "v3": "europe-west4-a", "v4": "us-central2-b", "v5e": "us-west4-a",
    "v5p": "us-east5-a", "v6e": "us-east5-b",
}  # fmt: skip
"""A zone that has the version (https://cloud.google.com/tpu/docs/regions-zones): not the cheapest."""

NOTEBOOKS = {"kaggle": ("v5e-8", "t4:2", "p100"), "colab": ("v5e-1", "t4", "l4", "a100", "v6e-1")}
"""What the two lend: https://www.kaggle.com/docs/notebooks, https://research.google.com/colaboratory/faq.html."""


def short(target: Target) -> str:
    return target.chip.names[0]


def gpu(target: Target) -> bool:
    """Whether the target has GPUs that JAX's CUDA version supports; its drivers do not support a K80."""
    return target.chip.kind == "GPU" and float(target.chip.compute_capability or 0) >= 6


def google_type(target: Target) -> str | None:
    """Google's accelerator type of a TPU slice, such as `v5litepod-8`."""
    if target.chip.kind != "TPU" or target.rented_as or short(target) not in RUNTIMES:
        return None
    version = "v5litepod" if short(target) == "v5e" else short(target)
    return f"{version}-{target.name.rpartition('-')[2]}"


def skypilot(target: Target) -> str | None:
    """SkyPilot's name, with the number on one host, such as `A100-80GB:8` or `tpu-v5litepod-8`."""
    if target.chip.kind == "TPU":
        google = google_type(target)
        return google and f"tpu-{google}"
    name = SKYPILOT_GPUS.get(short(target))
    return name and f"{name}:{target.chips // target.hosts}"


# ---- places


@dataclass(frozen=True)
class Place:
    """`offers`: whether it has a target. `start`: the command that starts the job; `None` if a person does.
    `stop`: the command that stops the billing. `keeps`: it needs a bucket for the run folder; with `google`,
    only a Google bucket. `sends`: a local data folder can be used there. `clouds`: whose prices it has, by
    default all. `free`: targets that it lends. `unpriced`: the code of what is said without a price."""

    name: str
    offers: Callable[[Target], bool]
    files: Callable[[LaunchJob], Files]
    start: Callable[[LaunchJob], list[str]] | None
    stop: Callable[[LaunchJob], list[str]] | None
    keeps: bool = False
    sends: bool = False
    spot: bool = True
    google: bool = False
    clouds: tuple[str, ...] | None = None
    free: tuple[str, ...] = ()
    unpriced: str = "launch-price-unknown"

    def takes(self, cloud: str, includes: str) -> bool:
        """Whether such a price is one of this place; those of the user's own machines are."""
        return self.clouds is None or includes == OWNED or cloud in self.clouds


def place(name: str) -> Place:
    """The place called `name`. Raises `RecipeError` with the nearest name otherwise."""
    if name not in PLACES:
        text = "--to {place}: expected {places:or}.{hint:near}"
        hint = near(name, PLACES)
        raise RecipeError("launch-place-unknown", text, place=name, hint=hint, places=list(PLACES))
    return PLACES[name]


def offered(where: Place) -> list[Target]:
    """All targets of the catalogue that `where` has."""
    known = NOTEBOOKS.get(where.name, names())
    return [target for target in map(parse, known) if where.offers(target) and not target.rented_as]


def check(where: Place, job: LaunchJob) -> None:
    """Raises `DeviceError` or `RecipeError` for what the place cannot do."""
    if not where.offers(job.target):
        has = [target.name for target in offered(where)]
        text = "{place} does not offer {target}. It offers {has:few}. Choose another --on or --to."
        raise DeviceError("launch-not-offered", text, place=where.name, target=job.target.name, has=has)
    if where.keeps and job.bucket is None:
        text = "--to {place} deletes its machine: add a bucket for the run folder, --bucket gs://NAME."
        raise RecipeError("launch-without-bucket", text, place=where.name)
    if where.google and not str(job.bucket).startswith("gs://"):
        text = "--bucket {bucket}: {place} keeps runs at Google, expected gs://NAME."
        raise RecipeError("launch-bucket-of-google", text, place=where.name, bucket=job.bucket)
    if job.data is not None and not where.sends:
        text = "--data {data} is a folder here: copy it to a bucket, which {place} can reach."
        raise RecipeError("launch-data-local", text, place=where.name, data=job.data)
    if job.spot and not where.spot:
        text = "{place} has no spot machines: leave --spot out."
        raise RecipeError("launch-no-spot", text, place=where.name)


def lent(where: Place, target: Target) -> Target:
    """The target, or the one number of the chip that the place lends: `t4` is `t4:2` at Kaggle."""
    same = [one for one in offered(where) if one.chip == target.chip]
    return same[0] if not where.offers(target) and target.chips == 1 and len(same) == 1 else target


def write(where: Place, job: LaunchJob) -> Files:
    """The place's files by name. Raises as `check` does."""
    check(where, job)
    return where.files(job)


def _beside(job: LaunchJob) -> Files:
    """What the job carries, in its folder."""
    return {f"{job.name}-files/{name}": content for name, content in job.carried.items()}


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
        "json": json.dumps,
        "yaml": _yaml,
        "comment": lambda about: "\n".join(f"# {printable(str(line))}" for line in about),
    }
    return environment


def _yaml(value: Any) -> str:
    """JSON, which is YAML where no character stands for itself that YAML does not print."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def _markdown(line: object) -> str:
    return re.sub(r"([\\`*_{}\[\]<>()#!|~$&])", r"\\\1", printable(str(line)))


def _text(template: str, job: LaunchJob, **more: Any) -> str:
    return _environment().get_template(template).render(job=job, **more)


def _moved(job: LaunchJob, folder: str, recipe: str | None = None) -> LaunchJob:
    """The job with its carried wheel in `folder`, and its recipe file there too, or as the file `recipe`."""
    wheel, *others = job.packages
    packages = (f"{folder}/{wheel}" if wheel in job.carried else wheel, *others)
    if job.file is None:
        return replace(job, packages=packages)
    attribute = job.words[0].rpartition(".py")[2]
    words = (f"{recipe or f'{folder}/{job.file.name}'}{attribute}", *job.words[1:])
    return replace(job, packages=packages, words=words)


def _skypilot(job: LaunchJob) -> Files:
    tpu = job.target.chip.kind == "TPU"
    scheme, _, name, *folders = str(job.bucket).split("/")
    values = {
        "bucket": f"{scheme}//{name}",  # SkyPilot mounts whole buckets
        "folder": "".join(f"{one}/" for one in folders),
        "accelerators": skypilot(job.target),
        "nodes": 1 if tpu else job.target.hosts,  # a TPU slice is one node of SkyPilot's
        "runtime": RUNTIMES[short(job.target)] if tpu else None,
    }
    text = _text("skypilot.yaml.jinja", _moved(job, "/carried"), **values)
    return {f"{job.name}.yaml": text, **_beside(job)}


def _slurm(job: LaunchJob) -> Files:
    recipe = str(job.file.absolute()) if job.file else None  # nodes share files
    there = _moved(job, f"{job.name}-files", recipe)
    a_host = job.target.chips // job.target.hosts
    wheel = {name: job.carried[name] for name in job.packages[:1] if name in job.carried}
    text = _text("slurm.sbatch.jinja", there, a_host=a_host)
    return {f"{job.name}.sbatch": text, **_beside(replace(job, carried=wheel))}


def _gcloud(job: LaunchJob) -> Files:
    version = short(job.target)
    values = {"type": google_type(job.target), "runtime": RUNTIMES[version]}
    there = _moved(job, f"{job.name}-files")
    return {
        f"{job.name}.sh": _text("gcloud.sh.jinja", there, zone=zone(job), **values),
        f"{job.name}.host.sh": _text("host.sh.jinja", there),
        **_beside(job),
    }


def _docker(job: LaunchJob) -> Files:
    there = _moved(job, "/app")
    return {
        f"{job.name}.Dockerfile": _text("Dockerfile.jinja", there),
        f"{job.name}.sh": _text("docker.sh.jinja", there),
        **_beside(job),
    }


# ---- notebooks for Kaggle and Colab, which train into a folder that outlives the session

_RUNS = {"kaggle": "/kaggle/working", "colab": "/content/drive/MyDrive/chipwise"}


def _notebook(where: str, job: LaunchJob) -> Files:
    recipe = _plain(job.file) if job.file else None  # IPython replaces braces and $ in a magic's line
    others = {name: content for name, content in job.carried.items() if not job.file or name != job.file.name}
    values = {
        "where": where,
        "run": f"{_RUNS[where]}/{job.name}",
        "about": "\n\n".join(map(_markdown, [*job.about, fact(f"launch-notebook-{where}")])),
        "archive": _archive(others) if others else None,
        "recipe": recipe,
        "text": job.file.read_text(encoding="utf-8") if job.file else None,
    }
    text = _text("notebook.ipynb.jinja", _moved(job, ".", recipe), **values)
    return {f"{job.name}.ipynb": text}


def _archive(files: Carried) -> str:
    """The files as text without quotes, half as long as they are: Kaggle takes notebooks of 1 MB."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:xz", preset=9) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return base64.b85encode(made.getvalue()).decode()


def _plain(file: Path) -> str:
    return re.sub(r"[^\w.-]", "_", file.name)


def _lends(where: str) -> Callable[[Target], bool]:
    return lambda target: target.name in NOTEBOOKS[where]


def zone(job: LaunchJob) -> str | None:
    """The Google zone of a TPU: the requested one, or one that has the version."""
    return job.zone or ZONES.get(short(job.target))


PLACES: dict[str, Place] = {
    one.name: one
    for one in (
        Place(
            "skypilot", lambda target: skypilot(target) is not None, _skypilot,
            lambda job: ["sky", "jobs", "launch", "--yes", "--name", job.name, f"{job.name}.yaml"],
            lambda job: ["sky", "jobs", "cancel", "--yes", "--name", job.name],
            keeps=True, sends=True,
        ),
        Place(
            "slurm", gpu, _slurm,
            lambda job: ["sbatch", f"{job.name}.sbatch"],
            lambda job: ["scancel", "--name", job.name],
            sends=True, spot=False, clouds=(), unpriced="launch-price-own",
        ),
        Place(
            "gcloud", lambda target: google_type(target) is not None, _gcloud,
            lambda job: ["bash", f"{job.name}.sh"],
            lambda job: ["bash", f"{job.name}.sh", "stop"],
            keeps=True, google=True, clouds=("gcp",),
        ),
        Place(
            "docker", lambda target: target.hosts == 1 and (gpu(target) or target.chip.kind == "TPU"),
            _docker,
            lambda job: ["bash", f"{job.name}.sh"],
            lambda job: ["docker", "stop", job.name],
            sends=True, spot=False, clouds=(), unpriced="launch-price-own",
        ),
        Place(
            "kaggle", _lends("kaggle"), partial(_notebook, "kaggle"), None, None,
            spot=False, clouds=(), free=NOTEBOOKS["kaggle"],
        ),
        Place(
            "colab", _lends("colab"), partial(_notebook, "colab"), None, None,
            spot=False, clouds=(), free=("t4", "v5e-1"), unpriced="launch-price-units",
        ),
    )
}  # fmt: skip
