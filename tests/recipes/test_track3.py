"""`examples/gpt2_track3.py` beside a PyTorch program of the track's description, and its files of tokens."""

import dataclasses
import math
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.recipe.duration import Clock
from chipwise.recipe.task import by_path
from chipwise.step.state import abstract_state, count
from refusals import refused

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "gpt2_track3.py")
CONTEXT, VOCABULARY, BATCH, STEPS = 16, 64, 8, 5
SIZES = {
    "context": CONTEXT,
    "vocabulary": VOCABULARY,
    "batch": BATCH,
    "steps": STEPS,
    "depth": 2,
    "width": 32,
}
SMALL = [
    *(f"{name}={size}" for name, size in SIZES.items()),
    "head=16",
    "iterated_in=float32",
    "precision=f32",
]
HEAD = 16


def small(optimizer, **changes):
    """The recipe in small, on tokens of which every step sees all, from values where nothing is 0."""
    made = cw.load(EXAMPLE, [*SMALL, f"optimizer={optimizer}", "replicas=4"], synthetic=True)
    token = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, CONTEXT + 1)).astype(np.uint16)
    first = jax.jit(lambda key: drawn(made, key))(jax.random.key(1))
    task = dataclasses.replace(
        made.task, train=cw.Arrays(token=token), eval=None, init=lambda key: (first, {})
    )
    return dataclasses.replace(made, task=task, **changes), token, first


def drawn(recipe, key):
    """Parameters of deviation 0.3, gains around 1: logits reach the cap, and every part has a gradient."""
    leaves, structure = jax.tree.flatten(recipe.task.init(key)[0])
    keys = jax.random.split(key, len(leaves))
    noise = [0.3 * jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)]
    ones = [float(leaf.ndim == 1 and leaf.size and path.endswith("gains")) for path, leaf in named(recipe)]
    return jax.tree.unflatten(structure, [n + one for n, one in zip(noise, ones, strict=True)])


def named(recipe):
    return by_path(jax.eval_shape(recipe.task.init, jax.random.key(0))[0]).items()


# ---- The description in PyTorch


def torch_loss(torch, p, token):
    """The summed cross-entropy of `token` `(n, context + 1)`. `p`: tensors by chipwise's paths."""
    functional = torch.nn.functional

    def norm(x, gains=None):
        return functional.rms_norm(x, x.shape[-1:], gains)

    def line(x, name):
        return x @ p[f"{name}/kernel"] + p[f"{name}/bias"]

    def rotate(x):
        """Pairs of the two halves as complex numbers, which turn clockwise."""
        pairs = x.shape[-1] // 2
        speed = torch.zeros(pairs, dtype=x.dtype)
        speed[: pairs // 2] = (1 / 1024) ** torch.linspace(0, 1, pairs // 2, dtype=x.dtype)
        angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * speed
        turned = torch.complex(x[..., :pairs], x[..., pairs:]) * torch.polar(torch.ones_like(angle), -angle)
        return torch.cat([turned.real, turned.imag], -1)

    text = torch.from_numpy(token.astype(np.int64))
    x = norm(p["words"][text[:, :-1]], p["norm1/gains"])
    for i in range(SIZES["depth"]):
        at = f"blocks/{i}"
        y = norm(x, p[f"{at}/norm1/gains"])
        q, k, v = (
            line(y, f"{at}/attention/{name}").unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        q, k = rotate(norm(q)), rotate(norm(k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12)
        x = x + line(y.transpose(1, 2).flatten(-2), f"{at}/attention/out")
        hidden = line(norm(x, p[f"{at}/norm2/gains"]), f"{at}/hidden")
        x = x + line(hidden.relu() ** 2, f"{at}/out")
    logits = line(norm(x, p["norm2/gains"]), "head")
    capped = 15 * logits / torch.sqrt(logits**2 + 15**2)
    return functional.cross_entropy(capped.flatten(0, 1), text[:, 1:].flatten(), reduction="sum")


class Muon:
    """Momentum 0.95, Nesterov's look ahead, twelve iterations, and decoupled decay."""

    def __init__(self, torch, matrices, decay):
        self.torch, self.matrices, self.decay = torch, matrices, decay
        self.velocity = [torch.zeros_like(p) for p in matrices]

    def step(self, lr):
        with self.torch.no_grad():
            for p, velocity in zip(self.matrices, self.velocity, strict=True):
                velocity.lerp_(p.grad, 0.05)
                x = p.grad.lerp(velocity, 0.95)
                x = x / (x.norm() + 1e-7)
                for _ in range(12):  # in the small dimension either way: the product is the same
                    gram = x.T @ x
                    x = x @ (2 * self.torch.eye(len(gram), dtype=x.dtype) - 1.5 * gram + 0.5 * gram @ gram)
                p.mul_(1 - lr * self.decay).sub_(lr * max(1, p.shape[1] / p.shape[0]) ** 0.5 * x)


def torch_steps(optimizer, token, first, rates):
    """The mean loss of each step, and the parameters at the end, as NumPy arrays by path."""
    torch = pytest.importorskip("torch")
    p = {name: torch.tensor(np.asarray(leaf), requires_grad=True) for name, leaf in by_path(first).items()}
    matrices = [x for name, x in p.items() if x.ndim == 2 and name.startswith("blocks")]
    vectors = [x for x in p.values() if x.ndim == 1]
    groups = {"words_lr": [p["words"]], "head_lr": [p["head/kernel"]], "vectors_lr": vectors}
    beside = torch.optim.AdamW(
        [{"params": params} for params in groups.values()],
        betas=(0.8, 0.95),
        eps=1e-10,
        weight_decay={"muon": 0.001, "adamw": 0.0}[optimizer],
    )
    if optimizer == "muon":
        muon = Muon(torch, matrices, 0.05)
    else:
        adamw = torch.optim.AdamW(matrices, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        loss = torch_loss(torch, p, token)
        for x in p.values():
            x.grad = None
        loss.backward()
        for group, name in zip(beside.param_groups, groups, strict=True):
            group["lr"] = float(rates[name][step])
        beside.step()
        if optimizer == "muon":
            muon.step(float(rates["lr"][step]))
        else:
            adamw.param_groups[0]["lr"] = float(rates["lr"][step])
            adamw.step()
        losses.append(loss.item() / token[:, 1:].size)
    return losses, {name: x.detach().numpy() for name, x in p.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* never reaches its inner schedule")  # five steps of 250
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_five_steps_in_float32_are_those_of_pytorch(optimizer):
    recipe, token, first = small(optimizer)
    losses, params = torch_steps(optimizer, token, first, recipe.optimizer.tables(recipe.clock))
    found = []
    with cw.Stepper(recipe, cw.On(devices=1)) as stepper:
        while stepper.done < stepper.total:
            stepper.step()
            found.append(stepper.metrics()["loss"])
        moved = by_path(stepper.state()[0])
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for name, expected in params.items():
        np.testing.assert_allclose(moved[name], expected, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_five_steps_in_float64_are_those_of_pytorch(optimizer):
    recipe, token, first = small(optimizer)
    rates = recipe.optimizer.tables(recipe.clock)
    with jax.enable_x64(True):
        made = cw.load(EXAMPLE, [*SMALL, f"optimizer={optimizer}", "iterated_in=float64"], synthetic=True)
        params = first = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), first)

        def mean(params):
            loss = recipe.task.loss(params, {}, {"token": jnp.asarray(token)}, None, True)[0]["loss"]
            return loss.total / loss.count.astype(jnp.float64)

        state, found, slope = made.optimizer.init(params), [], jax.jit(jax.value_and_grad(mean))
        for step in range(STEPS):
            value, grads = slope(params)
            found.append(float(value))
            hyper = {name: table[step] for name, table in rates.items()}
            params, state = made.optimizer.update(grads, state, params, hyper)
    losses, expected = torch_steps(optimizer, token, first, rates)
    np.testing.assert_allclose(found, losses, rtol=1e-12)
    for name, leaf in by_path(params).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-8, atol=1e-8, err_msg=name)


# ---- Sizes, schedules, files


@pytest.mark.parametrize(
    "optimizer, steps, rise, peak", [("muon", 3250, 0, 0.025), ("adamw", 5625, 250, 0.0015)]
)
def test_rates_are_those_of_the_track(optimizer, steps, rise, peak):
    recipe = cw.load(EXAMPLE, [f"optimizer={optimizer}", f"steps={steps}"])
    assert recipe.clock.total == steps and recipe.epochs == 1 and not recipe.warnings()
    table = recipe.optimizer.tables(Clock(examples=1, batch=1, total=steps))["lr"]
    for step in (0, 1, 100, 249, 250, 1000, 2000, steps - 1):
        falling = min(1.0, (1 - step / steps) / 0.7) * (min(1.0, (step + 1) / rise) if rise else 1.0)
        assert math.isclose(table[step], peak * falling, rel_tol=3e-4)


def test_sizes_are_those_of_the_track():
    state = abstract_state(cw.load(EXAMPLE))
    vectors = 12 * (4 * 768 + 3072 + 768 + 2 * 768) + 2 * 768 + 50_304
    assert count(state.params) == 12 * 12 * 768**2 + 2 * 50_304 * 768 + vectors


def written(path, tokens, magic=20240520):
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())


def sequences(folder, count):
    sizes = {"batch": 2, "context": 3, "vocabulary": 64}
    return runpy.run_path(EXAMPLE)["Sequences"](str(folder), "train", count, **sizes)


def test_files_are_cut_into_the_tracks_sequences(tmp_path):
    written(
        tmp_path / "fineweb_train_000001.bin", range(15)
    )  # two steps of six tokens, and what they predict
    written(tmp_path / "fineweb_train_000002.bin", range(20, 33))  # one, since a second lacks its last token
    source = sequences(tmp_path, 6)
    rows = cw.data.take(source, np.array([0, 1, 3, 4, 5]))["token"]
    assert rows.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [9, 10, 11, 12], [20, 21, 22, 23], [23, 24, 25, 26]]
    assert rows.dtype == np.uint16 and source[4]["token"].tolist() == [20, 21, 22, 23] and len(source) == 6


@pytest.mark.parametrize(
    "code, magic, cut, count",
    [("tokens-few", 20240520, 0, 7), ("tokens-header", 20240521, 0, 6), ("tokens-header", 20240520, 1, 6)],
)
def test_too_few_tokens_and_other_files_are_refused(tmp_path, code, magic, cut, count):
    path = tmp_path / "fineweb_train_000001.bin"
    written(path, range(20), magic)
    path.write_bytes(path.read_bytes()[: 1024 + 2 * 20 - cut])
    with refused(cw.errors.DataError, code):
        sequences(tmp_path, count)[0]


def test_no_tokens_and_unknown_optimizers_are_refused():
    with refused(cw.errors.DataError, "tokens-absent"):
        cw.load(EXAMPLE).task.train[0]
    with refused(cw.errors.RecipeError, "optimizer-unknown", known=["muon", "adamw"]):
        cw.load(EXAMPLE, ["optimizer=adam"])


@pytest.mark.slow
def test_a_training_from_files_has_the_same_bits_on_three_devices(tmp_path):
    random = np.random.default_rng(0)
    tokens = STEPS * BATCH * CONTEXT
    written(tmp_path / "fineweb_train_000001.bin", random.integers(0, VOCABULARY, tokens + 2))
    written(tmp_path / "fineweb_val_000000.bin", random.integers(0, VOCABULARY, 4 * tokens + 2))
    made = cw.load(EXAMPLE, [*SMALL, "replicas=4"], data=tmp_path)
    one, three = (cw.fit(made, on=cw.On(devices=n), progress="none") for n in (1, 3))
    assert one.fingerprint == three.fingerprint and one.metrics == three.metrics
