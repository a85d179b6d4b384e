"""The files that travel with a job: this chipwise as a wheel, the recipe's file, and the modules
beside it."""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import importlib.util
import io
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from ..base import RecipeError, invalid
from ..base.files import read_regular
from ..machine import host_facts

PINNED = ("jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
"""Packages that a job installs in the versions it was planned with, beside chipwise, jax and
libtpu."""

PLANNED = ("chipwise", "jax", "libtpu", *PINNED)
"""Packages that a job has in the versions that are here, with which it is planned."""

Carried = dict[str, bytes]
"""Files by their path in the job's folder."""


def chipwise(package: str | None) -> Carried:
    """The wheel that the job carries: the file `package`, if it is one. Without `package`, a wheel
    of the chipwise that runs here, if pip installed it from a folder or a URL and not by its
    version."""
    if package is None:
        return (
            {}
            if metadata.distribution("chipwise").read_text("direct_url.json") is None
            else wheel()
        )
    if not Path(package).exists():
        return {}
    if not package.endswith(".whl"):
        raise invalid("launch-package-local", "--package", package, "a file .whl, or a URL")
    return {Path(package).name: read_regular(package)}


def wheel() -> Carried:
    """This chipwise as a wheel of the files that run here. Needs neither their source nor a build.

    The build number is a hash of the content, so pip replaces one wheel by another. Format:
    https://packaging.python.org/en/latest/specifications/binary-distribution-format
    """
    installed = metadata.distribution("chipwise")
    root = Path(__file__).parents[1]
    name = f"chipwise-{installed.version}"
    info = f"{name}.dist-info"
    files = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            files[f"chipwise/{path.relative_to(root).as_posix()}"] = path.read_bytes()
    for kept in ("METADATA", "entry_points.txt"):
        files[f"{info}/{kept}"] = (installed.read_text(kept) or "").encode()
    build = f"1_{hashlib.sha256(repr(files).encode()).hexdigest()[:12]}"
    told = {
        "Wheel-Version": "1.0",
        "Generator": name,
        "Root-Is-Purelib": "true",
        "Tag": "py3-none-any",
    }
    files[f"{info}/WHEEL"] = "".join(
        f"{k}: {v}\n" for k, v in {**told, "Build": build}.items()
    ).encode()
    record = f"{info}/RECORD"
    files[record] = "".join(
        f"{inside},{_digest(content)}\n" for inside, content in files.items()
    ).encode()
    files[record] += f"{record},,\n".encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for inside, content in files.items():
            # Dated 1980: equal files are equal bytes
            archive.writestr(zipfile.ZipInfo(inside), content)
    return {f"{name}-{build}-py3-none-any.whl": made.getvalue()}


def _digest(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"sha256={digest},{len(content)}"


def modules(file: Path) -> tuple[Carried, set[str]]:
    """The Python file and the modules beside it that it imports, also inside functions and by each
    other. Also the top-level names of everything else that they import."""
    root = file.resolve().parent
    others = set()
    found = {}
    new = [root / file.name]
    while new:
        if (one := new.pop()) in found:
            continue
        found[one] = one.read_bytes()
        for name in _imported(found[one], one.relative_to(root).parent.parts):
            parts = name.split(".")
            places = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
            own = [root / f"{place}{end}" for place in places for end in ("/__init__.py", ".py")]
            own = [path for path in own if path.is_file()]
            new += own
            if not own:
                others.add(parts[0])
    within = {one.relative_to(root): content for one, content in found.items()}
    # A folder without modules of the recipe, such as its data, hides no package
    others -= {path.parts[0].removesuffix(".py") for path in within}
    return {path.as_posix(): content for path, content in within.items()}, others


def _imported(text: bytes, package: Sequence[str]) -> Iterator[str]:
    """The names that a module of `package` imports. A name imported from a module is included too,
    since it may be a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            dotted = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(dotted, ".".join(package))
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


@functools.cache
def _owners() -> Mapping[str, list[str]]:
    """The packages that install each first name of an import. Reads all that is installed: 0.1 s
    and more."""
    return metadata.packages_distributions()


def requirements(names: set[str], also: Sequence[str]) -> list[str]:
    """The packages for pip to install for imports of the top-level `names`, in the versions that
    are installed here.

    *Arguments:* `also`: what the user has installed there. Raises `RecipeError` for a module that
    neither is beside the recipe nor comes from a package index. A name that is not installed here
    is optional.
    """
    needs = {}
    owners = _owners()
    for name in sorted(names - sys.stdlib_module_names - {"chipwise", "__main__"}):
        packages = owners.get(name, [])
        if any(_installs(wanted, {name, *packages}) for wanted in also):
            continue
        for package in (one for one in packages if package_in(one) not in PLANNED):
            installed = metadata.distribution(package)
            if origin := installed.read_text("direct_url.json"):  # not by its version
                raise RecipeError(
                    "launch-import-elsewhere", name=name, where=json.loads(origin)["url"]
                )
            # +cpu is no version of a package index
            needs[package] = installed.version.partition("+")[0]
        if not packages and (spec := importlib.util.find_spec(name)) is not None:
            raise RecipeError("launch-import-elsewhere", name=name, where=spec.origin or "a folder")
    if "torch" in needs and (version := host_facts.installed("torchax")):  # chipwise imports it
        needs["torchax"] = version
    return [f"{package}=={version}" for package, version in needs.items()]


def package_in(wanted: str) -> str:
    """The name of the package that pip installs by `wanted`, such as `"torch>=2"`, in the form in
    which names are compared. Empty for a URL or a file, which do not state it."""
    name = re.split(r"[^\w.-]", wanted, maxsplit=1)[0]
    stated = "/" not in wanted or re.match(r"[\w.-]+(\[.*\])? *@", wanted)
    return re.sub(r"[-_.]+", "-", name).lower() if stated else ""


def _installs(wanted: str, names: set[str]) -> bool:
    """Whether pip installs one of the packages or modules `names` by `wanted`."""
    if stated := package_in(wanted):
        return stated in map(package_in, names)
    return any(re.search(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", wanted) for name in names)
