"""What each module of the package imports, read from the source: for the tests that hold the layout."""

import ast
import dataclasses
import functools
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "chipwise"


@dataclasses.dataclass(frozen=True)
class Import:
    """An import, at the top of a file or in a function: `engine/fit.py` at `line` takes `recipe/duration.py`.

    `module` is a file of the package, relative to it; importing from a package is taking its `__init__.py`.
    """

    file: str
    line: int
    module: str

    @property
    def arrow(self) -> tuple[str, str]:
        return package_of(self.file), package_of(self.module)


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def package_of(file: str) -> str:
    """`engine` of `engine/fit.py`; `errors` of `errors.py`."""
    return file.split("/")[0].removesuffix(".py")


@functools.cache
def imports() -> list[Import]:
    """Every import of the package by the package, but those of `chipwise/__init__.py`: the public names."""
    known = {str(path.relative_to(PACKAGE)) for path in files()}
    found = []
    for path in files():
        file = str(path.relative_to(PACKAGE))
        if file == "__init__.py":
            continue
        here = ("chipwise", *path.relative_to(PACKAGE).parent.parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                base = here[: len(here) - node.level + 1] if node.level else ()
                base += tuple(node.module.split(".")) if node.module else ()
                names = [(*base, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [tuple(alias.name.split(".")) for alias in node.names]
            else:
                continue
            for name in names:
                if name[0] == "chipwise" and (module := _module(name[1:], known)):
                    found.append(Import(file, node.lineno, module))
    return found


def _module(name: tuple[str, ...], known: set[str]) -> str | None:
    """The file that a dotted name below the package is, or is in."""
    for length in range(len(name), 0, -1):
        stem = "/".join(name[:length])
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if file in known:
                return file
    return None  # `from chipwise import x`: a public name, or of `__init__.py` itself
