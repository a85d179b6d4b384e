"""PyTorch's optimizers and schedulers: the same updates as PyTorch's own, 100 steps long."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.recipe.duration import Clock
from chipwise.recipe.schedules import from_json, tabulated
from refusals import refused

torch = pytest.importorskip("torch")
pytest.importorskip("torchax")
sched = torch.optim.lr_scheduler

STEPS, BATCH, EXAMPLES = 100, 8, 80  # 10 steps an epoch


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def groups(module, **other):
    return [{"params": module[0].parameters()}, {"params": module[2].parameters(), **other}]


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum and decay": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.03),
    "nesterov": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.8, 0.99), eps=1e-6),
    "adam with L2": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "adam as adamw": lambda m: torch.optim.Adam(
        m.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "groups of sgd": lambda m: torch.optim.SGD(
        groups(m, lr=0.01, weight_decay=0.2, momentum=0.5), lr=0.1, momentum=0.9
    ),
    "groups of adamw": lambda m: torch.optim.AdamW(groups(m, lr=0.001, weight_decay=0.0), lr=0.01),
    "a part": lambda m: torch.optim.SGD(m[2].parameters(), lr=0.1, momentum=0.9),
}
SCHEDULERS = {
    "one cycle": (lambda o: sched.OneCycleLR(o, max_lr=0.2, total_steps=STEPS), "step"),
    "one cycle, straight": (
        lambda o: sched.OneCycleLR(
            o, 0.2, total_steps=STEPS, pct_start=0.13, anneal_strategy="linear", three_phase=True
        ),
        "step",
    ),
    "cosine": (lambda o: sched.CosineAnnealingLR(o, T_max=60, eta_min=1e-3), "step"),
    "cosine by epoch": (lambda o: sched.CosineAnnealingLR(o, T_max=10), "epoch"),
    "steps": (lambda o: sched.StepLR(o, 3, gamma=0.3), "epoch"),
    "milestones": (lambda o: sched.MultiStepLR(o, [20, 20, 55], gamma=0.3), "step"),
    "linear": (lambda o: sched.LinearLR(o, 0.1, 0.9, total_iters=30), "step"),
    "sequence": (
        lambda o: sched.SequentialLR(
            o,
            [
                sched.LinearLR(o, 0.1, total_iters=10),
                sched.CosineAnnealingLR(o, T_max=70),
                sched.StepLR(o, 5),
            ],
            milestones=[10, 80],
        ),
        "step",
    ),
    "function": (lambda o: sched.LambdaLR(o, lambda step: 0.9 ** (step // 7)), "step"),
    "chain": (
        lambda o: sched.ChainedScheduler([sched.ConstantLR(o, 0.5, 20), sched.ExponentialLR(o, 0.98)]),
        "step",
    ),
    "restarts": (lambda o: sched.CosineAnnealingWarmRestarts(o, 4, T_mult=2), "epoch"),
    "their own": (lambda o: Doubling(o), "epoch"),
}


class Doubling(sched.LRScheduler):
    """A user's own: the rate goes up, and the decay down."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 0.5
        return [group["lr"] * 1.1 for group in self.optimizer.param_groups]


def slope(number, i, shape):
    """A gradient of its own for each step and parameter; were it the parameter's, rounding would grow."""
    return np.sin(np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + number * (i + 1))


def theirs(module, optimizer, scheduler, step):
    """Parameters after each step."""
    path = []
    for number in range(STEPS):
        for i, p in enumerate(module.parameters()):
            p.grad = torch.from_numpy(slope(number, i, p.shape))
        optimizer.step()
        if scheduler is not None and (step == "step" or (number + 1) % (EXAMPLES // BATCH) == 0):
            scheduler.step()
        path.append([p.detach().clone().numpy() for p in module.parameters()])
    return path


def ours(module, optimizer):
    params = {}
    for name, p in module.named_parameters():
        head, tail = name.split(".")
        params.setdefault(head, {})[tail] = jnp.asarray(p.detach().numpy())
    names = [name.split(".") for name, _ in module.named_parameters()]
    tables = optimizer.tables(Clock.for_run(EXAMPLES, BATCH, f"{STEPS}st"))
    state, path = optimizer.init(params), []
    for step in range(STEPS):
        grads = {head: {} for head in params}
        for i, (head, tail) in enumerate(names):
            grads[head][tail] = jnp.asarray(slope(step, i, params[head][tail].shape))
        hyper = {name: table[step] for name, table in tables.items()}
        params, state = optimizer.update(grads, state, params, hyper)
        path.append([np.asarray(params[head][tail]) for head, tail in names])
    return path


def check(make, schedule=None, step=None):
    module = net()
    optimizer = make(module)
    scheduler = schedule(optimizer) if schedule else None
    length = {"step": STEPS, "epoch": STEPS * BATCH // EXAMPLES}.get(step)
    read = cw.torch.optimizer(optimizer, scheduler, module=module, step=step, length=length)
    for number, (a, b) in enumerate(
        zip(ours(module, read), theirs(module, optimizer, scheduler, step), strict=True)
    ):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=5e-6, atol=5e-6, err_msg=f"step {number}")
    return read


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("sgd", "adam") else pytest.mark.slow) for n in OPTIMIZERS]
)
def test_the_same_updates(name):
    read = check(OPTIMIZERS[name])
    known = {
        "sgd": cw.sgd,
        "momentum and decay": cw.sgd,
        "nesterov": cw.sgd,
        "adam": cw.adam,
        "adamw": cw.adamw,
    }
    if name in known:
        assert isinstance(read, known[name])
    assert read.elementwise == (not name.startswith(("groups", "a part")))
    json.dumps(read.describe())
    assert "0x" not in str(read.describe())


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_same_rates_as_the_scheduler(name):
    schedule, step = SCHEDULERS[name]
    read = check(OPTIMIZERS["momentum and decay"], schedule, step)
    again = from_json(json.loads(json.dumps(read.lr.json())))
    assert again == read.lr and isinstance(again, tabulated) and again.each == step
    clock = Clock.for_run(EXAMPLES, BATCH, f"{STEPS}st")
    half = read.lr.with_peak(read.lr.highest(clock) / 2).table(clock)
    np.testing.assert_allclose(half, read.lr.table(clock) / 2, rtol=1e-6)


def test_one_cycle_moves_the_first_average_of_adam_and_each_group():
    check(OPTIMIZERS["adam"], SCHEDULERS["one cycle"][0], "step")
    both = check(
        OPTIMIZERS["groups of sgd"], lambda o: sched.OneCycleLR(o, [0.2, 0.03], total_steps=STEPS), "step"
    )
    assert both.hyper["lr_1"].highest(Clock(EXAMPLES, BATCH, STEPS)) == 0.03


def test_the_scheduler_itself_stays_as_it_was():
    optimizer = OPTIMIZERS["sgd"](net())
    scheduler = SCHEDULERS["one cycle"][0](optimizer)
    before = optimizer.param_groups[0]["lr"]
    first, again = (cw.torch.optimizer(optimizer, scheduler, step="step") for _ in range(2))
    assert first == again and len(first.lr.values) == STEPS
    assert optimizer.param_groups[0]["lr"] == before and scheduler.last_epoch == 0


@pytest.mark.parametrize(
    ("optimizer", "schedule", "given", "code"),
    [
        (lambda m: torch.optim.RMSprop(m.parameters()), None, {}, "torch-optimizer-unknown"),
        (lambda m: torch.optim.Adam(m.parameters(), amsgrad=True), None, {}, "torch-optimizer-setting"),
        (lambda m: torch.optim.SGD(m.parameters(), maximize=True), None, {}, "torch-optimizer-setting"),
        (lambda m: torch.optim.SGD(m.parameters(), dampening=0.5), None, {}, "torch-optimizer-setting"),
        (OPTIMIZERS["groups of sgd"], None, {}, "torch-groups-unnamed"),
        (OPTIMIZERS["sgd"], None, {"module": torch.nn.Linear(1, 1)}, "torch-optimizer-foreign"),
        (OPTIMIZERS["sgd"], lambda o: sched.CosineAnnealingLR(o, 5), {}, "torch-scheduler-step"),
        (
            OPTIMIZERS["sgd"],
            lambda o: sched.ReduceLROnPlateau(o),
            {"step": "epoch", "length": 3},
            "torch-scheduler-reads-loss",
        ),
        (OPTIMIZERS["sgd"], lambda o: sched.StepLR(o, 5), {"step": "epoch"}, "torch-scheduler-length"),
        (
            OPTIMIZERS["sgd"],
            lambda o: sched.OneCycleLR(o, 0.1, total_steps=10),
            {"step": "step", "length": 12},
            "torch-scheduler-fails",
        ),
        (
            OPTIMIZERS["sgd"],
            lambda o: sched.StepLR(OPTIMIZERS["sgd"](net()), 5),
            {"step": "step"},
            "torch-scheduler-foreign",
        ),
        (lambda m: "adam", None, {}, "torch-no-optimizer"),
    ],
)
def test_what_has_no_equal_is_refused_by_name(optimizer, schedule, given, code):
    made = optimizer(net())
    with refused(cw.errors.RecipeError, code):
        cw.torch.optimizer(made, schedule(made) if schedule else None, **given)


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("every", [False, True])
def test_hooks_of_the_step_are_refused_by_name(when, every):
    made = OPTIMIZERS["sgd"](net())
    hidden = sys.modules["torch.optim.optimizer"]
    of, name = (hidden, "optimizer_step") if every else (made, "step")
    handle = getattr(of, f"register_{name}_{when}_hook")(lambda *_: None)
    try:
        with refused(cw.errors.RecipeError, "torch-step-hook", kind="SGD", hook=f"register_step_{when}_hook"):
            cw.torch.optimizer(made)
    finally:
        handle.remove()
    cw.torch.optimizer(made)


def test_what_has_been_used_is_refused():
    module = net()
    optimizer = OPTIMIZERS["sgd"](module)
    scheduler = sched.StepLR(optimizer, 5)
    optimizer.step(), scheduler.step()
    with refused(cw.errors.RecipeError, "torch-scheduler-used", kind="StepLR", steps=1):
        cw.torch.optimizer(optimizer, scheduler, step="step")
    theirs(module, adam := OPTIMIZERS["adam"](module), None, None)
    with refused(cw.errors.RecipeError, "torch-optimizer-used"):
        cw.torch.optimizer(adam)
