"""Random operations of PyTorch: their distributions, their keys, and draws that a program cannot repeat."""

import inspect
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import chipwise as cw
from chipwise.interop.adapter import Arguments
from refusals import refused

torch = pytest.importorskip("torch")
pytest.importorskip("torchax")
nn, F = torch.nn, torch.nn.functional

from chipwise.interop.torch_trace import Traced  # noqa: E402

RNG = np.random.default_rng(0)
ROWS = cw.Arrays(x=RNG.normal(size=(48, 4)).astype(np.float32), label=RNG.integers(0, 3, 48))


def made(f, **kept):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)
            for name, value in kept.items():
                setattr(self, name, value)

        def forward(self, x):
            return f(self, x)

    torch.manual_seed(0)
    return Net()


DRAWS = {
    "rand of a shape": lambda x: torch.rand(x.shape),
    "rand of sizes": lambda x: torch.rand(*x.shape),
    "rand on a device": lambda x: torch.rand(x.shape, device=x.device),
    "rand of one": lambda x: torch.rand([]) + x,
    "rand_like": torch.rand_like,
    "randn of a shape": lambda x: torch.randn(x.shape),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(2, 90, x.shape).float(),
    "randint to": lambda x: torch.randint(90, x.shape).float(),
    "randint_like": lambda x: torch.randint_like(x, 3, 90),
    "randperm": lambda x: torch.randperm(x.numel()).float(),
    "normal of tensors": lambda x: torch.normal(torch.full_like(x, 1.0), torch.full_like(x, 3.0)),
    "normal of plain tensors": lambda x: torch.normal(torch.ones(x.shape), 3.0),
    "normal of numbers": lambda x: torch.normal(1.0, 3.0, x.shape),
    "bernoulli": lambda x: torch.bernoulli(x * 0 + 0.3),
    "bernoulli of plain tensors": lambda x: torch.bernoulli(torch.full(x.shape, 0.3)),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x * 0 + 0.3),
    "a view": lambda x: torch.zeros_like(x)[2:].normal_(2.0, 3.0),
    "normal_": lambda x: torch.empty_like(x).normal_(2.0, 3.0),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1.0, 3.0),
    "exponential_": lambda x: torch.empty_like(x).exponential_(0.5),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(1.0, 2.0),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "random_": lambda x: torch.empty_like(x).random_(),
    "random_ to": lambda x: torch.empty_like(x).random_(90),
    "random_ from to": lambda x: torch.empty_like(x).random_(3, 90),
    "multinomial": lambda x: torch.multinomial(x * 0 + torch.tensor([0.1, 0.5, 0.2, 0.2]), 2).float(),
    "multinomial, replaced": lambda x: torch.multinomial(
        torch.tensor([0.1, 0.5, 0.2, 0.2]), x.numel(), True
    ).float(),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x * 0),
    "dropout": lambda x: F.dropout(x * 0 + 1, 0.3),
    "alpha dropout": lambda x: F.alpha_dropout(x * 0 + 1, 0.3, True),
    "feature dropout": lambda x: F.dropout1d(x[:, None] * 0 + 1, 0.3),
    "rrelu": lambda x: F.rrelu(x * 0 - 1, training=True),
    "a distribution": lambda x: torch.distributions.Laplace(0.0, 1.0).sample(x.shape),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_has_pytorchs_distribution_and_the_steps_key(name):
    """By a two-sample Kolmogorov-Smirnov test, which a wrong distribution fails by far."""
    traced = Traced(made(lambda self, x: DRAWS[name](x)))
    x = jnp.zeros((1000, 4))
    before = torch.get_rng_state()

    @jax.jit
    def drawn(key):
        return traced.call({}, {}, Arguments((x,)), key, True)[0]

    one, other, same = (np.ravel(drawn(jax.random.key(i))) for i in (1, 2, 1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    theirs = DRAWS[name](torch.zeros(1000, 4)).numpy().ravel()
    assert one.dtype == theirs.dtype and one.size == theirs.size
    np.testing.assert_array_equal(one, same)
    if name != "randperm" and name != "rand of one":
        assert stats.ks_2samp(one, theirs).pvalue > 1e-4
        assert abs(stats.spearmanr(one, other).statistic) < 0.1
    assert not np.array_equal(one, other)
    if name == "randperm":
        np.testing.assert_array_equal(np.sort(one), np.sort(theirs))


def test_two_draws_of_a_step_are_independent():
    def two(self, x):
        return torch.stack([torch.rand(x.shape), torch.rand(x.shape), torch.rand_like(x)])

    traced = Traced(made(two))
    a, b, c = traced.call({}, {}, Arguments((jnp.zeros((1000, 4)),)), jax.random.key(0), True)[0]
    for one, other in ((a, b), (b, c), (a, c)):
        assert abs(np.corrcoef(np.ravel(one), np.ravel(other))[0, 1]) < 0.1


def test_a_draw_that_is_repeated_until_it_fits_is_refused_and_not_left_out():
    def drawn(self, x):
        return self.lin(x) + nn.init.trunc_normal_(torch.empty_like(x))[:, :3]

    with refused(cw.errors.RecipeError, "torch-draw-decides"):
        cw.torch.task(made(drawn), nn.CrossEntropyLoss(), train=ROWS, check=False)


def dropped_by_a_number(self, x):
    p = torch.rand([])
    return -self.lin(x) if p < self.rate else self.lin(x)


def dropped_by_an_item(self, x):
    return -self.lin(x) if torch.rand(1, device=x.device).item() < self.rate else self.lin(x)


def dropped_by_some(self, x):
    gone = 1 - torch.bernoulli(torch.full((4,), 1 - self.rate))
    return -self.lin(x) if (gone > 0).any() else self.lin(x)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("f", [dropped_by_a_number, dropped_by_an_item, dropped_by_some])
def test_a_branch_on_a_drawn_number_is_refused_as_that(f, check):
    lines, first = inspect.getsourcelines(f)
    where = f"{__file__.rpartition('/')[2]}:{first + len(lines) - 1}"
    with refused(cw.errors.RecipeError, "torch-draw-decides", where=where):
        cw.torch.task(made(f, rate=0.5), nn.CrossEntropyLoss(), train=ROWS, check=check)


def test_a_branch_on_values_beside_drawn_numbers_is_refused_as_one_on_values():
    def dropped(self, x):
        return -self.lin(x) if (x + torch.rand([])).sum() > 0 else self.lin(x)

    with refused(cw.errors.RecipeError, "torch-depends-on-values"):
        cw.torch.task(made(dropped), nn.CrossEntropyLoss(), train=ROWS)


def test_a_branch_on_a_drawn_number_that_a_rate_of_zero_guards_passes():
    def dropped(self, x):
        return -self.lin(x) if self.rate > 0 and torch.rand([]) < self.rate else self.lin(x)

    cw.torch.task(made(dropped, rate=0.0), nn.CrossEntropyLoss(), train=ROWS)
    with refused(cw.errors.RecipeError, "torch-draw-decides"):
        cw.torch.task(made(dropped, rate=0.5), nn.CrossEntropyLoss(), train=ROWS)


def noisy(self, x):
    return self.lin(x) + (torch.randn(3) if self.training else 0)


@pytest.mark.slow
@pytest.mark.as_users_compile
def test_a_draw_without_a_device_has_the_bits_of_one_device_on_three():
    task = cw.torch.task(made(noisy), nn.CrossEntropyLoss(), train=ROWS, check=False)
    recipe = cw.Recipe(task=task, batch=12, replicas=4, duration="5st", optimizer=cw.sgd(lr=0.1))
    one, three = (cw.fit(recipe, on=cw.On(devices=n), progress="none") for n in (1, 3))
    assert one.fingerprint == three.fingerprint


def of_numpy(self, x):
    return self.lin(x) * float(np.random.rand())


def of_python(self, x):
    return self.lin(x) * random.random()


def of_pythons_uniform(self, x):
    scale = random.uniform(0.5, 1.5)
    return self.lin(x) * scale


def into_a_plain_tensor(self, x):
    return self.lin(x) + torch.empty(3).normal_()


def of_a_kept_generator(self, x):
    return self.lin(x) + torch.randn(3, generator=self.generator)


def of_a_kept_numpy_generator(self, x):
    return self.lin(x) * float(self.generator.random())


def in_evaluation(self, x):
    return self.lin(x) if self.training else self.lin(x) * np.random.rand()


HOST = [of_numpy, of_python, of_pythons_uniform, into_a_plain_tensor, in_evaluation]
KEPT = {of_a_kept_generator: torch.Generator(), of_a_kept_numpy_generator: np.random.default_rng(0)}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("f", [*HOST, *KEPT])
def test_a_draw_that_every_step_would_repeat_is_refused_by_its_line(f, check):
    kept = {"generator": KEPT[f]} if f in KEPT else {}
    lines, first = inspect.getsourcelines(f)
    at = next(i for i, line in enumerate(lines) if "ran" in line or "normal_" in line)
    where = f"{__file__.rpartition('/')[2]}:{first + at}"
    with refused(cw.errors.RecipeError, "torch-draws-once", where=where):
        cw.torch.task(made(f, **kept), nn.CrossEntropyLoss(), train=ROWS, check=check)


def seeded_here(self, x):
    np.random.seed(3)
    own = torch.Generator().manual_seed(5)
    return self.lin(x) + float(np.random.rand()) + torch.randn(3, generator=own)


def test_a_draw_that_the_call_seeds_is_a_constant_as_in_pytorch():
    task = cw.torch.task(made(seeded_here), nn.CrossEntropyLoss(), train=ROWS)
    params, state = task.init(jax.random.key(0))
    x = ROWS.columns["x"]
    theirs = made(seeded_here)(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(task.predict(params, state, {"x": x}), theirs, rtol=1e-5, atol=1e-6)
