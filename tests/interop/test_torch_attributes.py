"""What a PyTorch module keeps beside parameters and buffers, and parameters that ask for no gradient."""

import collections
import contextlib
import logging
import sys
import warnings

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.interop.adapter import flattened
from refusals import refused

torch = pytest.importorskip("torch")
pytest.importorskip("torchax")
nn, F = torch.nn, torch.nn.functional

RNG = np.random.default_rng(0)
ROWS = cw.Arrays(x=RNG.normal(size=(40, 8)).astype(np.float32), label=RNG.integers(0, 3, 40))


def made(f, lin=lambda lin: lin, **kept):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = lin(nn.Linear(8, 8))
            self.head = nn.Linear(8, 3)
            for name, value in kept.items():
                setattr(self, name, value)

        def forward(self, x):
            return self.head(f(self, x))

    torch.manual_seed(0)
    return Net()


def linear(self, x):
    return self.lin(x)


def written_alone(self, x):
    self.last = self.lin(x)
    return self.last


def cached(self, x):
    """As LeViT's attention biases: kept in evaluation, by device."""
    if self.training:
        return self.lin(x) * self.head.bias[:1]
    if "here" not in self.cache:
        self.cache["here"] = self.head.bias[:1] * 1
    return self.lin(x) * self.cache["here"]


def listed(self, x):
    self.seen.clear()
    self.seen.append(self.lin(x))
    return F.relu(self.seen[0])


def pruned(lin):
    import torch.nn.utils.prune

    return torch.nn.utils.prune.l1_unstructured(lin, "weight", amount=0.5)


FORGETFUL = {
    "weight_norm": lambda: made(linear, torch.nn.utils.weight_norm),
    "spectral_norm": lambda: made(linear, torch.nn.utils.spectral_norm),
    "prune": lambda: made(linear, pruned),
    "an attribute": lambda: made(written_alone),
    "a dict": lambda: made(cached, cache={}),
    "a list": lambda: made(listed, seen=[]),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("name", FORGETFUL)
def test_what_each_call_writes_again_is_left_as_it_was(name):
    net = FORGETFUL[name]()
    before = [dict(vars(part)) for part in net.modules()]
    task = cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS, eval=ROWS)
    recipe = cw.Recipe(task=task, batch=8, replicas=2, duration="3st", optimizer=cw.sgd(lr=0.1))
    result = cw.fit(recipe, on=cw.On(devices=1), run=None, progress="none")
    for size in (5, 7):
        assert cw.predict(result, cw.Arrays(x=ROWS.columns["x"][:size])).outputs.shape == (size, 3)
    for part, attributes in zip(net.modules(), before, strict=True):
        assert vars(part).keys() == attributes.keys()
        assert all(vars(part)[key] is value for key, value in attributes.items())
    assert getattr(net, "cache", {}) == {} and getattr(net, "seen", []) == []
    if name != "spectral_norm":  # its buffers moved
        mine = result.to_torch(FORGETFUL[name]()).eval()
        own = F.cross_entropy(
            mine(torch.from_numpy(ROWS.columns["x"])), torch.from_numpy(ROWS.columns["label"]).long()
        )
        assert result.metrics["eval/loss"] == pytest.approx(float(own.detach()), abs=1e-5)


class Inner(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.line, self.drop = nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x):
        return self.drop(self.line(x))


def made_again(self, x):
    """Replaces a part at its first call by another one of the same weights."""
    if not self.lin.drop.p:
        new = Inner(0.5)
        new.line, self.lin = self.lin.line, new
    return self.lin(x)


def test_a_layer_that_a_call_makes_passes_with_weights_that_there_are():
    net = made(made_again, lambda _: Inner())
    part, state = net.lin, torch.get_rng_state()
    task = cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS)
    recipe = cw.Recipe(task=task, batch=8, replicas=2, duration="1st", optimizer=cw.sgd(lr=0.1))
    result = cw.fit(recipe, on=cw.On(devices=1), run=None, progress="none")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.params))
    assert torch.equal(torch.get_rng_state(), state)
    assert net.lin is part and type(part.line.weight) is nn.Parameter


def test_a_layer_that_a_call_makes_with_weights_of_its_own_is_refused():
    def fresh(self, x):
        return self.lin(x) + nn.Linear(8, 8)(x)

    with refused(cw.errors.RecipeError, "torch-step-differs"):
        cw.torch.task(made(fresh), nn.CrossEntropyLoss(), train=ROWS)
    with refused(cw.errors.RecipeError, "torch-draws-once"):
        cw.torch.task(made(fresh), nn.CrossEntropyLoss(), train=ROWS, check=False)


def noted(self, x):
    self.info["l"].append(3)
    self.info["last"] = self.seen.copy()
    for container in (self.pair[0], *self.others[:2]):
        container.clear()
    for container in self.others[2:]:
        container["now"] = 3
    return self.lin(x)


@pytest.mark.parametrize("check", [True, False])
def test_what_is_kept_in_two_places_stays_one(check):
    seen, other = [1.0, 2.0], []
    info = {"l": other}
    info["itself"] = info
    others = [{1}, collections.deque([1]), collections.OrderedDict(), collections.defaultdict(list)]
    kept = {"pair": (seen, other), "deep": [[other]], "others": others}
    net = made(noted, seen=seen, info=info, **kept)
    cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS, check=check)
    assert net.seen is seen and net.pair[0] is seen and seen == [1.0, 2.0]
    assert net.info is info and list(info) == ["l", "itself"] and info["itself"] is info
    assert info["l"] is net.deep[0][0] is net.pair[1] is other and other == []
    assert others[:2] == [{1}, collections.deque([1])] and others[2:] == [{}, {}]


def test_a_recurrent_layer_keeps_nothing_but_its_parameters():
    net = made(lambda self, x: self.part(self.lin(x)[:, None])[0][:, 0], part=nn.GRU(8, 8))
    cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS, check=False)
    assert all(isinstance(w, nn.Parameter) for w in net.part._flat_weights)


def averaged(self, x):
    self.last = self.last * 0.9 + x.mean()
    return self.lin(x) + self.last


def largest(self, x):
    self.last = torch.maximum(x.abs().max(), torch.as_tensor(self.last))
    return self.lin(x) * self.last


def collected(self, x):
    self.seen.append(x.mean())
    return self.lin(x) + sum(self.seen)


REMEMBERING = {
    "averaged": (averaged, {"last": 0.0}, "last"),
    "largest": (largest, {"last": 0.0}, "last"),
    "collected": (collected, {"seen": []}, "seen"),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", REMEMBERING)
def test_what_a_later_call_reads_is_refused(name, check):
    f, kept, attribute = REMEMBERING[name]
    net = made(f, **kept)
    with refused(cw.errors.RecipeError, "torch-attribute-moves", names=[attribute]):
        cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS, check=check)
    assert getattr(net, attribute) in (0.0, [])


def test_a_checkpoint_around_batch_norm_leaves_the_modules_own_statistics():
    from torch.utils.checkpoint import checkpoint

    def f(self, x):
        return checkpoint(lambda x: F.relu(self.norm(self.lin(x))), x, use_reentrant=False)

    net = made(f, norm=nn.BatchNorm1d(8))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_parameters_without_a_gradient_stay_and_the_others_move():
    net = made(linear)
    net.lin.requires_grad_(False)
    task = cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS)
    settings = {"batch": 8, "replicas": 2, "duration": "3st", "optimizer": cw.sgd(lr=0.1, weight_decay=0.1)}
    for given, still in (((), {"lin.weight", "lin.bias"}), (("!lin/bias",), {"lin.weight"})):
        recipe = cw.Recipe(task=task, **settings, frozen=given)
        assert recipe.describe()["frozen"] == ["lin/weight", "lin/bias", *given]
        result = cw.fit(recipe, on=cw.On(devices=1), run=None, progress="none")
        own = {name: p.detach().numpy() for name, p in net.named_parameters()}
        same = {n for n, x in flattened(result.params, ".").items() if np.array_equal(x, own[n])}
        assert same == still
    net.head.requires_grad_(False)
    whole = cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS)
    with refused(cw.errors.RecipeError, "all-frozen"):
        cw.fit(cw.Recipe(task=whole, **settings), on=cw.On(devices=1), run=None, progress="none")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("check", [True, False])
def test_parameters_of_whole_numbers_stay(dtype, check):
    net = made(lambda self, x: self.lin(x[:, self.order.long()]))
    net.order = nn.Parameter(torch.tensor([1, 0, 1, 1, 0, 0, 1, 0]).to(dtype), requires_grad=False)
    task = cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS, check=check)
    recipe = cw.Recipe(task=task, batch=8, replicas=2, duration="2st", optimizer=cw.sgd(lr=0.1))
    result = cw.fit(recipe, on=cw.On(devices=1), run=None, progress="none")
    assert result.params["order"].tolist() == net.order.tolist()
    assert torch.equal(result.to_torch(net).order, net.order)
    assert not np.array_equal(result.params["lin"]["weight"], task.init(None)[0]["lin"]["weight"])


class Aliases(nn.Module):
    """Uses its parameters and buffers where `keep` has put them."""

    def __init__(self, keep, take):
        super().__init__()
        self.lin, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.alias, self.take = keep(self.lin.weight, self.mean), take

    def forward(self, x):
        weight, mean = self.take(self.alias)
        if self.training:
            with torch.no_grad():
                mean.mul_(0.5).add_(x.mean(0) * 0.5)
        return self.head(F.linear(x - self.mean, weight))


KEPT = {
    "dict": (lambda w, m: {"w": w, "m": m}, lambda kept: kept.values()),
    "list": (lambda w, m: [w, m], lambda kept: kept),
    "tuple": (lambda w, m: (w, m), lambda kept: kept),
    "nested": (lambda w, m: {"both": [(w,), m]}, lambda kept: (kept["both"][0][0], kept["both"][1])),
    "deque": (lambda w, m: collections.deque([w, m]), lambda kept: kept),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_parameters_and_buffers_in_containers_train_as_in_pytorch(name):
    torch.manual_seed(0)
    net = Aliases(*KEPT[name])
    before = net.alias
    task = cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS, eval=ROWS)
    sgd = cw.sgd(lr=0.5, momentum=0.0)
    recipe = cw.Recipe(task=task, batch=40, replicas=1, duration="3st", optimizer=sgd)
    result = cw.fit(recipe, on=cw.On(devices=1), progress="none")
    assert net.alias is before and KEPT[name][1](before) is not None
    own = torch.optim.SGD(net.parameters(), lr=0.5)
    x, y = (torch.from_numpy(np.array(ROWS.columns[n])) for n in ("x", "label"))
    for _ in range(3):
        own.zero_grad()
        F.cross_entropy(net.train()(x), y.long()).backward()
        own.step()
    wanted = net.eval()(x).detach().numpy()
    found = cw.predict(result, ROWS).outputs
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def warns_of_values(self, x):
    if (x > 100).any():
        warnings.warn("large", stacklevel=2)
    if (x < -100).any() and self.training:
        logging.getLogger("layers").warning("small")
        print("small")
    return self.lin(x)


def doubles_and_warns(self, x):
    if x.sum() > 0:
        warnings.warn("large", stacklevel=2)
        x = x * 2
    return self.lin(x)


def warns_or_doubles(self, x):
    if x.sum() > 0:
        warnings.warn("large", stacklevel=2)
    else:
        x = x * 2
    return self.lin(x)


def keeps_what_it_warns_of(self, x):
    if large := (x.abs() > 100).any().item():
        warnings.warn("large", stacklevel=2)
    return self.lin(x) * (0 if large else 1)


def clamps_by_the_name_of_a_warning(self, x):
    if (x > 0).any():
        self.warn(x)
    return self.lin(x)


def raises_by_the_name_of_a_warning(self, x):
    if (x > 100).any():
        self.error()
    return self.lin(x)


def clamps_what_it_prints(self, x):
    if (x > 0).any():
        print(x.clamp_(0))
    return self.lin(x)


def asks_a_function(self, x):
    if self.cache.setdefault("large", (x > 100).any().item()):
        warnings.warn("large", stacklevel=2)
    return self.lin(x) * (0 if self.cache.pop("large") else 1)


def test_values_that_are_read_only_to_warn_are_not_asked_for():
    cw.torch.task(made(warns_of_values), nn.CrossEntropyLoss(), train=ROWS)


@pytest.mark.filterwarnings("ignore:large:UserWarning")
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    "f",
    [
        doubles_and_warns,
        warns_or_doubles,
        keeps_what_it_warns_of,
        clamps_by_the_name_of_a_warning,
        raises_by_the_name_of_a_warning,
        clamps_what_it_prints,
        asks_a_function,
    ],
)
def test_a_branch_that_does_more_than_warn_is_refused(f, check):
    net = made(f, cache={}, warn=lambda x: x.clamp_(0), error=sys.exit)
    with refused(cw.errors.RecipeError, "torch-depends-on-values"):
        cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS, check=check)


def asserts_a_number(self, x):
    assert x.min().item() >= -100 and x.max().item() < 100
    return self.lin(x)


def asserts_a_tensor(self, x):
    assert x.isnan().sum() == 0 and (x.abs() < 100).all(), "large"
    return self.lin(x)


def asserts_that_not(self, x):
    assert not torch.isnan(x).any()
    return self.lin(x)


def asserts_a_sum(self, x):
    assert abs(x.sum().item() - x.sum().item()) / 2 < 1e-3 and -x.abs().max().item() <= 0
    return self.lin(x)


def asserts_and_raises_another(self, x):
    try:
        assert x.isfinite().all()
    except AssertionError as error:
        raise ValueError("large") from error
    return self.lin(x)


@pytest.mark.parametrize(
    "f",
    [asserts_a_number, asserts_a_tensor, asserts_that_not, asserts_a_sum, asserts_and_raises_another],
)
def test_what_is_asserted_of_values_is_left_to_the_comparison(f):
    cw.torch.task(made(f), nn.CrossEntropyLoss(), train=ROWS)
    wrong = cw.Arrays(x=np.full_like(ROWS.columns["x"], np.nan), label=ROWS.columns["label"])
    with refused(cw.errors.RecipeError, "adapter-call-fails"):
        cw.torch.task(made(f), nn.CrossEntropyLoss(), train=wrong)


def asserts_what_it_changes(self, x):
    assert x.clamp_(0).sum() >= 0
    return self.lin(x)


def asserts_one_and_not_another(self, x):
    assert (x < 100).all() and not (x > 100).any()
    return self.lin(x)


def asserts_in_a_branch(self, x):
    try:
        assert (x > 0).all()
    except AssertionError:
        return self.lin(-x)
    return self.lin(x)


def asserts_in_another_function(self, x):
    with contextlib.suppress(AssertionError):
        return asserts_a_tensor(self, 1000 * x)
    return self.lin(x)


def asserts_and_reads(self, x):
    # fmt: off
    assert x.isfinite().all(); n = x.sum().item()  # noqa: E702
    # fmt: on
    return self.lin(x) * n


def asserts_of_a_container(self, x):
    assert x.sum().item() not in (1, 2)
    return self.lin(x)


def asserts_of_a_function(self, x):
    assert max(x.sum().item(), 3) > 2
    return self.lin(x)


@pytest.mark.parametrize(
    "f",
    [
        asserts_what_it_changes,
        asserts_one_and_not_another,
        asserts_in_a_branch,
        asserts_in_another_function,
        asserts_and_reads,
        asserts_of_a_container,
        asserts_of_a_function,
    ],
)
def test_an_assert_that_is_more_than_that_is_refused(f):
    with refused(cw.errors.RecipeError, "torch-depends-on-values"):
        cw.torch.task(made(f), nn.CrossEntropyLoss(), train=ROWS)


def test_a_branch_in_another_language_is_refused(tmp_path):
    file = tmp_path / "layers.hy"
    file.write_text("(defn f [net x] (if (.any (> x 0)) (net.lin x) x))")
    names = {}
    exec(compile("def f(net, x): return net.lin(x) if (x > 0).any() else x", file, "exec"), names)
    with refused(cw.errors.RecipeError, "torch-depends-on-values", where="layers.hy:1"):
        cw.torch.task(made(names["f"]), nn.CrossEntropyLoss(), train=ROWS)
