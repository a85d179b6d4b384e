"""A program compiled for one device runs on another, with the same bits, what it may overwrite included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import chipwise as cw
import tasks
from chipwise.engine import compile_once


def program(x, y):
    return jnp.sin(x @ x) * 2.5 + y, jnp.sum(x)


def never():
    raise AssertionError("compiled again")


@pytest.fixture(autouse=True)
def without_cache():
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # or JAX goes on with the one that it has opened
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_a_program_that_may_have_come_from_the_cache_is_not_written_out(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert compile_once.on_device(object(), jax.devices()[1], lambda: "compiled") == "compiled"


@pytest.mark.slow
def test_a_step_has_the_same_bits(monkeypatch):
    monkeypatch.setattr(compile_once, "_loaded", spied := Spy(compile_once._loaded))
    prints = [
        cw.fit(
            tasks.recipe(duration="4st", task=tasks.task(eval=None)), on=cw.On(devices=n), progress="none"
        ).fingerprint
        for n in (1, 4)
    ]
    assert prints[0] == prints[1]
    assert spied.returned == 3 * 2  # the replica's program and the update's


class Spy:
    def __init__(self, function):
        self.function, self.returned = function, 0

    def __call__(self, *arguments):
        made = self.function(*arguments)
        self.returned += 1
        return made


def test_it_is_loaded_and_not_compiled_again():
    first, other = jax.devices()[:2]
    x = np.random.default_rng(0).standard_normal((33, 33)).astype(np.float32)

    def placed(device):
        return jax.device_put(x, device), jax.device_put(x.T.copy(), device)

    compiled = jax.jit(program, donate_argnums=1).lower(*placed(first)).compile()
    loaded = compile_once.on_device(compiled, other, never)
    arguments = placed(other)
    for mine, theirs in zip(loaded(*arguments), compiled(*placed(first)), strict=True):
        assert mine.devices() == {other}
        np.testing.assert_array_equal(mine, theirs)
    assert arguments[1].is_deleted() and not arguments[0].is_deleted()


def test_what_cannot_be_loaded_is_compiled():
    assert compile_once.on_device(object(), jax.devices()[1], lambda: "compiled") == "compiled"
