"""A function that makes modules: PyTorch's own initialisers, seeded by the recipe."""

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.interop.adapter import flattened
from chipwise.interop.torch_trace import Traced
from chipwise.step.state import first_digest

torch = pytest.importorskip("torch")
pytest.importorskip("torchax")
nn, init = torch.nn, torch.nn.init

RNG = np.random.default_rng(0)
ROWS = cw.Arrays(x=RNG.normal(size=(16, 4)).astype(np.float32), label=RNG.integers(0, 3, 16))


def in_a_view(w):
    with torch.no_grad():
        w[:, :4].normal_(3.0, 0.1)
        w.view(-1)[-1] = 7.0


def by_out(w):
    with torch.no_grad():
        torch.mul(torch.randn(w.shape), 0.1, out=w)


def by_data(w):
    w.data = torch.rand(w.shape) * 4


INITIALISERS = {
    "trunc_normal_": lambda w: init.trunc_normal_(w, std=0.02),
    "orthogonal_": init.orthogonal_,
    "eye_": init.eye_,
    "sparse_": lambda w: init.sparse_(w, 0.5),
    "exponential_": lambda w: w.data.exponential_(),
    "kaiming_normal_": init.kaiming_normal_,
    "a copy": lambda w: w.data.copy_(torch.randn_like(w) * 0.02),
    "a view": in_a_view,
    "out=": by_out,
    "data": by_data,
    "NumPy": lambda w: w.data.copy_(torch.from_numpy(np.random.normal(size=w.shape))),
    "Python": lambda w: w.data.fill_(random.random()),
}


def maker(initialise):
    def make():
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        initialise(net[2].weight)
        return net

    return make


@pytest.mark.parametrize("name", INITIALISERS)
def test_an_initialiser_is_pytorchs_own(name):
    make = maker(INITIALISERS[name])
    task = cw.torch.task(make, nn.CrossEntropyLoss(), train=ROWS, check=False)
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
    threads = torch.get_num_threads()
    drawn, state = jax.jit(task.init)(jax.random.key(7))
    again, _ = task.init(jax.random.key(7))
    assert torch.equal(before[0], torch.get_rng_state()) and before[2] == random.getstate()
    assert np.array_equal(before[1], np.random.get_state()[1]) and threads == torch.get_num_threads()
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    theirs = dict(make().named_parameters())
    for name, value in flattened(jax.device_get(drawn), ".").items():
        np.testing.assert_allclose(value, theirs[name].detach().numpy(), rtol=1e-6, err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, drawn, again)
    assert set(flattened(state, ".")) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@pytest.mark.slow
@pytest.mark.as_users_compile
def test_a_seed_has_its_weights_on_any_number_of_devices():
    def fit(seed, devices):
        task = cw.torch.task(maker(init.orthogonal_), nn.CrossEntropyLoss(), train=ROWS)
        recipe = cw.Recipe(
            task=task, batch=12, replicas=4, duration="2st", optimizer=cw.sgd(lr=0.1), seed=seed
        )
        return cw.fit(recipe, on=cw.On(devices=devices), progress="none").fingerprint

    torch.manual_seed(1)
    one = fit(0, 1)
    torch.manual_seed(2)
    assert fit(0, 3) == one != fit(1, 1)


def test_constants_of_a_maker_depend_on_no_earlier_draw():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)
            self.register_buffer("fourier", torch.randn(4))

        def forward(self, x):
            return self.lin(torch.sin(x * self.fourier))

    def outputs():
        torch.rand(3)
        task = cw.torch.task(Net, nn.CrossEntropyLoss(), train=ROWS, check=False)
        params, state = task.init(jax.random.key(0))
        return task.predict(params, state, {"x": ROWS.columns["x"]})

    np.testing.assert_array_equal(outputs(), outputs())


def test_the_digest_of_a_first_state_depends_on_the_initialiser():
    def digested(std):
        make = maker(lambda w: init.normal_(w, std=std))
        task = cw.torch.task(make, nn.CrossEntropyLoss(), train=ROWS, check=False)
        settings = {"batch": 8, "duration": "1st", "optimizer": cw.sgd(lr=0.1)}
        return first_digest(cw.Recipe(task=task, **settings, seed=3))

    assert digested(1.0) == digested(1.0) != digested(5.0)


def test_functions_that_make_modules_at_once_keep_their_seeds():
    both = threading.Barrier(2)

    def make():
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # until the other one is here, if that can be
        return nn.Linear(4, 3)

    def drawn(_):
        return Traced(make).params["weight"]

    alone = [drawn(0), drawn(0)]
    both.reset()
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(drawn, range(2)))
    np.testing.assert_array_equal(together, alone)


def test_generators_of_other_devices_are_not_seeded(monkeypatch):
    def seeded(seed):
        raise AssertionError(seed)

    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded)
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    for module in (net, maker(init.orthogonal_)):
        task = cw.torch.task(module, nn.CrossEntropyLoss(), train=ROWS)
    task.init(jax.random.key(0))
