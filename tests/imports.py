"""What each module of the package imports, read from the source: for the tests that hold the layout."""

import ast
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "chipwise"


@dataclasses.dataclass(frozen=True)
class Import:
    """An import, at the top of a file or in a function: `run/fit.py` at `line` takes `recipe/duration.py`.

    `module` is a file of the package, relative to it; importing from a package is taking its `__init__.py`.
    `typing` says that it is for types alone.
    """

    file: str
    line: int
    module: str
    typing: bool

    @property
    def arrow(self) -> tuple[str, str]:
        return package_of(self.file), package_of(self.module)


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def package_of(file: str) -> str:
    """`engine` of `run/fit.py`; `errors` of `errors.py`."""
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
        tree = ast.parse(path.read_text())
        typing = set(_for_types(tree))
        for node in ast.walk(tree):
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
                    found.append(Import(file, node.lineno, module, node in typing))
    return found


def cycle() -> list[str]:
    """Files that import each other in a circle, in functions too: the first one found, or empty."""
    onward: dict[str, set[str]] = {}
    for one in imports():
        if not one.typing and one.file != one.module:
            onward.setdefault(one.file, set()).add(one.module)
    done: set[str] = set()

    def visit(file: str, way: tuple[str, ...]) -> list[str]:
        if file in way:
            return [*way[way.index(file) :], file]
        if file in done:
            return []
        for module in sorted(onward.get(file, ())):
            if circle := visit(module, (*way, file)):
                return circle
        done.add(file)
        return []

    return next((circle for file in sorted(onward) if (circle := visit(file, ()))), [])


def _for_types(tree: ast.Module) -> Iterator[ast.AST]:
    """What only type checkers run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                yield from ast.walk(statement)


def _module(name: tuple[str, ...], known: set[str]) -> str | None:
    """The file that a dotted name below the package is, or is in."""
    for length in range(len(name), 0, -1):
        stem = "/".join(name[:length])
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if file in known:
                return file
    return None  # `from chipwise import x`: a public name, or of `__init__.py` itself
