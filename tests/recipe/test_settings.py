import optax
import pytest

import chipwise as cw
import tasks
from chipwise.recipes.load import load
from refusals import refused

FILE = """
import functools
import chipwise as cw
import tasks
from beside import RATE
from chipwise.recipes.digits import recipe as borrowed

def recipe(rate: float = 0, batch: int = 24, name: str = "mine"):
    return tasks.recipe(batch=batch, name=name, optimizer=cw.sgd(lr=cw.one_cycle(rate or RATE, warmup="20%")))

def needs(folder):
    return tasks.recipe(name=folder)

def wrong():
    return 3

def broken():
    shape = ()
    return shape[1]

finished = tasks.recipe(name="finished")
partial = functools.partial(recipe, batch=48)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "beside.py").write_text("RATE = 0.1\n")
    (folder / "my_task.py").write_text(FILE)
    return folder / "my_task.py"


def test_a_setting_reaches_a_parameter_a_field_and_the_optimizer(file):
    made = load(f"{file}:recipe", ["batch=48", "seed=7", "momentum=0.5", "ema=0.99", "name=x"])
    assert (made.batch, made.seed, made.optimizer.momentum, made.ema, made.name) == (48, 7, 0.5, 0.99, "x")


def test_the_rate_of_a_schedule_scales_its_peak_and_keeps_its_shape(file):
    lr = load(f"{file}:finished", ["lr=0.5"]).optimizer.lr
    assert lr == tasks.recipe().optimizer.lr.with_peak(0.5)


def test_a_whole_number_as_default_of_a_float_takes_fractions(file):
    assert load(f"{file}:recipe", ["rate=0.25"]).optimizer.lr.peak == 0.25
    whole = cw.sgd(lr=1, weight_decay=0)
    from chipwise.recipe.settings import apply

    changed = apply(tasks.recipe(optimizer=whole), {"lr": "0.5", "weight_decay": "1e-4"})
    assert (changed.optimizer.lr, changed.optimizer.weight_decay) == (0.5, 1e-4)


def test_none_and_words_are_values_too(file):
    made = load(f"{file}:finished", ["clip=1.0", "decay=kernels", "precision=bf16", "ema=none"])
    assert (made.optimizer.clip, made.optimizer.decay, made.precision, made.ema) == (
        1.0,
        "kernels",
        "bf16",
        None,
    )
    assert load(f"{file}:finished", ["clip=1", "clip=none"]).optimizer.clip is None


@pytest.mark.parametrize("names", [("replicas", "blocks"), ("blocks", "replicas")])
def test_replicas_and_blocks_are_set_at_once(names):
    recipe = tasks.recipe(replicas=8, blocks=8)
    from chipwise.recipe.settings import apply

    given = {"replicas": "12", "blocks": "6"}
    changed = apply(recipe, {name: given[name] for name in names})
    assert (changed.replicas, changed.blocks) == (12, 6)


def test_hyperparameters_of_an_optax_optimizer_are_settings():
    from chipwise.recipe.settings import apply

    optimizer = cw.from_optax(optax.lion, learning_rate=cw.schedules.cosine(1e-3), b1=0.8)
    changed = apply(tasks.recipe(optimizer=optimizer), {"learning_rate": "0.01", "b1": "0.7"}).optimizer
    assert changed == cw.from_optax(optax.lion, learning_rate=cw.schedules.cosine(0.01), b1=0.7)
    with refused(cw.errors.RecipeError, "recipe-setting-unknown", name="learning_rat", near="learning_rate"):
        apply(tasks.recipe(optimizer=optimizer), {"learning_rat": "1"})


def test_a_recipe_may_be_finished_borrowed_or_partial_and_is_called_recipe_by_default(file):
    assert load(f"{file}:finished").name == "finished"
    assert load(f"{file}:borrowed").name == "digits"
    assert load(f"{file}:partial").batch == 48
    assert load(str(file)).name == "mine"
    assert load(f"{file}:").name == "mine"


def test_built_in_recipes_load_without_data():
    assert load("digits", ["duration=2ep"]).duration == "2ep"


@pytest.mark.parametrize(
    "name,settings,code,facts",
    [
        ("recipe", ["lr"], "set-not-a-pair", {"value": "lr"}),
        ("recipe", ["lr="], "set-not-a-pair", {"value": "lr="}),
        ("recipe", ["lr=fast"], "set-not-a-number", {"name": "lr", "given": "fast", "old": "0.1"}),
        ("recipe", ["lr={[]: 1}"], "set-not-a-number", {}),
        ("recipe", ["batch=24.5"], "set-not-whole", {"name": "batch", "given": "24.5"}),
        ("recipe", ["seed=one"], "set-not-whole", {"name": "seed"}),
        ("recipe", ["seed=" + "9" * 400], "set-not-whole", {"name": "seed"}),
        ("recipe", ["ema=" + "9" * 400], "set-not-a-number", {"name": "ema"}),
        ("recipe", ["nesterov=2"], "set-not-a-bool", {"name": "nesterov"}),
        ("recipe", ["ema=much"], "set-not-a-number", {"name": "ema", "old": "0.999"}),
        ("recipe", ["duration=24"], "duration-without-unit", {"number": "24"}),
        ("recipe", ["precision=f31"], "precision-unknown", {"near": "f32"}),
        ("recipe", ["bacth=24"], "recipe-setting-unknown", {"name": "bacth", "near": "batch"}),
        ("recipe", ["task=1"], "recipe-setting-unknown", {"name": "task"}),
        ("finished", ["lr=True"], "set-not-a-number", {"given": "True"}),
        ("finishd", [], "recipe-not-in-file", {"name": "finishd", "near": "finished"}),
        ("needs", [], "parameter-missing", {"name": "folder", "option": "--set folder=..."}),
        ("wrong", [], "not-a-recipe", {"expected": "a cw.Recipe"}),
        (
            "broken",
            [],
            "recipe-function-fails",
            {"line": 19, "error": "IndexError", "reason": "tuple index out of range"},
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(file, name, settings, code, facts):
    with refused(cw.errors.RecipeError, code, **facts):
        load(f"{file}:{name}", settings)


def test_keras_runs_on_jax_in_a_recipe_file_that_does_not_say_so(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "")
    monkeypatch.delenv("KERAS_BACKEND")
    (tmp_path / "mine.py").write_text("import os\nraise ValueError(os.environ['KERAS_BACKEND'])")
    for backend in ("jax", "torch"):
        with refused(cw.errors.RecipeError, "recipe-file-fails", reason=backend):
            cw.load(str(tmp_path / "mine.py"))
        monkeypatch.setenv("KERAS_BACKEND", "torch")


@pytest.mark.parametrize(
    "text,facts",
    [
        ("import nothing_like_it", {"line": 1, "error": "ModuleNotFoundError"}),
        ("\n\ndef recipe(:\n", {"line": 3, "error": "SyntaxError"}),
        ("x = 1\nraise ValueError('two\\nlines')", {"line": 2, "reason": "two lines"}),
    ],
)
def test_a_file_that_does_not_run_is_one_line_with_the_place(tmp_path, text, facts):
    (tmp_path / "bad.py").write_text(text)
    with refused(cw.errors.RecipeError, "recipe-file-fails", path=str(tmp_path / "bad.py"), **facts):
        load(f"{tmp_path / 'bad.py'}:recipe")


@pytest.mark.parametrize(
    "spec,code,facts",
    [
        ("digit", "recipe-unknown", {"name": "digit", "near": "digits"}),
        ("nowhere.py:recipe", "recipe-file-missing", {"path": "nowhere.py"}),
        ("", "recipe-unknown", {"name": "", "near": None}),
    ],
)
def test_an_unknown_recipe_is_refused_with_the_nearest(spec, code, facts):
    with refused(cw.errors.RecipeError, code, **facts):
        load(spec)


def test_data_is_for_functions_that_take_it(file, tmp_path):
    with refused(cw.errors.RecipeError, "recipe-without-data"):
        load(f"{file}:recipe", data=str(tmp_path))
    with refused(cw.errors.RecipeError, "recipe-finished"):
        load(f"{file}:finished", data=str(tmp_path))
