"""The optimizers that are called like PyTorch's make the same updates, at the rates of a scheduler."""

import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.recipe.duration import Clock

torch = pytest.importorskip("torch")
sched = torch.optim.lr_scheduler

STEPS = 100
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, cw.sgd, {"lr": 0.1, "momentum": 0.0}),
    "momentum": (torch.optim.SGD, cw.sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.03}),
    "nesterov": (
        torch.optim.SGD, cw.sgd, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    ),
    "adam": (torch.optim.Adam, cw.adam, {"lr": 0.01, "eps": 1e-6}),
    "adamw": (torch.optim.AdamW, cw.adamw, {"lr": 0.01, "weight_decay": 0.1}),
}  # fmt: skip
SCHEDULERS = {
    "none": lambda o: sched.ConstantLR(o, 1.0, 1),
    "cosine": lambda o: sched.CosineAnnealingLR(o, T_max=60, eta_min=1e-3),
    "milestones": lambda o: sched.MultiStepLR(o, [20, 20, 55], gamma=0.3),
}


def slope(number, i, shape):
    """A gradient of its own for each step and parameter; were it the parameter's, rounding would grow."""
    return np.sin(np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + number * (i + 1))


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_updates_at_the_same_rates(name, schedule):
    theirs, ours, settings = OPTIMIZERS[name]
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 5)]
    start = {str(i): jnp.asarray(p.detach().numpy()) for i, p in enumerate(weights)}
    optimizer = theirs(weights, **settings)
    scheduler, rates, path = SCHEDULERS[schedule](optimizer), [], []
    for step in range(STEPS):
        rates.append(scheduler.get_last_lr()[0])
        for i, p in enumerate(weights):
            p.grad = torch.from_numpy(slope(step, i, p.shape))
        optimizer.step()
        scheduler.step()
        path.append([p.detach().numpy().copy() for p in weights])
    own = ours(**{**settings, "lr": lambda step: rates[step]})
    tables = own.tables(Clock.for_run(80, 8, f"{STEPS}st"))
    params, state = start, own.init(start)
    for step, expected in enumerate(path):
        grads = {name: jnp.asarray(slope(step, int(name), p.shape)) for name, p in params.items()}
        hyper = {name: table[step] for name, table in tables.items()}
        params, state = own.update(grads, state, params, hyper)
        for i, values in enumerate(expected):
            np.testing.assert_allclose(params[str(i)], values, rtol=5e-6, atol=5e-6, err_msg=f"step {step}")
