import importlib
import inspect
import re
from pathlib import Path

import pytest

import chipwise as cw
from chipwise.recipes import BUILT_IN
from chipwise.recipes.load import ZERO_IS_NONE
from chipwise.step.state import abstract_state, count
from refusals import refused

PARAMETERS = {
    "digits": 9_048,
    "mnist": 250_698,
    "cifar10-davidnet": 6_573_120,
    "imagenet-resnet50": 25_557_032,
    "vit-s16": 22_050_664,
    "gpt2-124m": 124_439_808,
    "bert-base": 109_483_778,
    "llama-8b": 8_030_261_248,
}
STEPS = {
    "digits": 674,
    "mnist": 5_625,
    "cifar10-davidnet": 2_344,
    "imagenet-resnet50": 112_603,
    "vit-s16": 112_603,
    "gpt2-124m": 19_560,
    "bert-base": 6_314,
    "llama-8b": 38_300,
}


UNTRAINED = ("llama-8b",)  # larger than any device they were tried on
LARGE = ("imagenet-resnet50", "cifar10-davidnet", "efficientnet-lite0", "bert-base")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LARGE else ()) for n in BUILT_IN]
)
def test_a_recipe_is_known_without_its_data(name):
    """Shapes, lengths and schedules need no file: a recipe can be planned anywhere."""
    recipe = cw.load(name)
    assert recipe.name == name
    assert count(abstract_state(recipe).params) == PARAMETERS[name]
    assert recipe.clock.total == STEPS[name]
    assert recipe.warnings() == []
    second = "perplexity" if name in ("gpt2-124m", *UNTRAINED) else "accuracy"
    assert set(abstract_state(recipe).sums) == {"loss", second}


@pytest.mark.parametrize("name", BUILT_IN)
def test_its_docstring_says_how_to_run_it_and_what_to_expect(name):
    import importlib

    module = importlib.import_module(f"chipwise.recipes.{name.replace('-', '_')}")
    text = " ".join(module.__doc__.split())
    assert f"chipwise train {name}" in text
    if name in UNTRAINED:
        assert "Not measured here" in text
    else:
        assert "xpected" in text and "%" in text


def test_a_quarter_of_davidnet_is_a_setting():
    recipe = cw.load("cifar10-davidnet", ["width=16", "precision=f32", "smoothing=0.2", "lr=0.2"])
    assert recipe.name == "cifar10-davidnet-16"
    assert count(abstract_state(recipe).params) < 6_573_120 / 15
    assert recipe.optimizer.lr.peak == 0.2


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_size_of_a_model_is_at_least_one(name):
    """Such as `n_head: 0` in a folder's config.json."""
    module = importlib.import_module(f"chipwise.recipes.{name.replace('-', '_')}")
    parameters = inspect.signature(module.recipe).parameters
    for size in (p.name for p in parameters.values() if type(p.default) is int and p.default > 0):
        none = size in ZERO_IS_NONE
        if none:
            assert cw.load(name, [f"{size}=0"], synthetic=True)
        for value in (-1,) if none else (0, -1):
            with refused(cw.errors.RecipeError, "recipe-size", what=size, value=value):
                cw.load(name, [f"{size}={value}"])


@pytest.mark.parametrize("name", ["gpt2-124m", "bert-base"])
def test_a_context_without_end_is_refused_before_anything_is_built(name):
    size = "context" if name == "gpt2-124m" else "length"
    made = cw.load(name, [f"{size}=100000000"], synthetic=True)
    with refused(cw.errors.RecipeError, "attention-too-long"):
        cw.plan(made, "v5e-8")


def test_the_overview_lists_every_recipe_with_its_parameters():
    page = (Path(__file__).parents[2] / "docs" / "overview.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d,]+) \|", page, re.MULTILINE)
    assert {name: int(number.replace(",", "")) for name, number in rows} == PARAMETERS
