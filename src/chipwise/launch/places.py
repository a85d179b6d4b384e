"""Places that rent chips, and their job files. Nothing here starts a job.

`places.toml` has each place's needs and its names of the chips that it offers. The templates of the
files are in `templates/`.
"""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
import tarfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from ..base import DeviceError, Fact, RecipeError, fact, invalid, near
from ..base.figures import printable
from ..chips.prices import OWNED
from ..chips.targets import Target, names, parse
from .carried import Carried
from .launch_job import LaunchJob

Files = dict[str, str | bytes]
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


# ---- the names of chips at each place


def short(target: Target) -> str:
    return target.chip.names[0]


def gpu(target: Target) -> bool:
    """Whether the target has GPUs that JAX's CUDA version supports. The drivers for that version do
    not support a K80."""
    return target.chip.kind == "GPU" and float(target.chip.compute_capability or 0) >= 6


def google_type(target: Target) -> str | None:
    """Google's accelerator type of a TPU slice, such as `v5litepod-8`."""
    if target.chip.kind != "TPU" or target.rented_as or short(target) not in _TABLES["runtimes"]:
        return None
    version = "v5litepod" if short(target) == "v5e" else short(target)
    return f"{version}-{target.name.rpartition('-')[2]}"


def skypilot(target: Target, cloud: Cloud | None = None) -> str | None:
    """SkyPilot's name, with the number on one host, such as `A100-80GB:8` or `tpu-v5litepod-8`. At
    a named `cloud` it means that chip alone."""
    if target.chip.kind == "TPU":
        google = google_type(target)
        return google and f"tpu-{google}"
    named = _TABLES["skypilot_gpus_at"][cloud.name] if cloud else _TABLES["skypilot_gpus"]
    number = target.chips // target.hosts
    name = named.get(short(target)) or named.get(f"{short(target)}:{number}")
    return name and f"{name}:{number}"


def dstack(target: Target) -> str | None:
    """dstack's name, memory and number of GPUs of one host, such as `A100:80GB:8`."""
    name = _TABLES["dstack_gpus"].get(short(target))
    return name and f"{name}:{target.chips}" if target.hosts == 1 else None


# ---- places


@dataclass(frozen=True)
class Cloud:
    """A cloud that a place rents at, if a person names one."""

    name: str
    prices: tuple[str, ...]
    """Its names in price files."""
    key: str
    """Where SkyPilot looks for its key."""
    backend: str
    """dstack's name of it."""
    spot: tuple[str, ...] = ()
    """The places that rent spot machines there."""
    mounts: bool = False
    """SkyPilot mounts buckets there, and rents several hosts."""


_SECRETS = ("--secret", "AWS_ACCESS_KEY_ID", "--secret", "AWS_SECRET_ACCESS_KEY")
CLOUDS = {name: Cloud(name, **table) for name, table in _TABLES["clouds"].items()}


@dataclass(frozen=True)
class Place:
    """A place."""

    name: str
    templates: Mapping[str, str]
    """The templates of its files, by the ending of the file."""
    folder: str
    """The folder there of the files that the job carries."""
    start: tuple[str, ...] = ()
    """The command that starts the job. Empty if a person starts it."""
    stop: tuple[str, ...] = ()
    """The command that stops the billing."""
    keeps: bool = False
    """Needs a bucket for the run folder."""
    scheme: str | None = None
    """The scheme of the bucket, if only one is possible."""
    copies: bool = False
    """The job itself copies the run folder to the bucket, and back."""
    cloud: Cloud | None = None
    """Where it rents, if a person named it."""
    sends: bool = False
    """A local data folder can be used there."""
    shares: bool = False
    """Has this machine's files."""
    spot: bool = True
    runs: str | None = None
    """A notebook's folder of runs."""
    lends: tuple[str, ...] = ()
    """All its targets, if they are few."""
    free: tuple[str, ...] = ()
    """The targets of `lends` that are free."""
    clouds: tuple[str, ...] | None = None
    """The clouds whose prices it has. All by default."""
    unpriced: str = "unknown"
    """What is reported in place of a price: "unknown", "own" or "units"."""

    def offers(self, target: Target) -> bool:
        if self.lends:
            return target.name in self.lends
        if self.name == "docker":
            return target.hosts == 1 and (gpu(target) or target.chip.kind == "TPU")
        if self.cloud and (target.chip.kind != "GPU" or (target.hosts > 1 and self.copies)):
            return False
        if self.name == "skypilot":
            return bool(skypilot(target, self.cloud))
        return bool({"dstack": dstack, "slurm": gpu, "gcloud": google_type}[self.name](target))

    def at(self, cloud: str | None) -> Place:
        """The place, renting at that cloud alone. Raises `RecipeError` for an unknown one."""
        if cloud is None:
            return self
        if cloud not in CLOUDS:
            hint = near(cloud, CLOUDS)
            raise RecipeError("launch-cloud-unknown", cloud=cloud, hint=hint, clouds=list(CLOUDS))
        there = CLOUDS[cloud]
        copies = self.copies or not there.mounts
        start = self.start
        if copies and self.name == "skypilot":
            start = (*start[:-1], *_SECRETS, start[-1])
        return replace(
            self,
            start=start,
            cloud=there,
            clouds=there.prices,
            copies=copies,
            scheme="s3" if copies else self.scheme,
            spot=self.name in there.spot,
        )

    @property
    def needs(self) -> tuple[Fact, ...]:
        """What must be there before the job is started, where a cloud is named or copied to."""
        needs = []
        if self.cloud and self.name == "skypilot":
            needs.append(fact("launch-needs-skypilot", cloud=self.cloud.name, key=self.cloud.key))
        if self.name == "dstack":
            backend = self.cloud.backend if self.cloud else "TYPE"
            needs.append(fact("launch-needs-dstack", backend=backend))
        return (*needs, fact("launch-needs-aws")) if self.copies else tuple(needs)

    def begin(self, name: str) -> list[str]:
        """The command that starts the job `name`."""
        return [word.format(name=name) for word in self.start]

    def takes(self, cloud: str, includes: str) -> bool:
        """Whether such a price is one of this place. Prices of the user's own machines always
        are."""
        return self.clouds is None or includes == OWNED or cloud in self.clouds


PLACES = {name: Place(name, **table) for name, table in _TABLES["places"].items()}


def place(name: str) -> Place:
    """The place called `name`. Raises `RecipeError` with the nearest name otherwise."""
    if name not in PLACES:
        raise RecipeError(
            "launch-place-unknown", place=name, hint=near(name, PLACES), places=list(PLACES)
        )
    return PLACES[name]


def offered(where: Place) -> list[Target]:
    """All targets of the catalogue that `where` has."""
    known = map(parse, where.lends or names())
    return [target for target in known if where.offers(target) and not target.rented_as]


def lent(where: Place, target: Target) -> Target:
    """The target. If it has one chip and the place lends the chip in another number only, the
    target with that number: `t4` becomes `t4:2` at Kaggle."""
    same = [one for one in offered(where) if one.chip == target.chip]
    return same[0] if not where.offers(target) and target.chips == 1 and len(same) == 1 else target


def check(where: Place, job: LaunchJob) -> None:
    """Raises `DeviceError` or `RecipeError` for a job that the place cannot run."""
    if not where.offers(job.target):
        has, name = [target.name for target in offered(where)], job.target.name
        if where.cloud is None:
            raise DeviceError("launch-not-offered", place=where.name, target=name, has=has)
        named = {"place": where.name, "cloud": where.cloud.name, "target": name}
        raise DeviceError("launch-not-offered-at", **named, has=has)
    for text in (*job.words, *job.packages) if where.name == "dstack" else ():
        if re.search(r"\$(\$|\{\{)", text):  # it puts values there
            raise invalid("launch-dstack-text", "an argument", text, "no ${{ and no $$")
    if where.keeps and job.bucket is None:
        scheme = where.scheme or "gs"
        raise RecipeError("launch-without-bucket", place=where.name, scheme=scheme)
    if where.scheme and not str(job.bucket).startswith(f"{where.scheme}://"):
        facts = {"place": where.name, "bucket": job.bucket, "scheme": where.scheme}
        raise RecipeError("launch-bucket-scheme", **facts)
    if job.data is not None and not where.sends:
        raise RecipeError("launch-data-local", place=where.name, data=job.data)
    if job.spot and not where.spot:
        at = where.cloud and where.cloud.name
        raise RecipeError("launch-no-spot", place=f"{where.name} at {at}" if at else where.name)


# ---- the texts


def write(where: Place, job: LaunchJob) -> Files:
    """The place's files by name. Raises as `check` does."""
    check(where, job)
    there = _there(where, job)
    carried = job.carried
    values = _values(where, job)
    if where.runs:
        carried = {}
        values |= _notebook_values(where, job)
    elif where.shares:  # but for a wheel, which may be a temporary file here
        carried = {name: carried[name] for name in job.packages[:1] if name in carried}
    values |= {
        "job": there,
        "where": where.name,
        "place": where,
        "start": shlex.join(where.begin(job.name)),
    }
    texts = {
        f"{job.name}{end}": _environment().get_template(template).render(values)
        for end, template in where.templates.items()
    }
    return texts | {f"{job.name}-files/{name}": content for name, content in carried.items()}


def _there(where: Place, job: LaunchJob) -> LaunchJob:
    """The job as it is there: its wheel and its recipe file are in the place's folder."""
    folder, (wheel, *others) = where.folder.format(name=job.name), job.packages
    there = replace(job, packages=(f"{folder}/{wheel}" if wheel in job.carried else wheel, *others))
    if job.file is None:
        return there
    recipe = job.file.absolute() if where.shares else f"{folder}/{job.file.name}"
    attribute = job.words[0].rpartition(".py")[2]
    return replace(
        there, words=(f"{_plain(job.file) if where.runs else recipe}{attribute}", *job.words[1:])
    )


def _values(where: Place, job: LaunchJob) -> dict[str, Any]:
    """The values that the templates need besides the job."""
    version = short(job.target)
    tpu = job.target.chip.kind == "TPU"
    scheme, _, name, *folders = (job.bucket or "://").split("/")
    return {
        "bucket": f"{scheme}//{name}",  # SkyPilot mounts whole buckets
        "folder": "".join(f"{one}/" for one in folders),
        "accelerators": skypilot(job.target, where.cloud),
        "gpus": dstack(job.target),
        "nodes": 1 if tpu else job.target.hosts,  # a TPU slice is one node of SkyPilot's
        "a_host": job.target.chips // job.target.hosts,
        "type": google_type(job.target),
        "runtime": _TABLES["runtimes"].get(version),
        "zone": job.zone or _TABLES["zones"].get(version),
    }


def _notebook_values(where: Place, job: LaunchJob) -> dict[str, Any]:
    own = job.file.name if job.file else None
    others = {name: content for name, content in job.carried.items() if name != own}
    return {
        "run": f"{where.runs}/{job.name}",
        "about": "\n\n".join(map(_markdown, [*job.about, fact(f"launch-notebook-{where.name}")])),
        "archive": _archive(others) if others else None,
        "recipe": _plain(job.file) if job.file else None,
        "text": job.file.read_text(encoding="utf-8") if job.file else None,
    }


def _archive(files: Carried) -> str:
    """The files as text without quotes. The text has half the size of the files, since Kaggle takes
    notebooks of 1 MB."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:xz", preset=9) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return base64.b85encode(made.getvalue()).decode()


def _plain(file: Path) -> str:
    """The file's name in a form that IPython does not change. It replaces braces and $ in a magic's
    line."""
    return re.sub(r"[^\w.-]", "_", file.name)


def _markdown(line: object) -> str:
    return re.sub(r"([\\`*_{}\[\]<>()#!|~$&])", r"\\\1", printable(str(line)))


def _yaml(value: Any) -> str:
    """JSON, which YAML reads too. Escapes the characters that YAML does not print."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


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
        "sh": lambda words: shlex.quote(words) if isinstance(words, str) else shlex.join(words),
        "json": json.dumps,
        "yaml": _yaml,
        "comment": lambda about: "\n".join(f"# {printable(str(line))}" for line in about),
    }
    return environment
