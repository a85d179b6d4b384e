"""A job: the arguments of the training, the chip, the software, and the place of the run folder."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from ..base import DeviceError, Fact, RecipeError, invalid
from ..chips.targets import Target
from ..data.remote import is_url, local
from ..machine.host_facts import installed
from ..recipe.described import title_of_file
from .carried import PINNED, PLANNED, Carried, package_in

_SLURM = re.compile(r"[\w.,@+-]+", re.ASCII)
# `scancel` is given the job's name, and `tail` that of the log
_SBATCH = re.compile(r"(?!--job-name|-J|--output|-o)(--[a-z]|-[A-Za-z]).*")
BUCKET = re.compile(r"(gs|s3)://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[A-Za-z0-9._=-]+)*")


@dataclass(frozen=True)
class LaunchJob:
    """Everything that the files of a place need."""

    name: str
    target: Target
    words: tuple[str, ...]  # the arguments of `chipwise train`, without `--run`
    packages: tuple[str, ...]  # for pip. The first is chipwise, maybe one of the `carried` files
    spot: bool = False
    file: Path | None = None  # the user's recipe file, if any
    data: Path | None = None  # a folder on this machine
    bucket: str | None = None  # gs:// or s3://, for the run folder: it outlives the machine
    zone: str | None = None
    partition: str | None = None  # SLURM's
    account: str | None = None
    sbatch: tuple[str, ...] = ()  # further options of SLURM's sbatch
    carried: Carried = field(default_factory=dict)
    hours: int = 24  # time limit, for places that need one
    about: tuple[Fact, ...] = ()

    @property
    def python(self) -> str:
        """The Python version of the plan. Some machines have an older one."""
        return f"{sys.version_info.major}.{sys.version_info.minor}"

    @property
    def index(self) -> list[str]:
        """Options of pip: PyTorch's build for CPUs, since it only describes a model."""
        torch = any(one.startswith("torch==") for one in self.packages)
        return ["--extra-index-url", "https://download.pytorch.org/whl/cpu"] if torch else []

    def train(self, run: str, data: str | None = None, restart: int = 9) -> list[str]:
        """The command for the rented machine.

        *Arguments:* `run`, `data`: the folders there. `restart`: how often the run resumes there
        after a loss.
        """
        words = [
            "chipwise",
            *(["--restart", str(restart)] if restart else []),
            "train",
            *self.words,
        ]
        return [*words, *(["--data", data] if data else []), "--run", run]


def name_of(recipe: str) -> str:
    """A name that every place accepts: lower case, a letter first, at most 40 characters."""
    path, _, attribute = recipe.partition(":")
    stem = title_of_file(path) if attribute else path
    if attribute not in ("", "recipe"):
        stem = f"{stem}-{attribute}"
    clean = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    return f"chipwise-{clean}"[:40].rstrip("-")


def recipe_file(recipe: str) -> Path | None:
    """The file of `path.py:name`, with links resolved. `None` for a built-in recipe."""
    path = recipe.partition(":")[0]
    return Path(path).resolve() if path.endswith(".py") else None


def local_data(data: str | None) -> Path | None:
    """The folder that `--data` names, if it is not a URL."""
    return None if data is None or is_url(data) else local(data)


def packages(
    target: Target, data: str | None, chipwise: str | None, more: Sequence[str] = ()
) -> tuple[str, ...]:
    """The job's packages, in the versions that are installed here and were planned with.

    `chipwise`: what pip installs instead of the released version, such as a wheel or a git URL.
    `more`: what the recipe imports.
    """
    kind = {"TPU": "tpu", "GPU": "cuda12"}.get(target.chip.kind)
    extra = f"[{kind}]" if kind else ""
    needs = [
        chipwise or f"chipwise=={metadata.version('chipwise')}",
        f"jax{extra}=={metadata.version('jax')}",
    ]
    needs += [f"{name}=={metadata.version(name)}" for name in PINNED]
    if target.chip.kind == "TPU":
        libtpu = installed("libtpu")
        needs += [f"libtpu=={libtpu}"] if libtpu else []
    scheme = (data or "").partition("://")[0]
    needs += {"gs": ["gcsfs"], "s3": ["s3fs"], "http": ["aiohttp"], "https": ["aiohttp"]}.get(
        scheme, []
    )
    return (*needs, *(one for one in more if package_in(one) not in PLANNED and one not in needs))


def check_also(also: Sequence[str]) -> None:
    """Raises `RecipeError` if the user asks for another version of what the plan is of."""
    for one in also:
        package = package_in(one)
        version = re.search(r"[<>=!~@].*", one)
        if package in PLANNED and version and version[0] != f"=={installed(package)}":
            raise RecipeError("launch-also-planned", also=one, package=package)


def check(job: LaunchJob) -> None:
    """Raises an error for a job that cannot run anywhere."""
    for what, name in (("--partition", job.partition), ("--account", job.account)):
        if name is not None and not _SLURM.fullmatch(name):
            raise invalid("launch-slurm-name", what, name, "letters, digits and _.,@+-")
    for one in job.sbatch:
        if not _SBATCH.fullmatch(one) or not one.isprintable():
            raise invalid(
                "launch-sbatch",
                "--sbatch",
                one,
                "an option of sbatch but the name and the log: --sbatch=--constraint=a100",
            )
    paths = [("--data", job.data), ("RECIPE", job.file)]
    given = [("--zone", job.zone), *(("--package", one) for one in job.packages)]
    given += [("an argument", word) for word in job.words]
    given += [(what, str(path.absolute())) for what, path in paths if path is not None]
    for what, value in given:  # a line break would end a comment, an instruction or a value
        if value is not None and not value.isprintable():
            raise invalid("unprintable", what, value, "no control characters")
    if job.bucket is not None and not BUCKET.fullmatch(job.bucket):
        raise RecipeError("launch-bucket", bucket=job.bucket)
    if job.target.rented_as:
        raise DeviceError("launch-part", target=job.target.name, rented_as=job.target.rented_as)
