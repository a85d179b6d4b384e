"""Models of the zoo, drawn: what the table says of them is still so, by the program that made it."""

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2]))  # for benchmarks/, which no package has

from benchmarks import zoo, zoo_measure, zoo_models

TABLE = Path(zoo.__file__).parent / "zoo.csv"
SHORT = 45
"""Seconds of a processor: longer ones are left to the benchmark."""
ROWS = {
    key: row
    for key, row in zoo.rows_in(TABLE).items()
    if row["traces"] == "yes" and float(row["seconds"]) <= SHORT
}
DRAWN = 12


@pytest.mark.slow
@pytest.mark.drawn(share=min(1.0, DRAWN / max(1, len(ROWS))))
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("key", sorted(ROWS))
def test_what_the_table_says_of_a_model(key):
    """Each column that says "yes" says so again. A column that says "no" may be mended."""
    candidate = {candidate.key: candidate for candidate in zoo_models.stored()}[key]
    if candidate.source in ("timm", "torchvision"):
        zoo_models.beside()
        if importlib.util.find_spec(candidate.source) is None:
            pytest.skip(f"could not import '{candidate.source}'")
    until = next(level for level in reversed(zoo_measure.LEVELS) if zoo.has(ROWS[key], level))
    *_, row = zoo_measure.measured(candidate, until)
    lost = [name for name in zoo_measure.COLUMNS if ROWS[key][name] == "yes" and row[name] != "yes"]
    assert not lost, row["causes"]


def test_a_row_is_what_its_columns_say_and_until_where_it_was_tried():
    row = dict.fromkeys(zoo_measure.COLUMNS, "yes") | {"source": "torch", "until": "doors"}
    assert zoo_measure.passed(row) and not zoo_measure.passed(row | {"check": ""})
    assert zoo_measure.passed(row | {"check": "", "source": "keras"})
    assert zoo.has(row, "traces") and zoo.has(row, "doors") and not zoo.has(row | {"bits": ""}, "all")
    assert zoo.has(row | {"traces": "no", "until": "traces"}, "all")


def module(forward, *parts):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchax")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.Sequential(*parts)

        def forward(self, x):
            return forward(self.parts, x)

    torch.manual_seed(0)
    x = zoo_models.rng().normal(size=(zoo_models.BATCH, 4)).astype(np.float32)
    net = Net()
    return zoo_models.Model(lambda: net, {"x": x}, zoo_models.labels(), torch.nn.CrossEntropyLoss())


def test_an_export_that_has_to_know_its_batch_is_written_for_one():
    nn = pytest.importorskip("torch").nn
    model = module(lambda parts, x: parts(x.reshape(len(x), -1)), nn.Linear(4, zoo_models.CLASSES))
    row = {"export": "", "causes": []}
    list(zoo_measure._exported(zoo_measure._unchecked(model.make(), model), model, row, ("stablehlo",)))
    assert row["export"] == "yes" and row["causes"][0].startswith("batch=6: export-any-batch")


def test_a_net_with_huge_gradients_ends_near_its_weights():
    nn = pytest.importorskip("torch").nn
    model = module(lambda parts, x: 1e6 * parts(x), nn.Linear(4, zoo_models.CLASSES))
    task = zoo_measure._unchecked(model.make(), model)
    result = zoo_measure.cw.fit(zoo_measure._recipe(task), progress="none")
    before = task.init(jax.random.key(0))[0]
    moved = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), result.params, before)
    assert 0 < max(jax.tree.leaves(moved)) <= 0.02


def test_a_net_that_is_infinite_in_float64_is_compared_in_float32():
    torch = pytest.importorskip("torch")

    def masked(parts, x):
        least = torch.finfo(parts[0].weight.dtype).min
        return parts(x) * (1 + 0 * torch.full((), least).float())

    model = module(masked, torch.nn.Linear(4, zoo_models.CLASSES))
    row = {"random": "", "outputs": "", "step": "", "off": "", "causes": []}
    list(zoo_measure._framework_step(model, row, False, 1))
    assert row["outputs"] == row["step"] == "yes", row["causes"]


def test_outputs_in_float64_are_compared_strictly_beside_half_precision():
    nn = pytest.importorskip("torch").nn

    def off(parts, x):
        return parts(x) * (1 + 1e-4 * (x.device.type == "jax"))

    row = {"random": "", "outputs": "", "step": "", "off": "", "causes": []}
    list(zoo_measure._framework_step(module(off, nn.Linear(4, 10)), row, False, zoo_measure.HALF))
    assert row["outputs"] == "no"


@pytest.mark.parametrize(("dtype", "seen"), [("bfloat16", True), ("float32", False)])
def test_half_precision_inside_a_net_is_seen(dtype, seen):
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    model = module(lambda parts, x: parts(x.to(kind).float()), torch.nn.Linear(4, 10))
    assert zoo_measure._halves(model.make(), model) == seen


def test_gradients_of_keras_are_compared_by_their_names(monkeypatch):
    keras = pytest.importorskip("keras")

    def make():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(), keras.layers.Flatten()]
        return keras.Sequential([keras.Input((8, 8, 3)), *layers, keras.layers.Dense(zoo_models.CLASSES)])

    image = zoo_models.images(8, last=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = zoo_models.Model(make, {"image": image}, zoo_models.labels(), loss)
    monkeypatch.setattr(zoo_measure, "made", lambda _: model)
    row = dict.fromkeys(zoo_measure.COLUMNS, "") | {"off": "", "causes": []}
    ways = zoo_measure._keras(zoo_models.Candidate("keras", "any"), row, "doors")
    with jax.numpy_rank_promotion("allow"):  # as outside of tests: Keras adds biases so
        while not row["step"]:
            next(ways)
    assert row["step"] == "yes", row["causes"]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_off(wrong):
    theirs = {"a": np.ones(2), "b": np.ones(2)}
    assert zoo_measure._off(theirs | {"a": np.array([1.0, wrong])}, theirs) == (float("inf"), "a")


def test_a_table_has_each_model_once_and_only_candidates():
    keys = [candidate.key for candidate in zoo_models.stored()]
    assert len(keys) == len(set(keys)) >= 300
    assert zoo.rows_in(TABLE).keys() <= set(keys)


def test_a_model_that_dies_is_a_row():
    candidate = zoo_models.Candidate("torch", "group_norm")
    given = zoo.Running(candidate, Died(-11), Silent())
    assert given.ended(1.0, 1)
    row = given.final()
    assert row["traces"] == "no" and row["causes"] == ["traces: signal 11"]
    for source, first in (("torch", "check"), ("keras", "outputs")):
        given.candidate = zoo_models.Candidate(source, "any")
        given.row = {"traces": "yes"}
        assert given.final()[first] == "no"
    given.row |= {"outputs": "yes", "step": "yes", "export": "yes"}
    assert given.final()["bits"] == "no" and given.final()["check"] == ""


class Silent:
    def poll(self):
        return False


class Died:
    def __init__(self, exitcode):
        self.exitcode = exitcode

    def is_alive(self):
        return False


def test_a_draw_is_the_same_for_all():
    candidates = [zoo_models.Candidate("torch", str(i)) for i in range(50)]
    first = zoo.drawn(candidates, 10, 1)
    assert first == zoo.drawn(candidates, 10, 1) and first != zoo.drawn(candidates, 10, 2)
    assert len({candidate.key for candidate in first}) == 10
