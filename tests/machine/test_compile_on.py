"""A program is compiled for one device; others read the same code, with what it may overwrite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import monitoring
from jax.experimental.compilation_cache import compilation_cache

from chipwise.machine.compilation_cache import compile_on
from chipwise.machine.detect import detect
from chipwise.run.placement import Placement

pytestmark = pytest.mark.as_users_compile


def program(x, y):
    for _ in range(300):  # so that compiling takes longer than what is worth storing
        x = jnp.sin(x @ x) * 2.5
    return x + y, jnp.sum(x)


@pytest.fixture
def found():
    """What JAX finds in its cache, which is not set."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # or JAX goes on with the one that it has opened
    events = []

    def noted(event, **more):
        events.append(event)

    monitoring.register_event_listener(noted)
    yield events
    monitoring.unregister_event_listener(noted)
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.mark.slow
def test_other_devices_read_what_one_compiled(found):
    groups = Placement(detect(3)).local
    x = np.random.default_rng(0).standard_normal((33, 33)).astype(np.float32)
    jitted = jax.jit(program, donate_argnums=1)

    def placed(g):
        return groups[g].put((x, x.T.copy()))

    ((first, *others),) = compile_on(len(groups), 1, lambda _, g: jitted.lower(*placed(g)))
    assert found.count("/jax/compilation_cache/cache_hits") == 2
    assert jax.config.jax_compilation_cache_dir is None
    expected = first(*placed(0))
    for g, other in enumerate(others, 1):
        arguments = placed(g)
        for mine, theirs in zip(other(*arguments), expected, strict=True):
            assert mine.devices() == {groups[g].device}
            np.testing.assert_array_equal(mine, theirs)
        assert arguments[1].is_deleted() and not arguments[0].is_deleted()
