"""Plans of LAMB: its programs for norms, on sharded state."""

import pytest

import chipwise as cw
import tasks
from chipwise.engine.layout import Layout
from chipwise.engine.step import Step
from chipwise.planner.tracing import training_step


def recipe(optimizer=None):
    return tasks.recipe(optimizer=optimizer or cw.recipe.lamb(lr=0.1, clip=1.0, decay="kernels"))


@pytest.mark.parametrize("shared", [False, True])
def test_a_plan_has_the_programs_of_the_run(shared, monkeypatch):
    monkeypatch.setattr("chipwise.engine.update.WORTH_BYTES", 0 if shared else 1 << 40)
    made = recipe()
    layout = Layout.of(made, 4)
    programs, size = (
        training_step(made, layout, resident=True),
        Step(made, layout, resident=True).updates.flat.size,
    )
    assert [one.name for one in programs.programs] == ["replica", "measure", "ratios", "update"]
    rows = size // 128
    assert programs.gathered == (2 * rows if shared else 0)
    _, measure, ratios, update = programs.programs
    assert measure.specs == update.specs[:-1] and update.specs[-1].shape == (rows // 4 if shared else rows,)
    assert ratios.specs[0].shape == (2 * rows,)
    own = training_step(recipe(cw.adamw(lr=0.1)), layout, resident=True)
    assert (len(own.programs), own.gathered) == (2, 0)
