"""A written recipe file is the recipe it was written from, wherever it is read."""

import dataclasses

import optax
import pytest

import chipwise as cw
import tasks
from chipwise.recipe.settings import write_recipe
from refusals import refused


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
    with refused(cw.RecipeError, "recipe-file-exists", path=str(to)):
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
    with refused(cw.RecipeError, "validation-unwritable"):
        write_recipe(tmp_path / "other.py", old=old, new=elsewhere, spec="digits", title="Other.")


@pytest.mark.parametrize(
    "changes, name, code",
    [
        ({}, "new.txt", "not-a-recipe-file"),
        ({"optimizer": cw.adamw(lr=optax.cosine_decay_schedule(0.1, 9))}, "new.py", "setting-unwritable"),
        ({"optimizer": cw.sgd(lr=0.1)}, "new.py", "optimizer-unwritable"),
        ({"task": tasks.task(eval=None)}, "new.py", "task-unwritable"),
    ],
)
def test_what_cannot_be_written_is_said_and_not_written(tmp_path, changes, name, code):
    old = tasks.recipe()
    new = tasks.recipe(**{"task": old.task, **changes})
    with refused(cw.RecipeError, code):
        write_recipe(tmp_path / name, old=old, new=new, spec="digits", title="No.")
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_of_optax_is_written_by_its_settings(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import optax\nimport chipwise as cw\nimport tasks\n\n\ndef recipe():\n"
        "    return tasks.recipe(optimizer=cw.from_optax(optax.lion, learning_rate=cw.cosine(0.1)))\n"
    )
    spec = f"{tmp_path / 'mine.py'}:recipe"
    old = cw.load(spec)
    rate = cw.warmup(cw.cosine(0.01), "5%")
    new = dataclasses.replace(old, optimizer=old.optimizer.replace(learning_rate=rate))
    to = write_recipe(tmp_path / "new.py", old=old, new=new, spec=spec, title="New.")
    assert "from chipwise import cosine, warmup\n" in to.read_text()
    assert cw.load(str(to)).optimizer == new.optimizer
