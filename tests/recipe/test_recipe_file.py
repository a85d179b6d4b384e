"""A written recipe file is the recipe it was written from, wherever it is read."""

import dataclasses

import optax
import pytest

import chipwise as cw
import tasks
from chipwise.recipe.recipe_file import write_recipe


def test_a_built_in_recipe_moved_and_loaded_again(tmp_path):
    old = cw.load("mnist", ["seed=3"])
    new = old.transfer(batch=1024, replicas=32)
    to = write_recipe(tmp_path / "big.py", old=old, new=new, spec="mnist", settings=["seed=3"], title="Big.")
    text = to.read_text()
    assert text.startswith('"""Big.\n\n    chipwise train big.py:recipe\n')
    assert 'cw.load("mnist", ["seed=3"], data)' in text and "from chipwise import exponential\n" in text
    loaded = cw.load(f"{to}:recipe")
    assert loaded.describe() == new.describe()
    assert loaded.validated.point.batch == 256
    assert cw.load(str(to), ["lr=0.01"]).optimizer.lr.init < 0.01  # settings go on top
    with pytest.raises(cw.RecipeError, match="exists and is not overwritten"):
        write_recipe(to, old=old, new=new, spec="mnist", title="Again.")
    assert to.read_text() == text and [p.name for p in tmp_path.iterdir() if p.suffix == ".py"] == ["big.py"]


def test_a_file_of_ones_own_is_found_from_the_new_one(tmp_path):
    (tmp_path / "task").mkdir()
    mine = tmp_path / "task" / "mine.py"
    mine.write_text("import tasks\n\n\ndef made(batch: int = 24):\n    return tasks.recipe(batch=batch)\n")
    spec = f"{mine}:made"
    old = cw.load(spec)
    new = old.transfer(batch=48)
    to = write_recipe(tmp_path / "new" / "moved.py", old=old, new=new, spec=spec, title="Moved.")
    assert str(tmp_path) not in to.read_text()
    (tmp_path / "elsewhere").mkdir()
    for folder in ("task", "new"):  # both together
        (tmp_path / folder).rename(tmp_path / "elsewhere" / folder)
    again = cw.load(str(tmp_path / "elsewhere" / "new" / "moved.py"))
    assert again.describe() == new.describe()


def test_where_a_new_recipe_was_validated_itself(tmp_path):
    old = cw.load("digits")
    optimizer = dataclasses.replace(old.optimizer, lr=old.optimizer.lr.with_peak(0.07))
    told = cw.Validated(source='a "sweep"', forgetting=(0.1, 0.2))
    new = dataclasses.replace(old, optimizer=optimizer, validated=told)
    loaded = cw.load(str(write_recipe(tmp_path / "new.py", old=old, new=new, spec="digits", title="New.")))
    assert (loaded.validated.source, loaded.validated.forgetting) == ('a "sweep"', (0.1, 0.2))
    assert loaded.validated.point.optimizer == optimizer
    elsewhere = dataclasses.replace(new, batch=128)
    with pytest.raises(cw.RecipeError, match="validated at other settings"):
        write_recipe(tmp_path / "other.py", old=old, new=elsewhere, spec="digits", title="Other.")


@pytest.mark.parametrize(
    "changes, name, expected",
    [
        ({}, "new.txt", "ends in .py"),
        ({"optimizer": cw.adamw(lr=optax.cosine_decay_schedule(0.1, 9))}, "new.py", "number or a schedule"),
        ({"optimizer": cw.sgd(lr=0.1)}, "new.py", "cannot be written"),
        ({"task": tasks.task(eval=None)}, "new.py", "another task"),
    ],
)
def test_what_cannot_be_written_is_said_and_not_written(tmp_path, changes, name, expected):
    old = tasks.recipe()
    new = tasks.recipe(**{"task": old.task, **changes})
    with pytest.raises(cw.RecipeError, match=expected):
        write_recipe(tmp_path / name, old=old, new=new, spec="digits", title="No.")
    assert list(tmp_path.iterdir()) == []
