"""Recipe files as modules."""

import os
import sys

import pytest

from chipwise.base.errors import RecipeError
from chipwise.recipe.recipe_file import import_file
from refusals import refused


@pytest.mark.parametrize("edited", [False, True])
def test_an_edit_of_equal_size_within_a_second_is_seen(edited, tmp_path, monkeypatch):
    """Python would take the bytecode that it has kept."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file, now = tmp_path / "mine.py", (1e9, 1e9)
    for value in (1, 2 if edited else 1):
        file.write_text(f"value = {value}")
        os.utime(file, now)
        module = import_file("chipwise_mine", str(file))
        assert module.value == value and module.__file__ == str(file)
    del sys.modules["chipwise_mine"]


def test_another_file_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("value = 1")
    with refused(RecipeError, "not-a-python-file", path=str(tmp_path / "mine.txt")):
        import_file("chipwise_mine", str(tmp_path / "mine.txt"))
