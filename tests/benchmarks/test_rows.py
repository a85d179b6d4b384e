"""The published rows as recipes: each accounted for, sizes as published, sides that no family crosses."""

import collections
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.plan_accuracy import page
from benchmarks.plan_accuracy.recipes.text import t5x_losses
from benchmarks.plan_accuracy.rows import PUBLISHED, rows

from chipwise.recipe.settings import load

RECIPES = PUBLISHED.parent / "recipes"
PARAMETERS = {  # as torchvision, timm, llm-foundry, llm.c and the papers' code state
    "images.py:resnet": {
        "": 25_557_032,
        "depth=18": 11_689_512,
        "depth=152": 60_192_808,
        "wide=2": 68_883_240,
        "space_to_depth=true": 25_557_032 + (8 * 8 - 7 * 7) * 3 * 64,
    },
    "images.py:efficientnet": {"": 5_288_548, "kind=b4": 19_341_616, "kind=v2_s": 21_458_488},
    "images.py:mixer": {"": 59_880_472},
    "images.py:vit": {"": 22_050_664},
    "images.py:resnet164": {"": 1_703_258},
    "text.py:bert": {"": 336_232_258},
    "text.py:t5": {"": 76_961_152, "size=large": 783_150_080},
    "tpuchat.py:decoder": {"": 163_577_856},
}


@pytest.fixture(scope="module")
def by_row():
    return {row.row: row for row in rows()}


def test_rows_are_numbered_once_and_say_what_they_are(by_row):
    assert list(by_row) == sorted(by_row) and len(by_row) == len(rows()) >= 179
    for row in by_row.values():
        assert row.use in ("fit", "held-out", "apart") and row.clock in ("steps", "evaluation", "run", "wall")
        assert row.program in ("xla", "library", "kernels") and row.family and row.source
        assert (row.use == "apart") == bool(row.apart) == (not row.recipe) == (not row.on), row.row


def test_no_family_of_a_source_is_on_both_sides(by_row):
    """A source is a repository, and of training results also the edition and who submitted."""
    sides = collections.defaultdict(set)
    for row in by_row.values():
        if row.use != "apart":
            words = row.source.split("github.com/")[-1].replace("/blob/", "@").replace(" ", "@").split("@")[0]
            sides[row.family, words, row.model.rsplit(" (", 1)[-1]].add(row.use)
    assert {key: found for key, found in sides.items() if len(found) > 1} == {}


def test_settings_and_targets_agree_with_the_published_figures(by_row):
    for row in by_row.values():
        if row.use == "apart":
            continue
        target = row.target
        assert target.chips == row.n_chips, row.row
        fewer = "planned with" in row.note  # of its micro-batches
        assert not row.global_batch or row.batch == int(row.global_batch) or fewer, row.row
        replicas = int(next(s for s in row.settings if s.startswith("replicas=")).removeprefix("replicas="))
        shards = next((int(s[7:]) for s in row.settings if s.startswith("shards=")), 1)
        assert replicas % (target.devices // shards) == 0 and row.batch % replicas == 0, row.row
        assert 0.1 < row.measured / target.chips < 1e5, row.row


def test_throughputs_are_converted_into_examples(by_row):
    assert by_row[60].measured == pytest.approx(1_090_678 / 2048)
    assert by_row[117].measured == pytest.approx(50_000 * 24 / 79)
    assert by_row[2].seconds == pytest.approx(256 / 938)


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=() if "vit" in spec else pytest.mark.slow) for spec in PARAMETERS]
)
def test_parameters_are_the_published_ones(spec):
    for setting, expected in PARAMETERS[spec].items():
        recipe = load(str(RECIPES / spec), [setting] if setting else [])
        params, _ = jax.eval_shape(recipe.task.init, jax.random.key(0))
        assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == expected, setting


def test_t5s_loss_and_its_own_gradient_are_the_formula_s():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 7)) * 5
    told = jax.nn.one_hot(jnp.asarray([[1, 2, 3], [4, 5, 6]]), 7)

    def plain(logits):
        weights, log_z = jax.nn.log_softmax(logits), jax.nn.logsumexp(logits, axis=-1)
        return jnp.sum(1e-4 * log_z**2 - jnp.sum(told * weights, axis=-1))

    found = jax.value_and_grad(lambda logits: jnp.sum(t5x_losses(logits, told)))(logits)
    for one, other in zip(found, jax.value_and_grad(plain)(logits), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_command_is_what_the_row_loads(by_row):
    assert by_row[60].command == (
        "chipwise plan gpt2-124m --set depth=12 --set width=768 --set heads=12 --set context=2048 "
        "--set vocabulary=50368 --set batch=624 --set replicas=24 --set precision=bf16 --on a100:8"
    )
    recipe = by_row[35].load()
    assert (recipe.batch, recipe.replicas, recipe.precision) == (1024, 8, "bf16")
    assert by_row[35].spec == "benchmarks/plan_accuracy/recipes/images.py:resnet"


def test_devices_add_in_order_within_a_host_of_gpus_and_where_a_device_has_several_replicas(by_row):
    assert not by_row[57].exact and by_row[57].command.endswith(" --no-exact --on a100-80gb:64")
    assert not by_row[238].exact and by_row[71].exact and by_row[132].exact
    assert by_row[77].exact and by_row[84].exact  # one group of all chips


def test_nothing_is_fitted_to_rows_that_are_held_out(by_row):
    results = json.loads((PUBLISHED.parent / "results.json").read_text(encoding="utf-8"))
    assert {int(number) for number in results} <= {r.row for r in by_row.values() if r.use != "apart"}


def answer(row, ratio, **more):
    """A prediction of `ratio` times the measured speed, give or take a fifth, at a fifth of the peak."""
    value, chip = ratio * row.measured, row.target.chip
    flops = 0.2 * chip.bf16_dense_tflops * 1e12 / chip.jax_devices_per_chip * row.seconds
    run = {"train": 100.0, "evaluate": 10.0, "start": 5.0, "compile": 5.0}
    ends = {"low": value / 1.2, "high": value * 1.2}
    return {"command": row.command, "value": value, **ends, "flops": flops, "run": run}


def test_predictions_are_compared_with_measurements_and_with_the_rule_of_thumb(by_row):
    fast = page.Prediction(by_row[41], answer(by_row[41], 1.25))
    slow = page.Prediction(by_row[41], answer(by_row[41], 0.9))
    assert fast.ratio == pytest.approx(1.25) and not fast.inside and slow.inside
    assert page.error(fast.ratio) == pytest.approx(0.25) and page.error(0.8) == pytest.approx(0.25)
    assert fast.rule == pytest.approx(2.0)  # 40 % of the peak where the measured step reached 20 %


@pytest.mark.parametrize(("number", "share"), [(41, 1), (118, 1), (35, 100 / 110), (134, 100 / 120)], ids=str)
def test_what_the_clock_covered_is_predicted(by_row, number, share):
    measured = by_row[number].measured
    run = {"train": 100.0, "evaluate": 10.0, "start": 5.0, "compile": 5.0}
    steps = {"value": 1.2 * measured, "low": measured, "high": 1.5 * measured}
    predicted = page.Prediction(by_row[number], {**steps, "run": run})
    assert predicted.ratio == pytest.approx(1.2 * share)
    assert predicted.throughput == pytest.approx([speed * share for speed in steps.values()])


def test_the_page_has_every_row_once_and_leads_with_those_held_out(by_row, tmp_path):
    answers = {n: answer(by_row[n], 1.1) for n in (35, 60, 71, 174)}
    answers[61] = {"command": by_row[61].command, "problem": "batch-does-not-fit", "text": "Too large."}
    marks = "".join(f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in ("summary", "rows"))
    (tmp_path / "plan_accuracy.md").write_text(f"{marks}kept", encoding="utf-8")
    page.write(tmp_path, list(by_row.values()), answers)
    text = (tmp_path / "plan_accuracy.md").read_text(encoding="utf-8")
    heads = ("**held-out", "## Held-out", "## Rows that may", "## Rows without", "<!-- end of rows -->\nkept")
    places = [text.index(head) for head in heads]
    assert places == sorted(places)
    for row in by_row.values():
        assert (
            text.count(f"`{row.command}` |")
            == sum(other.use != "apart" and other.command == row.command for other in by_row.values())
            or row.use == "apart"
        ), row.row
    assert text.count("Too large.") == 1 and (tmp_path / "plan_accuracy.svg").stat().st_size > 1000
