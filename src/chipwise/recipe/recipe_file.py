"""Recipe files as modules, which the processes that read data import too."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from ..base import RecipeError

RECIPE_MODULE = "chipwise_recipe_"  # how modules are called that came from recipe files


class _FromText(SourceFileLoader):
    """Compiles the file as it is. Python would take bytecode of another text that has the same size
    and was written within the same second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(name: str, path: str) -> Any:
    """Runs the Python file at `path` and registers it as the module `name`. Raises the errors of
    the file."""
    file = Path(path)
    loader = _FromText(name, path) if file.suffix == ".py" else None
    module_spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    if module_spec is None or module_spec.loader is None:
        raise RecipeError(
            "not-a-python-file", "{path} is no Python file: expected path.py:name.", path=path
        )
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    home = str(file.resolve().parent)
    if home not in sys.path:  # as `python path.py` does, so that it finds the files beside it
        sys.path.insert(0, home)
    module_spec.loader.exec_module(module)
    return module
