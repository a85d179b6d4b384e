"""A loop of one's own over the public step computes what `fit` does, to the bit."""

import runpy
from pathlib import Path

import numpy as np
import pytest

import chipwise as cw
import tasks
from refusals import refused

pytestmark = pytest.mark.as_users_compile

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def fitted():
    return cw.fit(tasks.quick(ema=0.9), on=cw.On(devices=1), log_every="30st", progress="none")


@pytest.mark.parametrize("feed", ["device", "host"])
def test_it_computes_what_fit_does(fitted, feed):
    with cw.Stepper(tasks.quick(ema=0.9), on=cw.On(devices=1, feed=feed)) as stepper:
        assert (stepper.done, stepper.total, stepper.metrics()) == (0, 30, {})
        before = stepper.state()
        kept = np.copy(before[0]["w"])
        while stepper.done < stepper.total:
            stepper.step()
        np.testing.assert_array_equal(before[0]["w"], kept)
        with refused(cw.errors.RecipeError, "stepper-ended", total=30, duration="30st"):
            stepper.step()
    assert stepper.fingerprint() == fitted.fingerprint
    found = {f"train/{name}": value for name, value in stepper.metrics().items()}
    found |= {f"eval/{name}": value for name, value in stepper.evaluate().items()}
    assert found == fitted.metrics
    assert stepper.metrics() == {}


@pytest.mark.slow
def test_the_example_computes_what_fit_does_or_stops_early(fitted, capsys):
    train = runpy.run_path(str(EXAMPLES / "own_loop.py"))["train"]
    metrics, _, fingerprint = train(tasks.quick(ema=0.9), patience=None, on=cw.On(devices=1))
    assert fingerprint == fitted.fingerprint
    assert metrics["loss"] == fitted.metrics["eval/loss"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"step {n}" for n in (5, 10, 15, 20, 25, 30)]

    best, _, _ = train(tasks.quick(ema=0.9), patience=1, on=cw.On(devices=1))
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) < 6 and losses[-1] >= min(losses)
    assert best["loss"] == pytest.approx(min(losses), abs=1e-4)


def test_a_recipe_of_no_steps_and_one_without_evaluation_data():
    nothing = tasks.quick(duration="0st", task=tasks.quick_task(eval=None), optimizer=cw.sgd(lr=0.1))
    with pytest.warns(UserWarning, match="nothing will be trained"):
        stepper = cw.Stepper(nothing, on=cw.On(devices=1))
    with stepper, refused(cw.errors.RecipeError, "stepper-ended", total=0):
        stepper.step()
    with refused(cw.errors.DataError, "no-evaluation-data"):
        stepper.evaluate()
