"""Optimizers: PyTorch's updates, decay once, rates that never recompile, values that print and compare."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from chipwise.base.errors import RecipeError
from chipwise.recipe.adaptive import adadelta, adagrad, adamax, asgd, nadam, radam, rmsprop, rprop
from chipwise.recipe.duration import Clock
from chipwise.recipe.optimizers import adam, adamw, decays, from_optax, sgd
from chipwise.recipe.schedules import constant, cosine, one_cycle, warmup
from chipwise.recipe.trust_ratio import lamb, lars
from refusals import refused

CLOCK = Clock(640, 32, 20)
rng = np.random.default_rng(0)
PARAMS = {
    "conv": {"kernel": rng.normal(size=(3, 4)).astype(np.float32), "bias": np.ones(4, np.float32)},
    "scale": np.float32(2.0),
}
GRADS = [jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), PARAMS) for _ in range(20)]
EVERY = [
    sgd(0.1),
    sgd(
        one_cycle(0.4, warmup="25%"),
        momentum=0.9,
        nesterov=True,
        weight_decay=5e-4,
        decay="kernels",
        clip=1.0,
    ),
    sgd(0.1, momentum=0),
    adam(cosine(1e-3)),
    adamw(1e-3, weight_decay=warmup(0.1, "5st")),
    from_optax(optax.lion, learning_rate=cosine(1e-3), b1=0.9),
    lamb(cosine(1e-2), decay="kernels", clip=1.0),
    lars(0.1, weight_decay=1e-3, trust=0.02),
    lars(0.1, momentum=0, stacked=""),
    sgd(0.1, dampening=0.5, maximize=True),
    adam(1e-3, l2=cosine(0.1), decay="kernels", amsgrad=True),
    adamw(1e-3, amsgrad=True, maximize=True),
    adagrad(0.1, lr_decay=0.1, l2=0.1),
    adadelta(cosine(1.0), rho=0.8, weight_decay=0.1),
    rmsprop(0.01, momentum=cosine(0.9), centered=True, eps=1e-3, clip=1.0),
    adamax(0.01, l2=0.1, decay="kernels", maximize=True),
    nadam(cosine(0.01), b1=cosine(0.9), l2=0.1, weight_decay=0.1),
    radam(0.01, b2=0.9),
    asgd(cosine(0.1), lambd=0.1),
    rprop(cosine(0.01), etas=(0.4, 1.3), step_sizes=(1e-3, 0.1)),
]
each = pytest.mark.parametrize("optimizer", EVERY, ids=repr)


def run(optimizer, params=PARAMS, grads=GRADS):
    """The parameters after one compiled update for each gradient, and the number of compilations."""
    traces = []

    @jax.jit
    def step(params, opt_state, grads, hyper):
        traces.append(1)
        return optimizer.update(grads, opt_state, params, hyper)

    params = jax.tree.map(jnp.asarray, params)
    opt_state = optimizer.init(params)
    tables = optimizer.tables(CLOCK)
    for i, grad in enumerate(grads):
        params, opt_state = step(params, opt_state, grad, {k: v[i] for k, v in tables.items()})
    return params, len(traces)


def run_torch(make, tables, decay_kernels_only=False):
    torch = pytest.importorskip("torch")
    leaves = [torch.nn.Parameter(torch.tensor(p)) for p in jax.tree.leaves(PARAMS)]
    groups = [{"params": [leaf]} for leaf in leaves]
    if decay_kernels_only:
        for group, leaf in zip(groups, leaves, strict=True):
            group.update({} if leaf.ndim >= 2 else {"weight_decay": 0.0})
    optimizer = make(torch, groups)
    for i, grads in enumerate(GRADS):
        for leaf, grad in zip(leaves, jax.tree.leaves(grads), strict=True):
            leaf.grad = torch.tensor(grad)
        for group in optimizer.param_groups:
            group["lr"] = float(tables["lr"][i])
            if "momentum" in tables and "momentum" in group:
                group["momentum"] = float(tables["momentum"][i])
        optimizer.step()
    return [leaf.detach().numpy() for leaf in leaves]


def assert_close(tree, leaves):
    for ours, theirs in zip(jax.tree.leaves(tree), leaves, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", ["all", "kernels"])
def test_sgd_equals_torch(nesterov, decay):
    ours = sgd(
        one_cycle(0.4, warmup="25%", start=0.1),
        momentum=one_cycle(0.85, "25%", start=0.95, end=0.95),
        nesterov=nesterov,
        weight_decay=5e-2,
        decay=decay,
    )
    theirs = run_torch(
        lambda torch, groups: torch.optim.SGD(
            groups, lr=1, momentum=0.9, nesterov=nesterov, weight_decay=5e-2
        ),
        ours.tables(CLOCK),
        decay_kernels_only=decay == "kernels",
    )
    assert_close(run(ours)[0], theirs)


def test_sgd_without_momentum_equals_torch():
    ours = sgd(0.1, momentum=0.0, weight_decay=0.1)
    assert set(ours.hyper) == {"lr", "weight_decay"}
    theirs = run_torch(lambda t, g: t.optim.SGD(g, lr=0.1, weight_decay=0.1), ours.tables(CLOCK))
    assert_close(run(ours)[0], theirs)


def test_adam_equals_torch():
    ours = adam(cosine(0.05), b2=0.99)
    theirs = run_torch(lambda t, g: t.optim.Adam(g, betas=(0.9, 0.99)), ours.tables(CLOCK))
    assert_close(run(ours)[0], theirs)


@pytest.mark.parametrize("decay", ["all", "kernels"])
def test_adamw_equals_torch(decay):
    ours = adamw(cosine(0.05), weight_decay=0.1, decay=decay)
    theirs = run_torch(
        lambda t, g: t.optim.AdamW(g, weight_decay=0.1),
        ours.tables(CLOCK),
        decay_kernels_only=decay == "kernels",
    )
    assert_close(run(ours)[0], theirs)


@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_clipping_is_by_the_norm_of_the_whole_gradient(clip):
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(GRADS[0])))
    params, _ = run(sgd(0.1, momentum=0, clip=clip), grads=GRADS[:1])
    expected = jax.tree.map(lambda p, g: p - 0.1 * g * min(1, clip / norm), PARAMS, GRADS[0])
    assert_close(params, jax.tree.leaves(expected))


@pytest.mark.parametrize("make", [sgd, adamw, adagrad, adadelta, rmsprop, adamax, nadam, radam])
def test_decay_is_applied_once_after_the_reduction(make):
    # The mean gradient is zero whatever the number of replicas: all that moves is the decay, lr * wd.
    optimizer = make(0.1, weight_decay=0.5)
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    params, _ = run(optimizer, grads=[zeros])
    assert_close(params, [0.95 * p for p in jax.tree.leaves(PARAMS)])


def test_the_mean_gradient_of_1_or_8_replicas_is_the_same_update():
    replicas = rng.normal(size=(8, 3, 4)).astype(np.float32)
    optimizer = sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.5)
    kernel = {"kernel": PARAMS["conv"]["kernel"]}
    whole, _ = run(optimizer, kernel, [{"kernel": replicas.mean(0)}])
    apart = [optimizer.init(kernel) for _ in replicas]  # every device applies the same reduced gradient
    moved = [
        optimizer.update(
            {"kernel": replicas.sum(0) / 8}, state, kernel, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}
        )
        for state in apart
    ]
    for params, _ in moved:
        assert_close(params, [whole["kernel"]])


@each
def test_rates_are_inputs_so_one_compilation_serves_the_run(optimizer):
    params, traces = run(optimizer)
    assert traces == 1
    assert all(np.isfinite(p).all() for p in jax.tree.leaves(params))
    assert not any(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (params, PARAMS)), strict=True))


@pytest.mark.slow
@each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.drawn(share=0.25)
def test_shapes_dtypes_and_structure_are_kept(optimizer, dtype):
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), PARAMS)
    state = optimizer.init(params)
    hyper = {name: table[3] for name, table in optimizer.tables(CLOCK).items()}
    grads = jax.tree.map(jnp.asarray, GRADS[0])
    new_params, new_state = optimizer.update(grads, state, params, hyper)

    def shapes(tree):
        return jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), tree)

    assert shapes(new_params) == shapes(params) and shapes(new_state) == shapes(state)
    assert jax.eval_shape(optimizer.init, params) == jax.eval_shape(lambda: state)
    floats = [a for a in jax.tree.leaves(state) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert all(a.dtype == jnp.float32 and np.isfinite(a).all() for a in floats)


def test_narrow_parameters_are_updated_in_float32():
    # 1 + 2^-9 cannot be told from 1 in bfloat16, whose velocity would stand still; float32's adds up.
    params, grads = {"w": jnp.ones(4, "bfloat16")}, {"w": jnp.full(4, -(2.0**-9), "bfloat16")}
    optimizer, hyper = sgd(1.0, momentum=0.5), {"lr": 1.0, "momentum": 0.5}
    state = optimizer.init(params)
    for _ in range(3):
        _, state = optimizer.update(grads, state, params, hyper)
    assert jax.tree.leaves(state)[0].tolist() == [-(2.0**-9) * 1.75] * 4


@each
def test_values_print_as_typed_and_compare(optimizer):
    if not dataclasses.is_dataclass(optimizer) or type(optimizer).__name__.startswith("_"):
        assert repr(optimizer).startswith("from_optax(optax.") and "learning_rate=cosine(" in repr(optimizer)
        assert optimizer == from_optax(optax.lion, learning_rate=cosine(1e-3), b1=0.9)
        assert optimizer.lr_name == "learning_rate"
        return
    assert eval(repr(optimizer)) == optimizer and hash(optimizer) == hash(eval(repr(optimizer)))
    assert dataclasses.replace(optimizer, lr=0.5) != optimizer
    assert optimizer.lr_name == "lr" and "lr" in optimizer.hyper
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.lr = 1


@each
def test_descriptions_are_plain_json_without_addresses(optimizer):
    described = optimizer.describe()
    text = json.dumps(described, allow_nan=False)
    assert json.loads(text) == described and "0x" not in text
    assert described["optimizer"] in repr(optimizer)


def test_what_is_described():
    assert sgd(one_cycle(0.4, warmup="5ep"), weight_decay=np.float32(0.5), decay=decays).describe() == {
        "optimizer": "sgd",
        "lr": {
            "schedule": "one_cycle",
            "peak": 0.4,
            "warmup": "5ep",
            "start": 0.0,
            "end": 0.0,
            "shape": "linear",
        },
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 0.5,
        "decay": "chipwise.recipe.optimizers.decays",
        "clip": None,
    }


def test_settings_that_came_later_are_described_where_they_are_set():
    """Runs that were stored before are of the same recipe."""
    assert not {"l2", "decay", "amsgrad", "maximize"} & adam(0.1).describe().keys()
    assert not {"amsgrad", "maximize"} & adamw(0.1).describe().keys()
    set_ = adam(0.1, l2=cosine(0.1), amsgrad=True).describe()
    assert set_["l2"]["schedule"] == "cosine" and set_["amsgrad"] is True and "maximize" not in set_
    assert sgd(0.1, dampening=0.5).describe()["dampening"] == 0.5


def test_which_leaves_decay():
    assert jax.tree.leaves(decays(PARAMS, "all")) == [True, True, True]
    assert decays(PARAMS, "kernels") == {"conv": {"kernel": True, "bias": False}, "scale": False}
    seen = []
    decays(PARAMS, lambda path, leaf: seen.append((path, leaf.shape)) is None)
    assert seen == [("conv/bias", (4,)), ("conv/kernel", (3, 4)), ("scale", ())]
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    params, _ = run(sgd(0.1, weight_decay=0.5, decay=lambda path, leaf: "bias" in path), grads=[zeros])
    np.testing.assert_array_equal(params["conv"]["kernel"], PARAMS["conv"]["kernel"])
    np.testing.assert_allclose(params["conv"]["bias"], 0.95)
    with refused(RecipeError, "decay-answer", path="conv/bias", value="yes"):
        decays(PARAMS, lambda path, leaf: "yes")


def test_settings_of_zero_are_not_in_the_program():
    assert set(sgd(0.1, momentum=0.0, weight_decay=constant(0)).hyper) == {"lr"}
    assert jax.tree.leaves(sgd(0.1, momentum=0.0).init(PARAMS)) == []
    assert set(sgd(0.0).hyper) == {"lr", "momentum"}
    plain, _ = run(sgd(0.1, momentum=0.9))
    zeroed, _ = run(sgd(0.1, momentum=0.9, weight_decay=0.0))
    jax.tree.map(np.testing.assert_array_equal, plain, zeroed)


def test_other_optimizers_come_from_optax():
    ours, _ = run(from_optax(functools.partial(optax.sgd, nesterov=True), learning_rate=0.1, momentum=0.9))
    assert_close(ours, jax.tree.leaves(run(sgd(0.1, nesterov=True))[0]))
    with refused(RecipeError, "optax-setting-fixed", nesterov=True):
        from_optax(optax.sgd, learning_rate=0.1, nesterov=True)
    with refused(
        RecipeError, "optax-setting-fixed", ns_steps=3
    ):  # it would be traced as a number that varies
        from_optax(optax.contrib.muon, learning_rate=1, ns_steps=3)
    with refused(RecipeError, "optax-maker-expected"):
        from_optax(optax.lion)
    with refused(RecipeError, "no-rate", names=["step_size"]):
        _ = from_optax(optax.scale, step_size=0.1).lr_name
    # A starting value cannot be scheduled: the state is NaN, which a run reports, and not a made-up number.
    state = from_optax(optax.adagrad, learning_rate=0.1, initial_accumulator_value=cosine(0.1)).init(
        {"w": jnp.ones(2)}
    )
    assert np.isnan(jax.tree.leaves(state)[0]).all()


def on_a_plateau(learning_rate):
    return optax.chain(optax.sgd(learning_rate), optax.contrib.reduce_on_plateau())


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (on_a_plateau, ["value"]),
        (optax.polyak_sgd, ["value"]),
        (optax.lbfgs, ["value", "grad", "value_fn"]),
    ],
)
def test_an_optimizer_that_reads_the_loss_is_refused_by_name(make, names):
    hyper = {"scaling" if make is optax.polyak_sgd else "learning_rate": 0.1}
    with refused(RecipeError, "optax-asks-for-more", names=names):
        run(from_optax(make, **hyper))


def test_a_mistake_of_an_optimizers_own_stays_as_it_was():
    def wrong(updates, state, params):
        raise TypeError("of its own")

    def make(learning_rate):
        return optax.GradientTransformation(lambda params: (), wrong)

    with pytest.raises(TypeError, match="of its own"):
        run(from_optax(make, learning_rate=0.1))


def test_warnings_name_the_setting():
    (warning,) = sgd(one_cycle(0.4, warmup="48ep")).warnings(CLOCK)
    assert (warning.code, warning["setting"]) == ("peak-never-reached", "lr")


@pytest.mark.parametrize(
    ("make", "code", "facts"),
    [
        (lambda: sgd("0.1"), "not-a-schedule", {"what": "sgd's lr", "value": "0.1"}),
        (lambda: sgd(-0.1), "setting-below-zero", {"name": "lr", "value": -0.1}),
        (lambda: sgd(0.1, momentum=1.0), "average-range", {"name": "momentum", "value": 1.0}),
        (lambda: sgd(0.1, momentum=0, nesterov=True), "nesterov-without-momentum", {}),
        (lambda: sgd(0.1, weight_decay=-1), "setting-below-zero", {"name": "weight_decay"}),
        (lambda: sgd(0.1, decay="kernel"), "decay-unknown", {"decay": "kernel"}),
        (lambda: sgd(0.1, clip=0), "clip-not-above-zero", {"clip": 0}),
        (lambda: adam(0.1, b2=1.0), "average-range", {"what": "adam's b2", "name": "b2"}),
        (lambda: adamw(0.1, weight_decay=None), "not-a-schedule", {"what": "adamw's weight_decay"}),
        (lambda: lars(0.1, trust=-1), "setting-below-zero", {"what": "lars's trust", "name": "trust"}),
        (lambda: lamb(0.1, b1=1.0), "average-range", {"what": "lamb's b1", "name": "b1"}),
        (lambda: rmsprop(0.1, rho=1.0), "average-range", {"what": "rmsprop's rho", "name": "rho"}),
        (lambda: nadam(0.1, l2=-1), "setting-below-zero", {"what": "nadam's l2", "name": "l2"}),
        (lambda: adagrad(0.1, initial_accumulator_value=-1), "setting-below-zero", {"value": -1}),
        (lambda: adagrad(0.1, lr_decay=-1), "setting-below-zero", {"name": "lr_decay"}),
        (lambda: nadam(0.1, momentum_decay=-100), "setting-below-zero", {"name": "momentum_decay"}),
        (lambda: asgd(0.1, lambd=-1), "setting-below-zero", {"name": "lambd"}),
        (lambda: asgd(0.1, alpha=np.inf), "not-a-schedule", {"what": "asgd's alpha"}),
        (lambda: sgd(0.1, dampening=np.nan), "not-a-schedule", {"what": "sgd's dampening"}),
        (lambda: sgd(0.1, dampening=1.5), "average-range", {"name": "dampening", "value": 1.5}),
        (lambda: sgd(0.1, nesterov=True, dampening=0.5), "nesterov-with-dampening", {"value": 0.5}),
        (lambda: rprop(0.1, etas=(1.2, 0.5)), "rprop-etas", {"value": (1.2, 0.5)}),
        (lambda: rprop(0.1, etas=(0.5, np.inf)), "rprop-etas", {}),
        (lambda: rprop(0.1, step_sizes=(1, 0.1)), "rprop-step-sizes", {"value": (1, 0.1)}),
        (lambda: rprop(0.1, step_sizes=(np.nan, 0.1)), "rprop-step-sizes", {}),
        (lambda: sgd(0.1).replace(rate=1), "no-such-setting", {"name": "rate", "optimizer": "sgd"}),
        (
            lambda: sgd(0.1).update(GRADS[0], sgd(0.1).init(PARAMS), PARAMS, {"lr": 0.1}),
            "hyperparameters-differ",
            {"value": ["lr"]},
        ),
        (
            lambda: sgd(0.1, 0).update(GRADS[0], sgd(0.1, 0).init(PARAMS), PARAMS, {"lr": np.ones(3)}),
            "hyperparameter-shape",
            {"name": "lr", "value": (3,)},
        ),
        (lambda: sgd(0.1).init({"steps": np.int32(3)}), "parameters-without-gradient", {"dtypes": ["int32"]}),
    ],
)
def test_mistakes_are_named(make, code, facts):
    with refused(RecipeError, code, **facts):
        make()


@each
def test_every_optimizer_has_settings_that_can_be_replaced(optimizer):
    name = optimizer.lr_name
    assert optimizer.replace(**optimizer.settings) == optimizer
    changed = optimizer.replace(**{name: 0.5})
    assert changed.settings == optimizer.settings | {name: 0.5} and type(changed) is type(optimizer)


@each
def test_an_optimizer_held_after_its_run_has_the_same_program_and_state(optimizer):
    held, longer = optimizer.held(CLOCK), Clock(640, 32, 10**8)
    before, after = optimizer.tables(CLOCK), held.tables(longer, 0, 25)
    assert before.keys() == after.keys()
    for name, table in before.items():
        assert after[name][:20].tobytes() == table.tobytes() and (after[name][20:] == table[-1]).all()
    jax.tree.map(np.testing.assert_array_equal, held.init(PARAMS), optimizer.init(PARAMS))


def test_which_optimizers_move_each_value_by_itself():
    assert all(o.elementwise for o in (sgd(0.1), adam(0.1), adamw(0.1, decay="kernels", clip=1.0)))
    assert not from_optax(optax.lamb, learning_rate=0.1).elementwise
    assert from_optax(optax.lion, elementwise=True, learning_rate=0.1).elementwise
    assert not any(o.elementwise for o in (lamb(0.1), lars(0.1)))
