"""What people call a recipe, on pages and in job files."""

from pathlib import Path

import pytest

from chipwise.launch.launch_job import name_of
from chipwise.recipe.described import title


@pytest.mark.parametrize(
    ("name", "file", "called"),
    [
        ("digits", "digits", "digits"),
        ("mine", "net.py:make", "mine"),
        ("recipe", "net.py:recipe", "net"),
        ("recipe-synthetic", "net.py:recipe", "net-synthetic"),
        ("recipe", "flowers/recipe.py:recipe", "flowers"),
        ("recipe", "flowers/__init__.py:make", "flowers"),
        ("recipe", "recipe.py:recipe", Path.cwd().name),
        ("recipe", None, "recipe"),
    ],
)
def test_a_recipe_without_a_name_is_called_by_its_file_or_its_folder(name, file, called):
    assert title({"name": name, "source": {"recipe": file}}) == called


@pytest.mark.parametrize(
    "described", [{}, {"name": 3, "source": 7}, {"name": "recipe", "source": {"recipe": [1]}}]
)
def test_what_a_stored_recipe_says_is_not_trusted(described):
    assert title(described) in ("", "3", "recipe", "[1]")


def test_a_job_is_named_alike():
    names = ["flowers/recipe.py:recipe", "net.py:recipe", "net.py:other", "digits"]
    assert [name_of(one) for one in names] == [
        f"chipwise-{n}" for n in ("flowers", "net", "net-other", "digits")
    ]
