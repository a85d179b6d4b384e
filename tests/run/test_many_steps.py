"""Many steps in a call: the bits, rows and files of single steps, and where a call runs one."""

import dataclasses
import functools
import json
import os
import signal
from collections import Counter
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import chipwise as cw
import golden_cases
import small_nets
import tasks
from chipwise.base import fact
from chipwise.machine.program_kernels import kernels, same
from chipwise.run import calls, programs
from chipwise.run.on import On
from chipwise.run.programs import Programs
from chipwise.run.session import Session
from chipwise.step import blueprint, window
from chipwise.step.state import fingerprint
from refusals import refused

pytestmark = pytest.mark.as_users_compile

JOINED = jax.__version_info__ >= (0, 11)
"""XLA compiles the loops of some such little nets as one kernel, so single steps stay."""
RATE = cw.one_cycle(0.02, warmup="20%")
OPTIMIZERS = golden_cases.OPTIMIZERS | {
    name: getattr(cw.recipe, name)(lr=RATE)
    for name in ("adadelta", "adagrad", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop")
}
QUICK_TASK = {"task": tasks.quick_task()}
RECIPES = {
    **{name: {"optimizer": made} for name, made in OPTIMIZERS.items()},
    "clipped sgd": {"optimizer": cw.sgd(lr=RATE, momentum=0.9, nesterov=True, clip=0.5)},
    "grouped": {"optimizer": cw.recipe.grouped(cw.adamw(lr=RATE, clip=1.0), {"v": {"weight_decay": 0.0}})},
    "f16": {"precision": "f16", **QUICK_TASK},
    "bf16": {"precision": "bf16", **QUICK_TASK},
    "ema": {"ema": 0.9},
    "frozen": {"frozen": ("v",)},
    "blocks": {"blocks": 2},
    "quick": QUICK_TASK,
    **{f"{n} replicas": {"replicas": n} for n in (1, 2, 3)},
    "1 replica, f16": {"replicas": 1, "precision": "f16", "ema": 0.9, **QUICK_TASK},
    "1 replica, frozen": {"replicas": 1, "frozen": ("v",), "precision": "bf16", **QUICK_TASK},
    "1 replica, clipped sgd": {
        "replicas": 1,
        "optimizer": cw.sgd(lr=RATE, momentum=0.9, nesterov=True, clip=0.5),
    },
    "1 replica, muon": {"replicas": 1, "optimizer": OPTIMIZERS["muon"]},
}
GPU = ("adamw", "lamb", "f16", "frozen", "blocks", "3 replicas", "1 replica, f16", "clipped sgd")
FIRST = ("adamw", "1 replica, clipped sgd")


def bits(recipe, most, **on):
    """All parts of the state after a whole run, and the most steps of its calls."""
    with Session(recipe, On(devices=1, feed="device", steps_per_call=most, **on)) as session:
        session.begin()
        session.compile(session.total)
        session.advance(session.total)
        state = session.snapshot()
        parts = (state.params, state.state, state.optimizer, state.ema, state.sums, state.scale)
        return [fingerprint(part) for part in parts], session.calls.most


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in FIRST else (pytest.mark.slow, pytest.mark.drawn(share=0.25)))
        for n in RECIPES
    ],
)
def test_many_steps_in_a_call_have_the_bits_of_single_ones(name, monkeypatch):
    monkeypatch.setattr(window, "_WINDOW_STEPS", 9)  # calls end there too
    recipe = tasks.recipe(**{"duration": "23st", **RECIPES[name]})
    ended, most = bits(recipe, 7)
    assert ended == bits(recipe, 1)[0] and (most == 7 or JOINED)


@pytest.mark.parametrize("name", ["ema", *(pytest.param(n, marks=pytest.mark.slow) for n in GPU)])
def test_a_gpu_loops_over_replicas_and_adds_them_as_a_cpu_does(name, monkeypatch):
    """There single steps call `replica` for each, and only many steps loop. A CPU fuses calls otherwise than
    loops, so they are compared with the steps of its own loop."""
    monkeypatch.setattr(window, "_WINDOW_STEPS", 9)
    recipe = tasks.recipe(**{"duration": "23st", **RECIPES[name]})
    looped, additions = bits(recipe, 1)[0], []
    many = blueprint.many_steps
    monkeypatch.setattr(programs, "many_steps", lambda step, made, platform: many(step, made, "gpu"))
    monkeypatch.setattr(blueprint, "_may_loop", lambda step, replica, fast=(): fast is None)
    monkeypatch.setattr(programs, "same", lambda found, apart, n: additions.append(n) or True)
    monkeypatch.setattr(calls.Calls, "compare", lambda *_: None)
    ended, most = bits(recipe, 7)
    assert (most, additions) == (7, [recipe.block_count - 1])
    assert ended == looped or JOINED


def test_only_additions_may_come_to_the_kernels_of_single_steps():
    product, two = (("f32[8]", "multiply", ""),), (("f32[8]", "add", ""),) * 2
    apart = Counter([product])
    assert same(Counter([product, two]), apart, 2) and same(apart, apart, 0)
    for found, additions in (
        ([product, two], 1),
        ([product, two, product], 2),
        ([two], 2),
        ([(*product, *two)], 2),
        ([], 0),
        ([product, (("bf16[8]", "add", ""),) * 2], 2),
        ([product, (("f32[8]", "multiply", ""),) * 2], 2),
    ):
        assert not same(Counter(found), apart, additions), found


HOW = {
    "log_every": "5st",
    "eval_every": "6st",
    "checkpoint_every": "4st",
    "ledger": "7st",
    "progress": "none",
}
QUICK = {"ema": 0.5, "optimizer": cw.adamw(lr=RATE, clip=0.5)}


def told(folder, result):
    """What a run stores, without times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = {"seconds", "steps_per_second", "examples_per_second", "wait_data_share", "wait_data_seconds"}
    ledger = (folder / "ledger.jsonl").read_text().splitlines()[1:]
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return (
        result.fingerprint,
        [{k: v for k, v in row.items() if k not in timed} for row in rows],
        ledger,
        kept,
    )


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A run of one step a call."""
    folder = tmp_path_factory.mktemp("single")
    result = cw.fit(tasks.quick(**QUICK), folder, on=On(devices=1, steps_per_call=1), **HOW)
    return told(folder, result)


@pytest.mark.parametrize("most", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 6, 100))])
def test_a_run_stores_the_same_and_no_call_passes_a_step_at_which_something_is_due(most, single, tmp_path):
    made, steps = [], Programs.steps

    def counted(self, carry, window, data, count):
        made.append((int(carry[0].step), count))
        return steps(self, carry, window, data, count)

    with mock.patch.object(Programs, "steps", counted):
        result = cw.fit(tasks.quick(**QUICK), tmp_path, on=On(devices=1, steps_per_call=most), **HOW)
    assert told(tmp_path, result) == single
    made = made[1:]  # the first one compares
    assert (made or JOINED) and all(1 < count <= most for _, count in made)
    due = {n for every in (4, 5, 6, 7) for n in range(every, 31, every)}
    assert not [(first, count) for first, count in made if due & set(range(first + 1, first + count))]


@pytest.mark.slow
@pytest.mark.parametrize("first, then", [(4, 1), (1, 4), (4, 9)])
def test_a_run_goes_on_with_another_number_of_steps_in_a_call(first, then, single, tmp_path):
    """The number is no part of the run: neither of what it is compared by, nor of its programs' digest."""
    for stop, most in (("13st", first), (None, then)):
        on = On(devices=1, steps_per_call=most)
        result = cw.fit(tasks.quick(**QUICK), tmp_path, on=on, stop_after=stop, **HOW)
    fingerprint, rows, ledger, kept = told(tmp_path, result)
    assert (fingerprint, rows, kept) == (single[0], single[1], single[3])
    written = [json.loads(line) for line in ledger]
    assert [row for row in written if "from" in row] == []
    assert [json.loads(line) for line in single[2]] == written


def test_the_number_of_steps_in_a_call_is_no_part_of_what_is_computed():
    def computed(most):
        with Session(tasks.quick(), On(devices=1, steps_per_call=most)) as session:
            return session.computed(), session.describe()

    assert computed(1) == computed(8)


@pytest.mark.slow
def test_an_event_stops_the_run_at_the_same_step(tmp_path):
    def stopped(most):
        for event in cw.training(
            tasks.quick(), on=On(devices=1, steps_per_call=most), log_every="9st", progress="none"
        ):
            if event.kind == "log":
                event.stop()
        return event.result.steps, event.result.fingerprint

    assert stopped(7) == stopped(1)


def test_devices_that_check_each_other_take_single_steps():
    recipe = tasks.quick(duration="9st")
    assert bits(recipe, 4, verify="50%") == (bits(recipe, 4)[0], 1)


def in_a_row(recipe, **on):
    with Session(recipe, On(**{"devices": 1, "steps_per_call": 4, **on})) as session:
        session.begin()
        session.compile(session.total)
        return session.calls.most


def convolved(params, state, batch, key, train):
    """The plain loss after a convolution in the layout in which XLA has fast code."""
    image = batch["x"].astype(jnp.float32).reshape(-1, 1, tasks.FEATURES, 1)
    kernel = params["w"][:3, :1].reshape(1, 3, 1, 1)
    numbers = ("NHWC", "HWIO", "NHWC")
    made = jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return tasks.plain_loss(params, state, {**batch, "x": made.reshape(batch["x"].shape)}, key, train)


ONE = {
    "streamed": (tasks.quick, {"feed": "host"}),
    "two devices": (tasks.quick, {"devices": 2}),
    "a convolution, one replica": (
        functools.partial(tasks.quick, replicas=1, task=tasks.task(loss=convolved, augment=None)),
        {},
    ),
    "a short run": (tasks.quick, {"steps_per_call": "auto"}),
}


@pytest.mark.parametrize("name", ONE)
def test_a_call_runs_one_step(name):
    made, on = ONE[name]
    assert in_a_row(made(), **on) == 1


def test_many_steps_are_for_runs_that_gain_more_than_a_compilation_takes(monkeypatch):
    with Session(tasks.quick(), On(devices=1, steps_per_call="auto")) as session:
        session.programs.flops_per_step_per_device = calls.LITTLE
        pays = functools.partial(session.calls.pay, 1000)
        gained = 1000 * calls.SAVED_SECONDS
        assert (pays(0.9 * gained), pays(gained), pays(1.1 * gained)) == (True, False, False)
        session.programs.flops_per_step_per_device = 1.1 * calls.LITTLE
        assert not pays(0.0)


def test_a_long_run_takes_many_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(calls, "SAVED_SECONDS", 1e3)
    cw.fit(tasks.quick(), on=On(devices=1, steps_per_call="auto"), eval_every=None, progress="lines")
    assert (str(fact("many-steps", steps=calls.MANY)) in capsys.readouterr().err) != JOINED


def test_a_run_whose_steps_stay_single_says_so(capsys):
    on = On(devices=1, feed="host", steps_per_call=5)  # streamed
    cw.fit(tasks.quick(), on=on, eval_every=None, progress="lines")
    assert str(fact("many-steps-single", asked=5)) in capsys.readouterr().err
    cw.fit(tasks.quick(), on=On(devices=1), eval_every=None, progress="lines")
    assert str(fact("many-steps-single", asked=1)) not in capsys.readouterr().err


@pytest.mark.slow
def test_a_stop_takes_effect_after_the_call_and_the_run_goes_on(single, tmp_path):
    started, steps = [], Programs.steps

    def stopping(self, *given):
        started.append(given[-1])
        if len(started) == 4:  # the first one compares
            os.kill(os.getpid(), signal.SIGTERM)
        return steps(self, *given)

    on = On(devices=1, steps_per_call=3)
    with mock.patch.object(Programs, "steps", stopping), pytest.raises(cw.errors.Stopped) as stopped:
        cw.fit(tasks.quick(**QUICK), tmp_path, on=on, **HOW)
    assert len(started) == 4 and 0 < stopped.value.facts["step"] < 20
    result = cw.fit(tasks.quick(**QUICK), tmp_path, on=on, **HOW)
    assert told(tmp_path, result) == single


@pytest.mark.slow
def test_a_run_diverges_at_the_same_row():
    def diverged(most):
        recipe = tasks.quick(optimizer=cw.sgd(lr=1e38), duration="40st")
        with pytest.raises(cw.errors.DivergedError) as caught:
            cw.fit(recipe, on=On(devices=1, steps_per_call=most), log_every="8st", progress="none")
        return caught.value.facts["first"], caught.value.facts["last"]

    assert diverged(5) == diverged(1)


@pytest.mark.parametrize("seed", [15, pytest.param(17, marks=pytest.mark.slow)])
def test_a_net_whose_bits_would_differ_takes_single_steps(seed, monkeypatch):
    """XLA compiles its loop over less than 1 KiB as one kernel. These are nets that a seed draws."""
    recipe = small_nets.recipe(seed)
    plain = bits(recipe, 1)[0]
    assert bits(recipe, 7) == (plain, 1)
    if JOINED:
        return
    monkeypatch.setattr(programs, "same", lambda *_: True)
    assert bits(recipe, 7) == (plain, 1)  # for the state after them differs
    monkeypatch.setattr(calls.Calls, "compare", lambda *_: None)
    differing, most = bits(recipe, 7)
    assert differing != plain and most == 7


def test_kernels_are_those_of_a_program_in_whatever_loop():
    def once(x):
        return jnp.sin(x @ x) * 3 + x

    def turns(x, n):
        return jax.lax.fori_loop(0, n, lambda _, x: once(x), x)

    def of(function, *given):
        return kernels(jax.jit(function).lower(*given).compile().as_text())

    large, small = jnp.ones((32, 32)), jnp.ones((2, 2))
    assert of(once, large) == of(turns, large, 5)
    assert len(of(once, large)) == 2
    assert of(once, small) != of(turns, small, 5) and len(of(turns, small, 5)) == 1
    # Also a single kernel is another one within a loop that is compiled as a whole
    assert of(jnp.cosh, small) != of(
        lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: jnp.cosh(x), x), small, 5
    )
    assert of(lambda x: jnp.sin(x @ x) * 3 - x, large) != of(once, large)


@pytest.mark.parametrize("given", [0, -3, "many"])
def test_a_number_of_steps_is_a_whole_one_or_auto(given):
    with refused(cw.errors.RecipeError, "steps-per-call"):
        On(steps_per_call=given)
    assert dataclasses.replace(On(), steps_per_call=3).json()["steps_per_call"] == 3
    assert On().steps_per_call == 1


@pytest.mark.parametrize("feed", ["host", "device"])
def test_a_run_that_asks_for_many_steps_takes_every_batch(feed):
    def trained(most):
        on = On(devices=1, feed=feed, steps_per_call=most)
        return cw.fit(tasks.quick(), on=on, progress="none").fingerprint

    assert trained(8) == trained(1)


def test_a_session_that_has_ended_says_so():
    with Session(tasks.quick(), On(devices=1, steps_per_call=4)) as session:
        session.begin()
        session.advance(session.total)
        with refused(cw.errors.RecipeError, "session-ended"):
            session.advance(3)


def test_a_program_whose_steps_end_elsewhere_is_not_used(monkeypatch):
    """Whatever the text of its kernels says."""

    def other(self, carry, window, data, steps):
        one, token = single(self, carry, window, data)
        return [_off(one[0])], token

    single = Programs.step
    monkeypatch.setattr(Programs, "steps", other)
    recipe = tasks.recipe(duration="40st")
    with Session(recipe, On(devices=1, feed="device", steps_per_call=4)) as session:
        session.begin()
        session.compile(session.total)
        assert "steps" not in session.programs.compiled and session.calls.most == 1
        session.advance(5)
        assert session.step == 5


def _off(state):
    return dataclasses.replace(state, params=jax.tree.map(lambda x: x + 1, state.params))
