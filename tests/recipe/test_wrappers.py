"""An optimizer around another: groups of parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.recipe.duration import Clock
from chipwise.run.session import Session
from chipwise.step.state import fingerprint
from refusals import refused

CLOCK = Clock(examples=100, batch=10, total=20)


def params():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"norm": {"bias": (3,)}, "conv": {"kernel": (2, 3)}, "out": {"bias": (2,)}}
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    drawn = [jax.random.normal(key, shape) for key, shape in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def run(optimizer, p, steps=6):
    """`p` after so many steps of made-up gradients."""
    state, tables = optimizer.init(p), optimizer.tables(CLOCK)
    for step in range(steps):
        grads = jax.tree.map(lambda x, s=step: jnp.sin(x + s), p)
        hyper = {name: table[step] for name, table in tables.items()}
        p, state = optimizer.update(grads, state, p, hyper)
    return p


@pytest.mark.slow
@pytest.mark.parametrize("make", [cw.sgd, cw.adamw])
def test_a_group_is_an_optimizer_of_its_own(make):
    """Its parameters move as if they alone were trained with its numbers, the others as without it."""
    several = cw.recipe.grouped(
        make(lr=0.1, weight_decay=0.01), {"*/bias": {"lr": 64, "weight_decay": 1 / 64}}
    )
    moved = run(several, params())
    of_group = run(make(lr=6.4, weight_decay=0.01 / 64), params())
    others = run(make(lr=0.1, weight_decay=0.01), params())
    for name, expected in (("norm", of_group), ("out", of_group), ("conv", others)):
        for ours, theirs in zip(jax.tree.leaves(moved[name]), jax.tree.leaves(expected[name]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, factors",
    [
        (cw.recipe.nadam, {"lr": 0.5, "b1": 0.9}),
        (cw.recipe.radam, {"b1": 0.9, "b2": 0.9}),
        (cw.recipe.asgd, {"lr": 0.5}),
        (cw.recipe.rprop, {"lr": 0.5}),
    ],
)
def test_what_values_share_is_that_of_the_group(make, factors):
    """Such as the product of momenta of NAdam."""
    several = cw.recipe.grouped(make(lr=0.1), {"*/bias": factors})
    own = {name: make(lr=0.1).settings[name] * factor for name, factor in factors.items()}
    moved, of_group = run(several, params(), 12), run(make(**{"lr": 0.1, **own}), params(), 12)
    others = run(make(lr=0.1), params(), 12)
    np.testing.assert_allclose(moved["norm"]["bias"], of_group["norm"]["bias"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(moved["conv"]["kernel"], others["conv"]["kernel"], rtol=1e-5, atol=1e-6)


def test_the_first_pattern_that_fits_counts():
    optimizer = cw.recipe.grouped(cw.sgd(lr=0.1), {"norm/*": {"lr": 2}, "*/bias": {"lr": 3}})
    numbers = optimizer.members(params())
    assert numbers == {"norm": {"bias": 0}, "conv": {"kernel": -1}, "out": {"bias": 1}}


def test_a_factor_may_be_a_schedule():
    optimizer = cw.recipe.grouped(
        cw.sgd(lr=0.1, momentum=0), {"norm/bias": {"lr": cw.schedules.piecewise({"0st": 1, "2st": 0})}}
    )
    start = params()
    after = [run(optimizer, start, steps)["norm"]["bias"] for steps in (1, 2, 5)]
    assert not np.array_equal(after[0], after[1])
    np.testing.assert_array_equal(after[1], after[2])


def test_groups_keep_the_decay_of_kernels_apart():
    optimizer = cw.recipe.grouped(cw.sgd(lr=0.1, weight_decay=0.5, decay="kernels"), {"norm/bias": {"lr": 2}})
    plain = cw.sgd(lr=0.2)
    np.testing.assert_allclose(
        run(optimizer, params())["norm"]["bias"], run(plain, params())["norm"]["bias"], rtol=1e-6
    )


def around(recipe):
    optimizer = cw.recipe.grouped(cw.sgd(lr=0.1), {"*": {"lr": 0.5}})
    return dataclasses.replace(recipe, optimizer=optimizer)


def trained(recipe, devices=1):
    with Session(recipe, cw.On(devices=devices)) as session:
        session.begin()
        session.advance(session.total)
        return fingerprint(session.snapshot().params)


@pytest.mark.slow
def test_on_the_flat_vector_it_is_the_optimizer_of_the_tree():
    """A group of everything at half the rate is half the rate; on 1 and 2 devices alike."""
    recipe = tasks.recipe(duration="5st", replicas=2)
    of_half = dataclasses.replace(recipe, optimizer=cw.sgd(lr=0.05))
    assert trained(around(recipe)) == trained(of_half)
    assert trained(around(recipe), 2) == trained(around(recipe))


def test_settings_are_set_as_those_of_the_inner_one():
    optimizer = cw.recipe.grouped(cw.sgd(lr=0.1), {"*": {"lr": 2}})
    changed = optimizer.replace(lr=0.2)
    assert changed.settings["lr"] == 0.2 and changed.inner.lr == 0.2
    assert optimizer.describe()["optimizer"] == "grouped(sgd)"
    assert optimizer.describe()["lr of *"] == 2
    assert optimizer.replace(**{"lr of *": 3}).groups == (("*", (("lr", 3),)),)
    assert optimizer.rate_power == 1 and optimizer.lr_name == "lr"
    held = optimizer.held(CLOCK)
    np.testing.assert_array_equal(held.tables(CLOCK)["lr"], optimizer.tables(CLOCK)["lr"])


@pytest.mark.parametrize(
    "make, code",
    [
        (lambda: cw.recipe.grouped(0.1, {"*": {"lr": 2}}), "wrong-kind"),
        (
            lambda: cw.recipe.grouped(cw.from_optax(_lamb, learning_rate=0.1), {"*": {"lr": 2}}),
            "optimizer-not-elementwise",
        ),
        (
            lambda: cw.recipe.grouped(
                cw.recipe.grouped(cw.sgd(lr=0.1), {"norm/*": {"lr": 2}}), {"*": {"lr": 2}}
            ),
            "groups-in-groups",
        ),
        (
            lambda: cw.recipe.layerwise(cw.recipe.layerwise(cw.sgd(lr=0.1), ["norm/*"]), ["out/*"]),
            "groups-in-groups",
        ),
        (lambda: cw.recipe.grouped(cw.sgd(lr=0.1), {}), "groups-expected"),
        (lambda: cw.recipe.grouped(cw.sgd(lr=0.1), {"*": {}}), "groups-expected"),
        (lambda: cw.recipe.grouped(cw.sgd(lr=0.1), 3), "groups-expected"),
        (lambda: cw.recipe.grouped(cw.sgd(lr=0.1), {"*": {"rate": 2}}), "group-setting"),
        (lambda: cw.recipe.grouped(cw.sgd(lr=0.1), {"*": {"lr": -1}}), "group-factor"),
        (
            lambda: cw.recipe.grouped(cw.sgd(lr=0.1), {"norms": {"lr": 2}}).members(params()),
            "group-matches-nothing",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, code):
    with refused(cw.errors.RecipeError, code):
        make()


def _lamb(learning_rate):
    import optax

    return optax.lamb(learning_rate)


def test_a_recipe_moves_to_another_batch_and_length_with_its_groups():
    factor = cw.schedules.piecewise({"0st": 1.0, "2ep": 0.0})
    inner = cw.sgd(lr=0.1, weight_decay=0.01)
    optimizer = cw.recipe.grouped(inner, {"*": {"lr": factor}})
    recipe = dataclasses.replace(tasks.recipe(duration="4ep"), optimizer=optimizer)
    moved = cw.transfer(recipe, batch=2 * recipe.batch).recipe.optimizer
    assert moved.settings["lr"] == pytest.approx(0.2) and moved.settings["lr of *"] == factor
    assert cw.check(recipe) is not None


def test_lower_layers_have_lower_rates_and_begin_later():
    inner = cw.sgd(lr=1.0, momentum=0)
    optimizer = cw.recipe.layerwise(inner, [("norm/*",), "conv/*"], 0.5, unfreeze="2st")
    start, grads = params(), jax.tree.map(jnp.ones_like, params())
    p, state, tables = start, optimizer.init(start), optimizer.tables(CLOCK)
    for step in range(5):
        hyper = {name: table[step] for name, table in tables.items()}
        p, state = optimizer.update(grads, state, p, hyper)
    moved = {name: float((start[name][k] - p[name][k]).mean()) for name, k in (
        ("norm", "bias"), ("conv", "kernel"), ("out", "bias")
    )}  # fmt: skip
    assert moved == pytest.approx(
        {"norm": 0.25, "conv": 3 * 0.5, "out": 5}, abs=1e-5
    )  # from steps 4, 2 and 0
    first = run(optimizer, start, steps=2)
    assert np.array_equal(first["conv"]["kernel"], start["conv"]["kernel"])


@pytest.mark.parametrize("kind", ["sgd", "adamw", "rprop", "asgd", "nadam", "rmsprop"])
def test_a_layer_that_has_not_begun_is_not_updated(kind):
    inner = getattr(cw.recipe, kind)(lr=0.1)
    begins = cw.recipe.layerwise(inner, ["norm/*", "conv/*"], 0.5, unfreeze="6st")
    start = params()
    moved = {steps: run(begins, start, steps) for steps in (6, 12, 14)}
    np.testing.assert_array_equal(moved[6]["conv"]["kernel"], start["conv"]["kernel"])
    np.testing.assert_array_equal(moved[12]["norm"]["bias"], start["norm"]["bias"])
    for layer, leaf in (("conv", "kernel"), ("norm", "bias")):
        assert np.abs(moved[14][layer][leaf] - start[layer][leaf]).max() > 1e-3
    np.testing.assert_allclose(
        moved[14]["out"]["bias"], run(inner, start, 14)["out"]["bias"], rtol=1e-6, atol=1e-6
    )


def test_rows_of_stacked_arrays_are_groups():
    p = {"stack": {"kernel": jnp.ones((3, 2, 2)), "bias": jnp.ones((3, 2))}, "head": jnp.ones(2)}
    optimizer = cw.recipe.layerwise(cw.sgd(lr=1.0, momentum=0), [f"stack/*#{i}" for i in range(3)], 0.5)
    numbers = optimizer.members(p)
    assert numbers["stack"]["kernel"][:, 0, 0].tolist() == [2, 1, 0] and numbers["head"] == -1
    hyper = {name: table[0] for name, table in optimizer.tables(CLOCK).items()}
    moved, _ = optimizer.update(jax.tree.map(jnp.ones_like, p), optimizer.init(p), p, hyper)
    np.testing.assert_allclose(1 - moved["stack"]["bias"][:, 1], [0.125, 0.25, 0.5], rtol=1e-6)
    np.testing.assert_allclose(1 - moved["stack"]["kernel"][:, 0, 1], [0.125, 0.25, 0.5], rtol=1e-6)
    with refused(cw.errors.RecipeError, "group-matches-nothing", name="stack/*#3"):
        cw.recipe.grouped(cw.sgd(lr=1.0), {"stack/*#3": {"lr": 0}}).members(p)


@pytest.mark.slow
def test_rows_are_the_same_on_1_and_2_devices():
    """In the step, where they lie in a vector."""
    optimizer = cw.recipe.layerwise(cw.sgd(lr=0.1), ["w#0", ("w#1", "scale")], 0.5, unfreeze="50%")
    recipe = tasks.recipe(optimizer=optimizer, duration="4st")
    results = [cw.fit(recipe, on=cw.On(devices=n), progress="none", eval_every=None) for n in (1, 2)]
    assert len({result.fingerprint for result in results}) == 1
    with Session(recipe, cw.On(devices=1)) as session:
        session.begin()
        first = session.snapshot().params
    last = results[0].params
    assert np.array_equal(first["w"][0], last["w"][0])  # its turn would come after the run
    assert not np.array_equal(first["w"][1], last["w"][1]) and not np.array_equal(first["w"][2], last["w"][2])


@pytest.mark.parametrize(
    ("layers", "more", "code"),
    [
        ([], {}, "layerwise-layers"),
        ([()], {}, "layerwise-layers"),
        (["w"], {"factor": 0.0}, "layerwise-layers"),
        (["w"], {"unfreeze": "0ep"}, "layerwise-unfreeze"),
    ],
)
def test_mistakes_of_layers_are_one_line(layers, more, code):
    with refused(cw.errors.RecipeError, code):
        cw.recipe.layerwise(cw.sgd(lr=0.1), layers, **more)
