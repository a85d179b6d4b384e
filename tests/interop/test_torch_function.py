"""The backward passes that modules state themselves."""

import jax
import numpy as np
import pytest

import chipwise as cw
from refusals import refused

torch = pytest.importorskip("torch")
pytest.importorskip("torchax")
nn, F = torch.nn, torch.nn.functional
ROWS = cw.Arrays(x=np.random.RandomState(0).randn(40, 5).astype("f"), label=np.arange(40) % 3)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rate):
        ctx.rate = rate
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope):
        return -ctx.rate * slope, None


class Rounded(torch.autograd.Function):
    """In the newer form, with a context of its own."""

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx, slope):
        x, rounded = ctx.saved_tensors
        return slope * ((x - rounded).abs() < 0.4).to(slope.dtype)


class Product(torch.autograd.Function):
    """Two inputs with a gradient, two outputs, of which one has whole numbers, and a draw."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.noise = torch.rand_like(x)
        ctx.save_for_backward(x, weight)
        best = x.argmax(-1)
        ctx.mark_non_differentiable(best)
        return (x + ctx.noise) @ weight.t() + bias, best

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope, none):
        x, weight = ctx.saved_tensors
        return slope @ weight * 0.5 + none.sum(), slope.t() @ (x * ctx.noise), None


class Unread(torch.autograd.Function):
    """Two outputs with a gradient, of which one is marked to have none."""

    @staticmethod
    def forward(ctx, x):
        twice = x * 2
        ctx.mark_non_differentiable(twice)
        return x * 3, twice

    @staticmethod
    def backward(ctx, slope, twice):
        return slope * 5 + twice


class ByValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, slope):
        return slope * 2 if slope.sum() > 1e9 else slope


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, slope):
        return slope * 2


def stopped(self, x):
    with torch.no_grad():
        still = Reversed.apply(self.line(x), 2.0)
    return self.head(still + self.line(x))


def unread(self, x):
    first, second = Unread.apply(self.line(x))
    return self.head(first + second)


CALLS = {
    "reversed": lambda self, x: self.head(Reversed.apply(self.line(x), 0.3)),
    "rounded": lambda self, x: self.head(Rounded.apply(self.line(x))),
    "product": lambda self, x: Product.apply(self.line(x), self.head.weight, self.head.bias)[0],
    "no gradient": stopped,
    "an output without one": unread,
    "twice": lambda self, x: self.head(Reversed.apply(Rounded.apply(self.line(x) * 2), 2.0)),
    "of a constant": lambda self, x: self.head(self.line(x)) + Reversed.apply(torch.ones(3), 1.0),
}


class Net(nn.Module):
    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.line, self.head, self.call = nn.Linear(5, 5), nn.Linear(5, 3), call

    def forward(self, x):
        return self.call(self, x)


@pytest.mark.parametrize("name", CALLS)
def test_the_gradient_is_that_of_its_backward(name):
    """The comparison holds every gradient against eager PyTorch's, with the same draws."""
    task = cw.torch.task(Net(CALLS[name]), nn.CrossEntropyLoss(), train=ROWS)
    assert cw.torch.task(Net(CALLS[name]), nn.CrossEntropyLoss(), train=ROWS, check=False).predict
    params, state = task.init(jax.random.key(0))
    assert task.predict(params, state, {"x": ROWS.columns["x"]}).shape == (40, 3)


@pytest.mark.parametrize("name", ["rounded", "product"])
def test_its_bits_are_equal_on_any_number_of_devices(name):
    task = cw.torch.task(Net(CALLS[name]), nn.CrossEntropyLoss(), train=ROWS)
    recipe = cw.Recipe(task=task, batch=6, replicas=3, duration="5st", optimizer=cw.sgd(lr=0.1))
    assert len({cw.fit(recipe, on=cw.On(devices=n)).fingerprint for n in (1, 3)}) == 1


def backward_of(function, **methods):
    """A class with `x * 2` forward, and other methods."""
    own = {"forward": lambda ctx, x, *more: x * 2, "backward": lambda ctx, slope: slope * 2, **methods}
    statics = {name: staticmethod(method) for name, method in own.items()}
    return type(function, (torch.autograd.Function,), statics)


def written(ctx, x, *more):
    return x.mul_(2)


def kept_module(ctx, x, net):
    ctx.net = net
    return x * net.head.weight.mean()


OTHERS = {
    "a backward that draws": (backward_of("Draws", backward=lambda ctx, g: g * torch.rand_like(g)), ()),
    "a module in ctx": (
        backward_of("Keeps", forward=kept_module, backward=lambda ctx, g: (g * ctx.net.head.weight[0], None)),
        ("net",),
    ),
    "writes into its input": (backward_of("Writes", forward=written), ()),
    "is no tensor": (
        backward_of("Says", forward=lambda ctx, x: (x * 2, 0.5), backward=lambda ctx, g, _: g * 2),
        (),
    ),
    "a gradient of shape": (backward_of("Narrow", backward=lambda ctx, g: g.sum(0)), ()),
    "complex": (backward_of("Waves", forward=lambda ctx, x: torch.fft.fft(x)), ()),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_what_would_be_another_gradient_is_refused(reason):
    function, more = OTHERS[reason]

    def call(self, x):
        result = function.apply(self.line(x), *(self for _ in more))
        return self.head(torch.real(result[0] if isinstance(result, tuple) else result))

    with refused(cw.errors.RecipeError, "torch-not-traced") as caught:
        task = cw.torch.task(Net(call), F.cross_entropy, train=ROWS, check=False)
        params, state = task.init(jax.random.key(0))
        jax.grad(lambda p: task.loss(p, state, ROWS.columns, jax.random.key(0), True)[0]["loss"].total)(
            params
        )
    assert reason in caught.value.facts["reason"]


def test_a_parameter_that_ctx_does_not_keep_is_refused_in_a_backward():
    net = Net(None)
    function = backward_of("Reads", backward=lambda ctx, g: g * net.head.weight.mean())
    net.call = lambda self, x: self.head(function.apply(self.line(x)))
    with refused(cw.errors.RecipeError, "torch-not-traced") as caught:
        cw.torch.task(net, F.cross_entropy, train=ROWS)
    assert "reads a parameter" in caught.value.facts["reason"]


def test_a_gradient_has_the_dtype_of_its_input_and_defaults_are_given():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(x, rate=2.0):
            return x * rate

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.rate = inputs[1]

        @staticmethod
        def backward(ctx, slope):
            return (slope * ctx.rate).half(), None

    net = Net(lambda self, x: self.head(Scaled.apply(self.line(x))))
    cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS)


def test_a_checkpoint_of_the_batch_itself_has_no_gradient_in_pytorch():
    from torch.utils.checkpoint import checkpoint

    with refused(cw.errors.RecipeError, "torch-step-differs"):
        net = Net(lambda self, x: self.head(checkpoint(self.line, x, use_reentrant=True)))
        cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS)


def test_a_backward_that_reads_values_is_refused_at_its_line():
    with refused(cw.errors.RecipeError, "torch-depends-on-values") as caught:
        cw.torch.task(
            Net(lambda self, x: self.head(ByValue.apply(self.line(x)))), F.cross_entropy, train=ROWS
        )
    assert "test_torch_function.py" in caught.value.facts["where"]
    assert caught.value.facts["module"] == "ByValue.backward"


def test_a_forward_that_writes_into_its_input_is_refused():
    with refused(cw.errors.RecipeError, "torch-not-traced"):
        net = Net(lambda self, x: self.head(Dirty.apply(self.line(x))))
        cw.torch.task(net, F.cross_entropy, train=ROWS)


def test_a_checkpoint_keeps_the_gradient_of_its_forward_pass():
    from torch.utils.checkpoint import checkpoint

    def call(self, x):
        return checkpoint(lambda h: self.head(Rounded.apply(h).tanh()), self.line(x), use_reentrant=True)

    cw.torch.task(Net(call), nn.CrossEntropyLoss(), train=ROWS)
