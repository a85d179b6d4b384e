"""The parts of the state: what is frozen, what is equal, and how the vector of the update is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chipwise as cw
import tasks
from chipwise.chips.catalogue import named
from chipwise.models.chip_traits import traced_for
from chipwise.run.on import On
from chipwise.run.session import Session
from chipwise.step.flat import Flat
from chipwise.step.freeze import split, whole_params
from chipwise.step.replica import from_sums, summable
from chipwise.step.state import ROLES, TrainState, fingerprint
from refusals import refused
from traffic import compiled, sent_bytes

pytestmark = pytest.mark.as_users_compile


def test_every_part_has_a_role():
    assert set(ROLES) == set(TrainState.__dataclass_fields__)
    assert [name for name, role in ROLES.items() if role.differentiated] == ["params"]
    assert [name for name, role in ROLES.items() if not role.donated] == ["frozen"]


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 6, 8, 12, 24])
def test_equal_state_stays_equal_and_other_state_is_averaged(replicas):
    rng = np.random.default_rng(replicas)
    equal = (rng.standard_normal(2000) * 10.0 ** rng.integers(-30, 30, 2000)).astype(np.float32)
    each = rng.standard_normal((replicas, 7)).astype(np.float32)
    old = {"calls": jnp.int32(0), "equal": jnp.asarray(equal), "mean": jnp.zeros(7)}
    parts = [
        summable({"calls": jnp.int32(70_000), "equal": jnp.asarray(equal), "mean": each[r]}, r, replicas)
        for r in range(replicas)
    ]
    summed = [sum(leaves[1:], start=leaves[0]) for leaves in zip(*parts, strict=True)]
    # In the order of the tree, which is what `from_sums` knows
    tree = [_tree(list(leaves)) for leaves in zip(*parts, strict=True)]
    assert len(summed) == len(tree)
    new = from_sums(old, tree, replicas)
    np.testing.assert_array_equal(np.asarray(new["equal"]), equal)
    np.testing.assert_allclose(new["mean"], each.mean(axis=0), rtol=2e-6, atol=2e-7)
    assert new["calls"] == 70_000


def _tree(parts):
    if len(parts) == 1:
        return parts[0]
    middle = (len(parts) + 1) // 2
    return _tree(parts[:middle]) + _tree(parts[middle:])


@given(st.lists(st.integers(0, 9), min_size=0, max_size=5), st.integers(1, 9))
def test_a_tree_and_its_vector(sizes, chunks):
    tree = {str(i): np.arange(n, dtype=np.float32) + 10 * i for i, n in enumerate(sizes)}
    flat = Flat(tree, chunks)
    vector = np.asarray(flat.pack(tree))
    assert flat.used == sum(sizes) and vector.shape == (flat.size,) == (flat.chunk * chunks,)
    assert flat.size - flat.used < max(chunks, 1) and not vector[flat.used :].any()
    for name, leaf in flat.unpack(vector).items():
        np.testing.assert_array_equal(leaf, tree[name])


@pytest.mark.parametrize(("first", "apart"), [(2, 2), (7, 2), (8, 0), (16, 0)])
def test_on_gpus_matrices_off_sixteen_bytes_of_bfloat16_are_cut_out_first(first, apart):
    flat = Flat({"a": jnp.zeros(first), "b": jnp.zeros((8, 4)), "c": jnp.zeros(8), "d": jnp.zeros((4, 2))})
    for chip, expected in {"h100": apart, "v4": 2}.items():
        with traced_for(named(chip)):
            traced = str(jax.make_jaxpr(lambda v: flat.unpack(v))(jnp.zeros(flat.size)))
        assert traced.count("optimization_barrier") == expected


def test_narrow_leaves_keep_their_type_and_are_wide_in_the_vector():
    tree = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones((2, 2))}
    flat = Flat(tree, 2)
    assert flat.rounds and flat.pack(tree).dtype == jnp.float32
    assert [leaf.dtype for leaf in jax.tree.leaves(flat.unpack(flat.pack(tree)))] == [
        jnp.bfloat16,
        jnp.float32,
    ]
    assert not flat.widened().rounds


def test_frozen_and_trained_are_two_halves_of_one_tree():
    params = {"backbone": {"w": 1, "b": 2}, "head": {"w": 3}}
    trained, frozen = split(params, ("backbone/*",))
    assert jax.tree.leaves(trained) == [3] and jax.tree.leaves(frozen) == [2, 1]
    assert whole_params(trained, frozen) == params
    assert split(params, ()) == (params, None)
    with refused(cw.errors.RecipeError, "frozen-matches-nothing", pattern="backbon/*", near="backbone/w"):
        split(params, ("backbon/*",))
    with refused(cw.errors.RecipeError, "all-frozen", count=3):
        split(params, ("*",))
    with refused(cw.errors.RecipeError, "wrong-kind", frozen="backbone/*"):
        tasks.quick(frozen="backbone/*")


LARGE = 250_000  # beside 304 values that are trained


def _headed(steps, large=LARGE):
    def init(key):
        backbone = jax.random.normal(key, (100, large // 100))
        return {"backbone": {"w": backbone}, "head": {"w": jnp.zeros((100, 3)), "b": jnp.zeros(4)}}, {}

    def loss(params, state, batch, key, train):
        features = batch["x"] @ params["backbone"]["w"][:, :100]
        logits = features @ params["head"]["w"] + params["head"]["b"][None, :3]
        values = cw.losses.softmax_cross_entropy(logits, batch["label"])
        return {"loss": cw.Sum.of(values)}, state

    rng = np.random.default_rng(0)
    data = cw.Arrays(
        x=rng.standard_normal((64, 100)).astype(np.float32), label=rng.integers(0, 3, 64).astype(np.int32)
    )
    task = cw.Task(init=init, loss=loss, train=data)
    return cw.Recipe(
        task=task, batch=16, duration=f"{steps}st", optimizer=cw.adamw(lr=0.01), frozen=("backbone/*",)
    )


@pytest.mark.parametrize(
    "steps,large,counts",
    [(20, LARGE, (1, 2)), pytest.param(1000, 25_000_000, (2,), marks=pytest.mark.slow)],
)
def test_a_frozen_part_is_not_summed_not_moved_and_not_in_the_optimizer(steps, large, counts):
    recipe = _headed(steps, large)
    prints = set()
    for devices in counts:
        with Session(recipe, On(devices=devices)) as session:
            session.begin()
            before = session.snapshot()
            session.advance(session.total)
            after = session.snapshot()
            size = session.programs.functions.updates.size  # values that each replica hands to the sum
        assert before.frozen["backbone"]["w"].size == large
        np.testing.assert_array_equal(before.frozen["backbone"]["w"], after.frozen["backbone"]["w"])
        assert sum(x.size for x in jax.tree.leaves(after.optimizer)) < 1000
        assert fingerprint(before.params) != fingerprint(after.params)
        prints.add(fingerprint(after.params))
        if devices > 1:
            _, reduce = compiled(devices, 8 // devices, size)
            assert 0 < sent_bytes(reduce.as_text(), devices) < 4 * 2 * 400
    assert len(prints) == 1


def test_frozen_parameters_come_back_and_are_saved(tmp_path):
    recipe = _headed(6)
    result = cw.fit(recipe, tmp_path, on=cw.On(devices=1), progress="none", eval_every=None)
    assert set(result.params) == {"backbone", "head"} and result.devices["parameters"] == LARGE + 304
    restored = cw.run.restore_run(recipe, tmp_path)
    np.testing.assert_array_equal(restored.params["backbone"]["w"], result.params["backbone"]["w"])
    assert fingerprint(restored.params) == result.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        cw.sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
        cw.adamw(lr=0.01, weight_decay=0.1),
        cw.adamw(lr=0.01, weight_decay=0.1, clip=0.5),
    ],
)
@pytest.mark.parametrize("pieces", [2, 4, 7, 100])
def test_where_the_vector_is_cut_changes_no_bit(optimizer, pieces):
    rng = np.random.default_rng(pieces)
    n = 7001
    params, grads = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    decaying = rng.random(n) < 0.5
    scalars = {name: np.float32(schedule.value) for name, schedule in optimizer.hyper.items()}

    @jax.jit
    def update(part, grad, state, mask, norm):
        return optimizer.update(grad, state, part, scalars, decaying=mask, norm=norm)

    def steps(part, grad, mask):
        state = optimizer.init(part)
        for i in range(3):
            part, state = update(part, grad * np.float32(i + 1), state, mask, np.float32(2.0))
        return np.asarray(part)

    whole = steps(params, grads, decaying)
    cut = [
        steps(*piece)
        for piece in zip(*(np.array_split(x, pieces) for x in (params, grads, decaying)), strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(cut), whole)


@pytest.mark.slow
def test_an_optimizer_that_looks_at_whole_leaves_gets_the_tree_and_says_so():
    import optax

    recipe = tasks.quick(optimizer=cw.from_optax(optax.lamb, learning_rate=0.01), duration="4st")
    prints = set()
    for devices in (1, 4):
        with Session(recipe, On(devices=devices)) as session:
            assert session.describe()["update"] == "whole"
            session.begin()
            session.advance(session.total)
            prints.add(fingerprint(session.snapshot().params))
    assert len(prints) == 1
    assert Session(tasks.quick(), On(devices=1)).describe()["update"] == "flat"


def test_a_tpu_slices_a_leaf_before_it_rounds_and_reshapes_it():
    for tree, kept in (
        ({"w": jnp.zeros((500, 2))}, 1),
        ({"w": jnp.zeros((100, 10)), "b": jnp.zeros(2)}, 1),
        ({"b": jnp.zeros(2)}, 0),
    ):
        flat = Flat(tree)
        vector = jnp.arange(flat.size, dtype=jnp.float32)
        with traced_for(named("v4")):
            traced = str(jax.make_jaxpr(flat.unpack)(vector))
        assert traced.count("optimization_barrier") == kept
        assert "optimization_barrier" not in str(jax.make_jaxpr(lambda v, f=flat: f.unpack(v))(vector))
        unpacked = [leaf.reshape(-1) for leaf in jax.tree.leaves(flat.unpack(vector))]
        assert jnp.array_equal(jnp.concatenate(unpacked), vector)
