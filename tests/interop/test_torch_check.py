"""The door's comparison with eager PyTorch: random layers draw the same numbers on both sides."""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from refusals import refused

torch = pytest.importorskip("torch")
pytest.importorskip("torchax")
nn, F = torch.nn, torch.nn.functional

RNG = np.random.default_rng(0)
ROWS = cw.Arrays(x=RNG.normal(size=(40, 8)).astype(np.float32), label=RNG.integers(0, 3, 40))


def made(f, **parts):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.head = nn.Linear(8, 3)
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, x):
            return self.head(f(self, self.lin(x)))

    torch.manual_seed(0)
    return Net()


def drop_path(self, x):
    """As timm's."""
    if not self.training:
        return x
    kept = x.new_empty((x.shape[0], 1)).bernoulli_(0.7)
    kept.div_(0.7)
    return x + F.relu(x) * kept


def stochastic_depth(self, x):
    """As torchvision's."""
    if not self.training:
        return x
    noise = torch.empty([x.shape[0], 1], dtype=x.dtype, device=x.device).bernoulli_(0.7)
    return x + F.relu(x) * noise.div_(0.7)


def drop_path_of_transformers(self, x):
    if not self.training:
        return x
    noise = 0.7 + torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device)
    return x + F.relu(x).div(0.7) * noise.floor_()


def recomputed(self, x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x: F.dropout(F.relu(x), 0.5, self.training), x, use_reentrant=False)


def sequence(self, x):
    return self.part(x[:, None] * torch.arange(1.0, 4.0)[:, None])


def first(out):
    return out[0] if isinstance(out, tuple) else out


RANDOM = {
    "functional": (lambda self, x: F.dropout(x, 0.3, self.training), {}),
    "functional, in place": (lambda self, x: F.dropout(x * 1, 0.3, self.training, inplace=True), {}),
    "Dropout": (lambda self, x: self.part(x), {"part": nn.Dropout(0.5)}),
    "AlphaDropout": (lambda self, x: self.part(x), {"part": nn.AlphaDropout(0.5)}),
    "RReLU": (lambda self, x: self.part(x), {"part": nn.RReLU()}),
    "noise": (lambda self, x: x + 0.1 * torch.randn(x.shape) * self.training, {}),
    "gumbel_softmax": (lambda self, x: F.gumbel_softmax(x) if self.training else x, {}),
    "drop path": (drop_path, {}),
    "stochastic depth": (stochastic_depth, {}),
    "drop path of transformers": (drop_path_of_transformers, {}),
    "a checkpoint": (recomputed, {}),
    "attention": (
        lambda self, x: first(sequence(self, x)).mean(1),
        {"part": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)},
    ),
    "LSTM": (
        lambda self, x: first(sequence(self, x)).mean(1),
        {"part": nn.LSTM(8, 8, 2, batch_first=True, dropout=0.5)},
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_layer_as_it_comes_passes(name):
    f, parts = RANDOM[name]
    net = made(f, **parts)
    task = cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS)
    params, state = task.init(jax.random.key(0))
    batch = {name: jnp.asarray(column) for name, column in ROWS.columns.items()}
    value = jax.jit(lambda key: task.loss(params, state, batch, key, True)[0]["loss"].total)
    assert value(jax.random.key(0)) != value(jax.random.key(1)) or name == "LSTM"


def other_rate(self, x):
    return F.dropout(x, 0.5 if type(x) is torch.Tensor else 0.4, self.training)


def other_shape(self, x):
    eager = type(x) is torch.Tensor
    kept = x.new_empty(x.shape if eager else (x.shape[0], 1)).bernoulli_(0.5)
    return x * kept


@pytest.mark.parametrize("f", [other_rate, other_shape])
def test_a_random_layer_that_tracing_changes_is_refused(f):
    with refused(cw.errors.RecipeError, "torch-step-differs", module="Net"):
        cw.torch.task(made(f), nn.CrossEntropyLoss(), train=ROWS)


def layers(decide, draw=lambda: torch.rand([])):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            for layer in self.layers:
                x = decide(layer, x, draw() if self.training else 1.0)
            return self.head(F.relu(x))

    torch.manual_seed(0)
    return Net()


def as_transformers(layer, x, drawn):
    skipped = drawn < 0.4
    if not skipped:
        x = layer(x)
    return x


def as_bart(layer, x, drawn):
    dropped = False
    if drawn < 0.4:
        dropped = True
    return x if dropped else layer(x)


@pytest.mark.parametrize("decide", [as_transformers, as_bart])
def test_a_layer_that_is_left_out_by_chance_passes(decide):
    task = cw.torch.task(layers(decide), nn.CrossEntropyLoss(), train=ROWS, eval=ROWS)
    params, state = task.init(jax.random.key(0))
    batch = {name: jnp.asarray(column) for name, column in ROWS.columns.items()}
    value = jax.jit(lambda key: task.loss(params, state, batch, key, True)[0]["loss"].total)
    values = {float(value(jax.random.key(i))) for i in range(60)}
    assert 6 <= len(values) <= 8  # each of three layers is there or not


@pytest.mark.parametrize("decide", [as_transformers, as_bart])
def test_layers_that_draw_are_left_out_by_chance(decide):
    net = layers(decide)
    net.layers = nn.ModuleList(nn.Sequential(layer, nn.Dropout(0.5)) for layer in net.layers)
    net.head = nn.Sequential(nn.Dropout(0.5), net.head)
    cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS)


def other_branch(layer, x, drawn):
    if drawn < 0.4:
        x = x * 2
    return layer(x)


def unlike_its_input(layer, x, drawn):
    return x if drawn < 0.4 else F.relu(layer(x))


def beside_its_input(layer, x, drawn):
    return x if drawn < 0.4 else x + layer(x)


@pytest.mark.parametrize("decide", [other_branch, unlike_its_input, beside_its_input])
def test_another_choice_by_chance_is_refused(decide):
    lines, first = inspect.getsourcelines(decide)
    line = next(i for i, text in enumerate(lines, first) if "drawn < 0.4" in text)
    where = f"{__file__.rpartition('/')[2]}:{line}"
    with refused(cw.errors.RecipeError, "torch-draw-decides", where=where):
        cw.torch.task(layers(decide), nn.CrossEntropyLoss(), train=ROWS)


def test_a_layer_is_left_out_only_after_a_comparison():
    task = cw.torch.task(layers(as_bart), nn.CrossEntropyLoss(), train=ROWS)
    assert task.predict is not None
    with refused(cw.errors.RecipeError, "torch-draw-decides"):
        cw.torch.task(layers(as_bart), nn.CrossEntropyLoss(), train=ROWS, check=False)


def gated_by(least, eager_only=0.0):
    """A gate on a sum of large terms that is 0 but for rounding: float32 opens it by chance."""

    def f(self, x):
        wide = torch.cat([x * 1e4, 1e3 * x.flip(1), -1e4 * x.flip(1), -1e3 * x], 1)
        gate = wide.sum(1, keepdim=True) + least > 0
        return torch.where(gate, x, -2 * x) * (1 + eager_only * (type(x) is torch.Tensor))

    return f


def test_a_difference_near_a_kink_is_repeated_in_float64():
    torch.manual_seed(0)
    cw.torch.task(made(gated_by(1e-8)), nn.CrossEntropyLoss(), train=ROWS)
    with refused(cw.errors.RecipeError, "torch-step-differs"):
        cw.torch.task(made(gated_by(1e-8, 0.5)), nn.CrossEntropyLoss(), train=ROWS)


TRANSFORMERS = {
    "bert": ("BertForSequenceClassification", {"intermediate_size": 32, "vocab_size": 50}),
    "gpt2": ("GPT2ForSequenceClassification", {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50}),
    "opt": ("OPTForSequenceClassification", {"ffn_dim": 32, "word_embed_proj_dim": 16, "vocab_size": 50}),
    "t5": ("T5EncoderModel", {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_model_of_transformers_with_its_dropouts_passes(name):
    transformers = pytest.importorskip("transformers")
    kind, settings = TRANSFORMERS[name]
    model = getattr(transformers, kind)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
    small = {} if name in ("gpt2", "t5") else small
    config = model.config_class(**small, **settings, pad_token_id=0)
    with contextlib.suppress(AttributeError):
        config.use_cache = False
    torch.manual_seed(0)
    ids = RNG.integers(3, 50, (8, 6)).astype(np.int32)

    def loss(out, label):
        logits = out["logits"] if "logits" in out else out["last_hidden_state"][:, 0, :3]
        return F.cross_entropy(logits[:, :3], label)

    data = cw.Arrays(ids=ids, label=RNG.integers(0, 2, 8))
    cw.torch.task(model(config), loss, train=data, inputs={"input_ids": "ids"})


def test_eager_pytorch_runs_once_in_each_mode_unless_a_tensor_is_kept():
    calls = []

    def counted(self, x):
        calls.append((type(x) is torch.Tensor, self.training))
        return x

    def keeping(self, x):
        self.last = counted(self, x)
        return self.last

    for f, more in ((counted, 0), (keeping, 6)):
        calls.clear()
        cw.torch.task(made(f), nn.CrossEntropyLoss(), train=ROWS)
        eager = [training for is_eager, training in calls if is_eager]
        assert len(eager) == 2 + more and eager[:2] == [True, False]
