"""What a process has set changes no bit: JAX's settings are fixed while chipwise computes, or refused."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import chipwise as cw
import tasks
from chipwise.machine.arithmetic import settings, versions

pytestmark = pytest.mark.as_users_compile

PROGRAM = """
import json, jax, numpy as np
import chipwise as cw
import tasks
from chipwise.run.evaluate import evaluate
before = dict(jax.config.values)
recipe = tasks.recipe(duration="3st")
out = {}
try:
    result = cw.fit(recipe, on=cw.On(devices=1), progress="none")
    out["fit"] = result.fingerprint
    with cw.Stepper(recipe, cw.On(devices=1)) as stepper:
        for _ in range(3):
            stepper.step()
        out["stepper"], out["eval"] = stepper.fingerprint(), stepper.evaluate()["loss"]
    out["evaluate"] = evaluate(recipe, result.params, result.state, on=cw.On(devices=1))["loss"]
    with jax.enable_x64(True), jax.default_prng_impl("rbg"):  # of this thread alone
        out["inside"] = cw.fit(recipe, on=cw.On(devices=1), progress="none").fingerprint
except cw.errors.ChipwiseError as error:
    out = {"code": error.code, "value": error.facts.get("value")}
out["put_back"] = dict(jax.config.values) == before
print(json.dumps(out))
"""
TESTS = Path(__file__).parents[1]


def told(**variables):
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    environment = {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TESTS), **variables}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def plain():
    """What this process says, which has strict promotion of dtypes and ranks and eight devices."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(PROGRAM, {})
    found = json.loads(said.getvalue().splitlines()[-1])
    assert found["fit"] == found["stepper"] == found["inside"] and found["put_back"]
    return found


@pytest.mark.slow
def test_settings_of_a_thread_change_no_bit():
    recipe = tasks.quick(duration="3st", task=tasks.quick_task(eval=None, augment=tasks.augment))
    plain = cw.fit(recipe, on=cw.On(devices=1), progress="none").fingerprint
    with jax.enable_x64(True), jax.default_prng_impl("rbg"):
        assert cw.fit(recipe, on=cw.On(devices=1), progress="none").fingerprint == plain
        assert jax.config.jax_enable_x64 and jax.config.jax_default_prng_impl == "rbg"


SETTINGS = {
    "JAX_ENABLE_X64": "1",
    "JAX_TRANSFER_GUARD": "disallow",
    "JAX_THREEFRY_PARTITIONABLE": "0",
    "JAX_SOFTMAX_CUSTOM_JVP": "1",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16",
    "JAX_RANDOM_SEED_OFFSET": "7",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
}


@pytest.mark.slow
def test_settings_of_the_process_change_no_bit_and_are_put_back(plain):
    assert told(**SETTINGS) == plain


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("name", [*SETTINGS, "JAX_DISABLE_JIT"])
def test_each_setting_alone_changes_no_bit(plain, name):
    assert told(**{name: SETTINGS.get(name, "1")}) == plain


@pytest.mark.slow
def test_flags_that_may_change_bits_are_refused_by_name():
    flag = "--xla_cpu_enable_fast_math=true"
    found = told(XLA_FLAGS=f"--xla_force_host_platform_device_count=2 {flag}")
    assert found == {"code": "flags-change-results", "value": flag, "put_back": True}


@pytest.mark.parametrize(("threads", "stated"), [("8", None), ("16", "16")])
def test_another_number_of_threads_is_stated(monkeypatch, threads, stated):
    monkeypatch.setenv("NPROC", threads)
    assert settings().get("NPROC") == stated


def test_the_usual_number_of_threads_is_that_of_the_import():
    code = "import os; import chipwise; from chipwise.machine.arithmetic import settings; print(settings())"
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True)
    assert done.stdout == "{}\n"


def test_decoders_are_compared_too():
    assert {"simplejpeg", "pillow", "numpy"} <= {name for name, version in versions().items() if version}
