"""Random draws in `[i]`: made anew in every epoch, and the same wherever and whenever an example is read."""

import pickle
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.data.class_names import Renamed, joined
from chipwise.data.draws import Drawn, seeded
from chipwise.data.sources import materialize, take
from chipwise.data.weighted import by_epoch
from chipwise.data.workers import Workers
from chipwise.run.evaluate import evaluate
from refusals import refused

torch = pytest.importorskip("torch")
from drawn_source import Compose, Images, Noise, RandomCrop, RandomHorizontalFlip  # noqa: E402

pytestmark = pytest.mark.as_users_compile

QUIET = {"progress": "none", "eval_every": None}
ALL = Compose(RandomCrop(4), RandomHorizontalFlip(), Noise())
N = 37


def init(key):
    return {"w": 0.1 * jax.random.normal(key, (16, 2), jnp.float32)}, {}


def loss(params, state, batch, key, train):
    logits = batch["image"].reshape(len(batch["image"]), -1) @ params["w"]
    return {"loss": cw.Sum.of(cw.losses.softmax_cross_entropy(logits, batch["label"]))}, state


def recipe(source, epochs=2, **task):
    task = cw.Task(init=init, loss=loss, train=source, classes=2, **task)
    return cw.Recipe(task=task, batch=8, replicas=8, duration=f"{epochs}ep", optimizer=cw.sgd(lr=0.1), seed=3)


@pytest.fixture(scope="module")
def expected():
    return cw.fit(recipe(Images(transform=ALL)), on=cw.On(devices=1), **QUIET).fingerprint


@pytest.mark.parametrize(
    "on",
    [
        pytest.param(cw.On(devices=8), marks=pytest.mark.slow),
        cw.On(devices=2, workers="threads:2"),
        pytest.param(cw.On(devices=1, workers="processes:2"), marks=pytest.mark.slow),
    ],
    ids=["8 devices", "2 devices, threads", "processes"],
)
def test_the_same_bits_on_any_devices_and_whoever_reads(expected, on):
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    assert cw.fit(recipe(Images(transform=ALL)), on=on, **QUIET).fingerprint == expected


@pytest.mark.slow
def test_the_same_bits_after_a_stop(expected, tmp_path):
    at = {"run": tmp_path / "run", **QUIET}
    cw.fit(recipe(Images(transform=ALL)), on=cw.On(devices=2), stop_after="6st", **at)
    again = cw.fit(recipe(Images(transform=ALL)), on=cw.On(devices=1), **at)
    assert again.steps == 9 and again.fingerprint == expected


@pytest.mark.slow
def test_code_is_called_for_each_example_of_each_epoch():
    source, once = Images(transform=ALL), Images(transform=ALL)
    cw.fit(recipe(source), on=cw.On(devices=1), **QUIET)
    about = 1 + 3 * 8  # its shapes, eight examples read twice, and eight whose loss is tried
    assert source.calls == about + 9 * 8  # steps times batch
    cw.fit(recipe(cw.data.Cached(once)), on=cw.On(devices=1), **QUIET)
    assert once.calls == 1 + 8 + N
    with refused(cw.errors.DataError, "data-by-epoch", source="Images"):
        cw.fit(recipe(source), on=cw.On(devices=1, feed="device"), **QUIET)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda source: source,
        cw.data.Cached,
        lambda source: cw.data.Padded(source, 8),
        lambda source: cw.data.Weighted(source, np.ones(N)),
    ],
)
def test_messages_name_the_class_of_the_user_s_own_source(wrap):
    class Mine:  # no other process can import it
        def __len__(self):
            return N

        def __getitem__(self, index):
            return {"x": np.zeros(4, np.float32)}

    with refused(cw.errors.DataError, "source-unsendable", source="Mine"):
        Workers(by_epoch(wrap(Mine()), 0), "processes:1")


def test_what_is_known_to_draw_nothing_is_read_once():
    datasets = pytest.importorskip("datasets")
    pixels = torch.rand((N, 4, 4))
    tensors = torch.utils.data.TensorDataset(pixels, torch.arange(N) % 2)
    hub = datasets.Dataset.from_dict({"image": pixels.numpy(), "label": [0] * N}).with_format("numpy")
    rows = [hub[i] for i in range(N)]
    still = [tensors, hub, rows, cw.data.Cached(Images()), cw.Arrays(image=pixels.numpy())]
    still += [torch.utils.data.Subset(tensors, [1, 2]), torch.utils.data.ConcatDataset([tensors, rows])]
    assert all(by_epoch(source, 0) is source for source in still)
    drawn = [hub.with_transform(lambda batch: batch), Images(), torch.utils.data.Subset(Images(), [1, 2])]
    assert all(isinstance(by_epoch(source, 0), Drawn) for source in drawn)


@pytest.mark.slow
def test_draws_of_an_epoch_are_independent_of_those_of_others():
    class Draws:
        def __len__(self):
            return 400

        def __getitem__(self, index):
            each = random.random(), np.random.random(), torch.rand(1).item()
            return {"u": np.float32(each)}

    u = take(by_epoch(Draws(), 7), np.arange(10 * 400))["u"].reshape(10, 400, 3)
    assert len(np.unique(u)) > 0.999 * u.size
    for generator in range(3):
        one = u[..., generator]
        assert abs(one.mean() - 0.5) < 0.02 and abs(one.var() - 1 / 12) < 0.005
        assert np.abs(np.corrcoef(one) - np.eye(10)).max() < 0.2  # of epochs
        flips = (one < 0.5).sum(axis=0)  # of an example, binomial over 10 epochs
        assert abs(flips.var() - 2.5) < 0.6
    other = take(by_epoch(Draws(), 8), np.arange(400))["u"]
    assert not np.isin(other, u).any()


def test_generators_are_put_back():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.random(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with seeded(3, 4, 5):
        first = random.random(), np.random.random(), torch.rand(1).item()
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected
    with seeded(3, 4, 5):
        assert (random.random(), np.random.random(), torch.rand(1).item()) == first
    drawn = pickle.loads(pickle.dumps(by_epoch(Images(transform=ALL), 3)))
    np.testing.assert_array_equal(
        take(drawn, np.arange(40))["image"], take(by_epoch(Images(transform=ALL), 3), np.arange(40))["image"]
    )


class Own(Images):
    """Draws from a generator that nobody can seed."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image[:4, :4] * np.random.default_rng().integers(1, 99), label


def test_a_generator_of_its_own_is_refused_by_name():
    facts = {"source": "Own", "column": "image"}
    with refused(cw.errors.DataError, "draws-unkeyed", **facts):
        cw.fit(recipe(Own()), on=cw.On(devices=1), **QUIET)
    with refused(cw.errors.DataError, "draws-unkeyed", **facts):
        cw.fit(recipe(cw.Arrays(image=np.ones((9, 4, 4), np.float32), label=np.zeros(9, int)), eval=Own()),
               on=cw.On(devices=1), progress="none")  # fmt: skip
    assert cw.fit(recipe(Own()), on=cw.On(devices=1, exact=False), **QUIET).steps == 9


def test_joined_labels_take_no_draws_in_a_new_process():
    """There nothing is known of a source, so that its first example was read for its shapes."""
    made = joined(("b", "a"), Renamed(Images(transform=ALL), ("a", "b")))
    expected = take(Drawn(made, 0), [3, 4])
    again = pickle.loads(pickle.dumps(Drawn(made, 0)))
    for column, values in take(Drawn(Images(transform=ALL), 0), [3, 4]).items():
        for found in (expected[column], [again[i][column] for i in (3, 4)]):
            np.testing.assert_array_equal(found, values if column == "image" else 1 - values)


def test_evaluation_draws_the_same_each_time():
    task = {"eval": Images(transform=ALL)}
    train = cw.Arrays(image=np.ones((9, 4, 4), np.float32), label=np.zeros(9, int))
    made = recipe(train, **task)
    params, state = init(jax.random.key(0))
    first = evaluate(made, params, state, on=cw.On(devices=1))
    assert evaluate(made, params, state, on=cw.On(devices=8)) == first
    assert materialize(by_epoch(task["eval"], 0))["image"].shape == (N, 4, 4)
