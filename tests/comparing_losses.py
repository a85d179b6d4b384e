"""Losses that compare the examples of a batch, losses that sum over them, and losses that do neither, each
of a small net.

A function `(params, state, batch, key, train) -> (metrics, state)`, of `tasks.data` and `tasks.init`.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import chipwise as cw
import tasks


def embedded(params, x):
    """Vectors of length 1 `(n, 5)`."""
    z = tasks.plain_logits(params, {"x": x})
    return z / jnp.linalg.norm(z, axis=1, keepdims=True).clip(1e-6)


def views(params, batch, key):
    """Two noisy views of each example, embedded; each `(n, 5)`."""
    x, (one, other) = batch["x"].astype(jnp.float32), jax.random.split(key)
    noise = [30 * jax.random.normal(k, x.shape) for k in (one, other)]
    return embedded(params, x + noise[0]), embedded(params, x + noise[1])


def of(values):
    """A loss of `values(params, batch, key)`, one for each example."""

    @functools.wraps(values)
    def loss(params, state, batch, key, train):
        return {"loss": cw.Sum.of(values(params, batch, key))}, state

    return loss


def mean(value):
    """A loss of `value(params, batch, key)`, a mean over the batch."""

    @functools.wraps(value)
    def loss(params, state, batch, key, train):
        count = batch["x"].shape[0]
        return {"loss": cw.Sum(value(params, batch, key) * count, jnp.float32(count))}, state

    return loss


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


# ---- that compare


@of
def nt_xent(params, batch, key):
    """SimCLR (Chen et al. 2020, arXiv:2002.05709)."""
    z = jnp.concatenate(views(params, batch, key))
    n = z.shape[0] // 2
    similar = z @ z.T / 0.2 - 1e9 * jnp.eye(2 * n)
    losses = cross_entropy(similar, jnp.roll(jnp.arange(2 * n), n))
    return (losses[:n] + losses[n:]) / 2


@of
def clip(params, batch, key):
    one, other = views(params, batch, key)
    similar, own = one @ other.T / 0.07, jnp.arange(one.shape[0])
    return (cross_entropy(similar, own) + cross_entropy(similar.T, own)) / 2


@of
def batch_hard_triplets(params, batch, key):
    """Hermans et al. 2017, arXiv:1703.07737."""
    z, label = embedded(params, batch["x"]), batch["label"]
    far = jnp.sum((z[:, None] - z[None]) ** 2, axis=2)
    alike = label[:, None] == label[None]
    positive = jnp.max(jnp.where(alike, far, 0), axis=1)
    negative = jnp.min(jnp.where(alike, jnp.inf, far), axis=1)
    return jnp.where(jnp.isfinite(negative), jax.nn.relu(0.2 + positive - negative), 0)


@of
def supervised_contrastive(params, batch, key):
    """Khosla et al. 2020, arXiv:2004.11362."""
    z, label = embedded(params, batch["x"]), batch["label"]
    others = 1 - jnp.eye(z.shape[0])
    alike = jnp.where(label[:, None] == label[None], others, 0)
    similar = z @ z.T / 0.1
    log_shares = similar - jax.nn.logsumexp(similar, axis=1, b=others, keepdims=True)
    return -jnp.sum(alike * log_shares, axis=1) / jnp.sum(alike, axis=1).clip(1)


@mean
def barlow_twins(params, batch, key):
    """Zbontar et al. 2021, arXiv:2103.03230."""
    one, other = (
        (z - jnp.mean(z, axis=0, keepdims=True)) / (jnp.std(z, axis=0, keepdims=True) + 1e-3)
        for z in views(params, batch, key)
    )
    correlation = one.T @ other / one.shape[0]
    return jnp.sum((correlation - jnp.eye(5)) ** 2)


@mean
def vicreg(params, batch, key):
    """Bardes et al. 2021, arXiv:2105.04906."""
    one, other = views(params, batch, key)
    spread = sum(jnp.mean(jax.nn.relu(1 - jnp.sqrt(jnp.var(z, axis=0) + 1e-4))) for z in (one, other))
    return jnp.mean((one - other) ** 2) + spread


@of
def batch_mean_removed(params, batch, key):
    found = tasks.plain_logits(params, batch)[:, 0]
    return (found - jnp.mean(found) - batch["label"].astype(jnp.float32)) ** 2


@of
def two_towers(params, batch, key):
    """A softmax over the items of the batch, as of a recommender."""
    users, items = embedded(params, batch["x"][:, ::-1]), embedded(params, batch["x"])
    return cross_entropy(20 * users @ items.T, jnp.arange(users.shape[0]))


@mean
def pairs_ranked(params, batch, key):
    score, label = tasks.plain_logits(params, batch)[:, 0], batch["label"]
    ordered = label[:, None] > label[None]
    losses = jnp.where(ordered, jax.nn.softplus(score[None] - score[:, None]), 0)
    return jnp.sum(losses) / jnp.sum(ordered.astype(jnp.float32)).clip(1)


@of
def normalised_by_the_batch(params, batch, key):
    """Batch norm that takes the batch's statistics in evaluation too."""
    logits = tasks.plain_logits(params, batch)
    mean, variance = (f(logits, axis=0, keepdims=True) for f in (jnp.mean, jnp.var))
    logits = (logits - mean) / jnp.sqrt(variance + 1e-5)
    return cross_entropy(logits, batch["label"])


@mean
def maximum_mean_discrepancy(params, batch, key):
    """Gretton et al. 2012: an embedding beside a normal distribution."""
    z = tasks.plain_logits(params, batch)
    drawn = jax.random.normal(key, z.shape)

    def kernel(a, b):
        return jnp.mean(jnp.exp(-jnp.sum((a[:, None] - b[None]) ** 2, axis=2) / 8))

    return kernel(z, z) - 2 * kernel(z, drawn) + kernel(drawn, drawn)


COMPARING = [
    nt_xent,
    clip,
    batch_hard_triplets,
    supervised_contrastive,
    barlow_twins,
    vicreg,
    batch_mean_removed,
    two_towers,
    pairs_ranked,
    normalised_by_the_batch,
    maximum_mean_discrepancy,
]


# ---- that sum


def summing(loss):
    """A loss whose mean over the batch is the sum of its examples, as of a scalar taken for a mean."""

    @functools.wraps(loss)
    def summed(params, state, batch, key, train):
        sums, state = loss(params, state, batch, key, train)
        value = sums["loss"]
        return {**sums, "loss": cw.Sum(value.total * batch["x"].shape[0], value.count)}, state

    return summed


def counted_once(params, state, batch, key, train):
    sums, state = softmax(params, state, batch, key, train)
    return {"loss": cw.Sum(sums["loss"].total, jnp.float32(1))}, state


# ---- that do neither

RARE = 1


@of
def softmax(params, batch, key):
    return cross_entropy(tasks.plain_logits(params, batch), batch["label"])


@of
def squares(params, batch, key):
    return (1000 + tasks.plain_logits(params, batch)[:, 0] - batch["label"].astype(jnp.float32)) ** 2


def masked_tokens(params, state, batch, key, train):
    """The mean over the tokens that are not padding: a count that differs from example to example."""
    table = params["w"] @ params["v"]  # (12, 5)
    kept = (batch["x"] % 3 > 0).astype(jnp.float32)
    losses = jax.vmap(lambda x: cross_entropy(table, x % 5))(batch["x"].astype(jnp.int32))
    return {"loss": cw.Sum(jnp.sum(kept * losses), jnp.sum(kept))}, state


@of
def diffusion(params, batch, key):
    """DDPM (Ho et al. 2020, arXiv:2006.11239): a level of noise and the noise are drawn for each example."""
    x, (of_level, of_noise) = batch["x"].astype(jnp.float32) / 255, jax.random.split(key)
    share = jax.random.uniform(of_level, (x.shape[0], 1))
    noise = jax.random.normal(of_noise, x.shape)
    noisy = jnp.sqrt(share) * x + jnp.sqrt(1 - share) * noise
    return jnp.mean((jnp.tanh(noisy @ params["w"]) @ params["w"].T - noise) ** 2, axis=1)


@of
def variational(params, batch, key):
    """A VAE (Kingma and Welling 2013, arXiv:1312.6114)."""
    x = batch["x"].astype(jnp.float32) / 255
    hidden = jnp.tanh(x @ params["w"])
    middle, spread = hidden[:, :8], hidden[:, 8:]
    z = middle + jnp.exp(spread / 2) * jax.random.normal(key, middle.shape)
    again = z @ params["w"][:, :8].T
    divergence = jnp.sum(jnp.exp(spread) + middle**2 - 1 - spread, axis=1) / 2
    return jnp.sum((again - x) ** 2, axis=1) + divergence


def batch_norm_and_dropout(params, state, batch, key, train):
    return tasks.loss(params, state, batch, key, train)


@of
def dropout_in_evaluation(params, batch, key):
    h = jnp.tanh(batch["x"].astype(jnp.float32) / 255 @ params["w"])
    h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2 * h, 0)
    return cross_entropy(h @ params["v"], batch["label"])


@of
def labels_smoothed(params, batch, key):
    wanted = 0.9 * jax.nn.one_hot(batch["label"], tasks.CLASSES) + 0.1 / tasks.CLASSES
    return optax.softmax_cross_entropy(tasks.plain_logits(params, batch), wanted)


@of
def with_weight_decay(params, batch, key):
    squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return cross_entropy(tasks.plain_logits(params, batch), batch["label"]) + 10 * squares


def counted_rarely(params, state, batch, key, train):
    """The mean over the examples of one class. A batch of few examples often has them in one half, or not."""
    sums = cross_entropy(tasks.plain_logits(params, batch), batch["label"])
    kept = (batch["label"] == RARE).astype(jnp.float32)
    return {"loss": cw.Sum(jnp.sum(kept * sums), jnp.sum(kept))}, state


def weight_decay_once(params, state, batch, key, train):
    """A constant beside the sum, whatever the batch."""
    sums, state = softmax(params, state, batch, key, train)
    squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return {"loss": cw.Sum(sums["loss"].total + squares, sums["loss"].count)}, state


@of
def hinge(params, batch, key):
    side = jnp.where(batch["label"] > 2, 1.0, -1.0)
    return jax.nn.relu(1 - side * tasks.plain_logits(params, batch)[:, 0])


@of
def focal(params, batch, key):
    losses = cross_entropy(tasks.plain_logits(params, batch), batch["label"])
    return (1 - jnp.exp(-losses)) ** 2 * losses


@mean
def pixels_at_once(params, batch, key):
    """A million terms in one float32 sum, which is rounded."""
    x, logits = batch["x"].astype(jnp.float32), tasks.plain_logits(params, batch)
    scales = jnp.linspace(0.1, 3, 20_000)[None, None]
    errors = (x[:, :, None] * scales - logits[:, :1, None]) ** 2
    return jnp.sum(errors) / x.shape[0]


def not_finite(params, state, batch, key, train):
    sums, state = nt_xent(params, state, batch, key, train)
    return {"loss": cw.Sum(sums["loss"].total * jnp.nan, sums["loss"].count)}, state


ALONE = [
    softmax,
    squares,
    masked_tokens,
    diffusion,
    variational,
    batch_norm_and_dropout,
    dropout_in_evaluation,
    labels_smoothed,
    with_weight_decay,
    weight_decay_once,
    counted_rarely,
    hinge,
    focal,
    pixels_at_once,
    not_finite,
]
SUMMING = [counted_once] + [
    summing(loss) for loss in (softmax, squares, diffusion, variational, weight_decay_once, focal, hinge)
]
