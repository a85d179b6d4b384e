import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from chipwise.step.layout import Layout, Ranges, tree_sum
from chipwise.step.reduce import AXIS, gatherer, reducer, scatterer
from traffic import compiled, least, sent_bytes

pytestmark = pytest.mark.as_users_compile


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_traffic_is_that_of_a_plain_all_reduce(devices):
    n = 250_698
    mesh, ours = compiled(devices, 8 // devices, n)
    plain = jax.jit(
        jax.shard_map(lambda v: jax.lax.psum(v, AXIS), mesh=mesh, in_specs=P(AXIS), out_specs=P())
    )
    sharding = NamedSharding(mesh, P(AXIS))
    reference = plain.lower(jax.ShapeDtypeStruct((devices * n,), jnp.float32, sharding=sharding)).compile()
    expected = 2 * (devices - 1) / devices * 4 * n
    assert sent_bytes(reference.as_text(), devices) == pytest.approx(expected)
    assert 0 < sent_bytes(ours.as_text(), devices) <= 1.25 * expected


@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_any_length_adds_in_tree_order(devices, n):
    rng = np.random.default_rng(n)
    parts = (rng.standard_normal((8, n)) * 10.0 ** rng.integers(-6, 6, (8, 1))).astype(np.float32)
    a = [parts[i] for i in range(8)]
    expected = ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))
    mesh = Mesh(np.asarray(jax.devices()[:devices]), (AXIS,))
    each = 8 // devices
    sharding = NamedSharding(mesh, P(AXIS))
    vectors = [jax.device_put(parts[local::each].reshape(-1), sharding) for local in range(each)]
    np.testing.assert_array_equal(np.asarray(reducer(mesh)(vectors)), expected)


@pytest.mark.parametrize("n", [1, 8, 1000, 3 * 16384 + 1])
@pytest.mark.parametrize("shares", [(3, 3, 2), (1, 6, 1), (2, 2, 1, 1, 1, 1)])
def test_any_cut_adds_in_tree_order_and_sends_what_is_counted(shares, n):
    rng, devices = np.random.default_rng(n), len(shares)
    parts = (rng.standard_normal((8, n)) * 10.0 ** rng.integers(-6, 6, (8, 1))).astype(np.float32)
    layout = Layout(8, 8, devices, shares=shares)
    sums = [[tree_sum(parts[a:b], np.add) for a, b in nodes] for nodes in layout.covers]
    mesh = Mesh(np.asarray(jax.devices()[:devices]), (AXIS,))
    sharding = NamedSharding(mesh, P(AXIS))
    junk = np.full(n, np.nan, np.float32)  # instead of nodes that a smaller cover does not have
    vectors = [
        jax.device_put(np.concatenate([(own + [junk] * 8)[k] for own in sums]), sharding)
        for k in range(layout.vectors)
    ]
    program = reducer(mesh, shares=shares)
    np.testing.assert_array_equal(np.asarray(program(vectors)), tree_sum(list(parts), np.add))
    counted = least(devices, n, layout.vectors, bool(shares))
    text = program.lower(vectors).compile().as_text()
    assert counted <= sent_bytes(text, devices) <= (1.1 if n > 1000 else 1) * counted


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("devices, chunks, unit, rest", [(3, 8, 43, 1), (5, 8, 6000, 9), (7, 8, 1, 2)])
@pytest.mark.parametrize("even", [True, False])
def test_windows_of_a_scattered_sum_gather_to_the_whole(devices, chunks, unit, rest, exact, even):
    layout = Layout(8, 8, devices, exact)
    parts = np.random.default_rng(rest).integers(-9, 9, (8, chunks * unit + rest)).astype(np.float32)
    sums = [[parts[a:b].sum(0) for a, b in nodes] for nodes in layout.covers]  # added exactly
    mesh = Mesh(np.asarray(jax.devices()[:devices]), (AXIS,))
    sharding = NamedSharding(mesh, P(AXIS))
    vectors = [
        jax.device_put(np.concatenate([(own + own[:1] * 8)[k] for own in sums]), sharding)
        for k in range(layout.vectors)
    ]
    windows = Ranges.even(chunks, devices, unit)
    if not even:  # one device has nothing
        cut = sorted(np.random.default_rng(rest).integers(0, chunks * unit, devices - 2).tolist())
        windows = Ranges((0, *cut, cut[-1], chunks * unit))
    scattered, beside = scatterer(mesh, windows, exact, layout.shares)(vectors)
    for group, shard in enumerate(scattered.addressable_shards):
        part = slice(windows.start(group), windows.start(group) + windows.part)
        np.testing.assert_array_equal(shard.data, parts.sum(0)[part])
    whole = gatherer(mesh, windows)(scattered)
    np.testing.assert_array_equal(np.concatenate([whole, beside]), parts.sum(0))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("devices, part, rest", [(2, 129, 1), (8, 16384, 9), (2, 16385, 1)])
def test_a_scattered_sum_gathers_to_the_whole(devices, part, rest, exact):
    cut = devices * part
    parts = np.random.default_rng(rest).integers(-9, 9, (8, cut + rest)).astype(np.float32)  # added exactly
    mesh = Mesh(np.asarray(jax.devices()[:devices]), (AXIS,))
    each = 8 // devices
    sharding = NamedSharding(mesh, P(AXIS))
    vectors = [jax.device_put(parts[local::each].reshape(-1), sharding) for local in range(each)]
    scattered, beside = scatterer(mesh, Ranges.even(devices, devices, part), exact)(vectors)
    assert {shard.data.shape for shard in scattered.addressable_shards} == {(cut // devices,)}
    whole = gatherer(mesh, Ranges.even(devices, devices, part))(scattered)
    np.testing.assert_array_equal(np.concatenate([whole, beside]), parts.sum(0))


def test_the_back_end_chooses_the_order_of_a_scattered_sum_unless_it_is_exact():
    mesh = Mesh(np.asarray(jax.devices()[:4]), (AXIS,))
    shape = jax.ShapeDtypeStruct((4 * 2052,), jnp.float32, sharding=NamedSharding(mesh, P(AXIS)))
    windows = Ranges.even(4, 4, 512)
    exact, free = (scatterer(mesh, windows, exact).lower([shape]).as_text() for exact in (True, False))
    assert "all_to_all" in exact and "reduce_scatter" not in exact
    assert "reduce_scatter" in free and "all_to_all" not in free
