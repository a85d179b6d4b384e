"""PyTorch's optimizers and schedulers: the same updates as PyTorch's own, 100 steps long."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.recipe.duration import Clock
from chipwise.recipe.schedules import from_json, tabulated
from chipwise.recipe.task import by_path
from chipwise.step.state import abstract_state, refuse_part
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


def made(kind, **settings):
    return lambda module: getattr(torch.optim, kind)(module.parameters(), **settings)


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
    "maximized sgd": made("SGD", lr=0.01, momentum=0.9, weight_decay=0.03, maximize=True),
    "dampened sgd": made("SGD", lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.03),
    "amsgrad": made("Adam", lr=0.01, amsgrad=True),
    "amsgrad with L2": made("Adam", lr=0.01, amsgrad=True, weight_decay=0.1, maximize=True),
    "adamw with amsgrad": made("AdamW", lr=0.01, betas=(0.8, 0.9), amsgrad=True),
    "maximized adamw": made("AdamW", lr=0.01, maximize=True),
    "adagrad": made("Adagrad", lr=0.1),
    "adagrad, all": made(
        "Adagrad", lr=0.1, lr_decay=0.02, weight_decay=0.1, initial_accumulator_value=0.3, maximize=True
    ),
    "adadelta": made("Adadelta"),
    "adadelta, all": made("Adadelta", lr=0.5, rho=0.8, eps=1e-4, weight_decay=0.1),
    "adamax": made("Adamax", lr=0.01),
    "adamax, all": made("Adamax", lr=0.01, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1),
    "nadam": made("NAdam", lr=0.01),
    "nadam with L2": made("NAdam", lr=0.01, weight_decay=0.1, momentum_decay=0.1),
    "nadam with decay": made("NAdam", lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": made("RAdam", lr=0.01),
    "radam with L2": made("RAdam", lr=0.01, betas=(0.8, 0.9), weight_decay=0.1),
    "radam with decay": made("RAdam", lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "radam of few steps": made("RAdam", lr=0.01, betas=(0.9, 0.5)),
    "rmsprop": made("RMSprop", lr=0.01),
    "rmsprop with momentum": made("RMSprop", lr=0.01, alpha=0.9, momentum=0.9, weight_decay=0.1),
    "centered rmsprop": made("RMSprop", lr=0.01, centered=True, eps=1e-3),
    "rmsprop, all": made("RMSprop", lr=0.01, centered=True, momentum=0.5, weight_decay=0.1, maximize=True),
    "asgd": made("ASGD", lr=0.1),
    "asgd, all": made("ASGD", lr=0.1, lambd=0.02, alpha=0.9, weight_decay=0.1),
    "rprop": made("Rprop", lr=0.01),
    "rprop, all": made("Rprop", lr=0.02, etas=(0.4, 1.3), step_sizes=(1e-3, 0.1), maximize=True),
    "groups of rmsprop": lambda m: torch.optim.RMSprop(
        groups(m, lr=0.002, momentum=0.5, centered=True, weight_decay=0.1, maximize=True), lr=0.01
    ),
    "groups of adam": lambda m: torch.optim.Adam(
        groups(m, betas=(0.5, 0.8), amsgrad=True, weight_decay=0.1), lr=0.01
    ),
    "groups of nadam": lambda m: torch.optim.NAdam(
        groups(m, betas=(0.5, 0.99), decoupled_weight_decay=True), lr=0.01, weight_decay=0.1
    ),
    "groups of radam": lambda m: torch.optim.RAdam(groups(m, betas=(0.5, 0.8), lr=0.1), lr=0.01),
    "groups of adagrad": lambda m: torch.optim.Adagrad(groups(m, lr_decay=0.1, lr=0.1), lr=0.01),
    "groups of adagrad with a beginning": lambda m: torch.optim.Adagrad(
        groups(m, initial_accumulator_value=5.0), lr=0.1, initial_accumulator_value=0.3
    ),
    "groups of adadelta": lambda m: torch.optim.Adadelta(groups(m, rho=0.5), weight_decay=0.1),
    "groups of adamax": lambda m: torch.optim.Adamax(groups(m, weight_decay=0.1), lr=0.01),
    "groups of asgd": lambda m: torch.optim.ASGD(groups(m, lambd=0.1, lr=0.2), lr=0.01),
    "groups of rprop": lambda m: torch.optim.Rprop(groups(m, etas=(0.2, 1.1), lr=0.02), lr=0.01),
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


class Own(torch.optim.SGD):
    """A user's own."""


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
        "adam with L2": cw.adam,
        "adamw": cw.adamw,
        "rmsprop": cw.recipe.rmsprop,
    }
    if name in known:
        assert isinstance(read, known[name])
    assert read.elementwise == (not name.startswith(("groups", "a part")))
    json.dumps(read.describe())
    assert "0x" not in str(read.describe())


def test_groups_are_described_as_in_stored_runs():
    module = net()
    made = torch.optim.Adam(groups(module, weight_decay=0.1, lr=0.1), lr=0.01)
    fixed = "{'b2': 0.999, 'eps': 1e-08}"
    about = f"kind='Adam', fixed=({fixed}, {fixed}), names=2+2 parameters"
    first, second = {"b1": 0.9, "lr": 0.01, "weight_decay": 0.0}, {"b1": 0.9, "lr": 0.1, "weight_decay": 0.1}
    assert cw.torch.optimizer(made, module=module).describe() == {
        "optimizer": "from_optax",
        "make": f"partial(chipwise.interop.torch_optimizer.groups, {about})",
        **first,
        **{f"{name}_1": value for name, value in second.items()},
    }


class Around(torch.nn.Module):
    """A net in a module with a head of its own, as in Lightning."""

    def __init__(self):
        super().__init__()
        self.net, self.head = net(), torch.nn.Linear(2, 2)


def updated(read, params):
    """The parameters by path after a step along a gradient of ones."""
    hyper = {name: schedule.value for name, schedule in read.hyper.items()}
    return by_path(read.update(jax.tree.map(jnp.ones_like, params), read.init(params), params, hyper)[0])


def test_groups_whose_names_are_none_of_the_task_are_refused():
    around = Around()
    made = torch.optim.SGD(groups(around.net, lr=0.01), lr=0.1)
    params = {"0": {"weight": jnp.zeros((4, 3))}, "2": {"weight": jnp.zeros((2, 4))}}
    facts = {"name": "net/0/weight", "near": "0/weight"}
    with refused(cw.errors.RecipeError, "torch-groups-elsewhere", **facts):
        cw.torch.optimizer(made, module=around).init(params)
    moved = updated(cw.torch.optimizer(made, module=around.net), params)
    assert {name: float(np.max(x)) for name, x in moved.items()} == pytest.approx(
        {"0/weight": -0.1, "2/weight": -0.01}
    )


def test_an_optimizer_of_a_part_without_a_module_is_refused_in_use():
    module = net()
    rows = cw.Arrays(x=np.zeros((16, 3), np.float32), label=np.arange(16) % 2)
    task = cw.torch.task(module, torch.nn.CrossEntropyLoss(), train=rows, check=False)
    part = cw.torch.optimizer(torch.optim.SGD(module[2].parameters(), lr=0.1))

    def begun(optimizer, task=task, **more):
        recipe = cw.Recipe(task=task, batch=8, duration="2st", optimizer=optimizer, **more)
        refuse_part(recipe, abstract_state(recipe).params)

    for optimizer in (part, part.replace(lr=cw.one_cycle(0.2)), part.held(Clock(16, 8, 2))):
        with refused(cw.errors.RecipeError, "torch-optimizer-part", held=10, trained=26):
            begun(optimizer)
    with refused(cw.errors.RecipeError, "torch-optimizer-part"):
        begun(cw.recipe.grouped(part, {"*bias": {"lr": 2}}))
    begun(part, frozen=("0/*",))
    begun(cw.torch.optimizer(torch.optim.SGD(module.parameters(), lr=0.1)))
    begun(part, tasks.quick().task)  # its numbers alone, for a net that is not PyTorch's


def test_adapters_are_in_the_group_of_their_matrix():
    module = net()
    read = cw.torch.optimizer(torch.optim.SGD(groups(module, lr=0.01), lr=0.1), module=module)
    parts = {"lora_a": jnp.zeros((3, 1)), "lora_b": jnp.zeros((1, 4))}
    moved = updated(read, {"0": {"weight": parts, "bias": jnp.zeros(4)}, "2": {"weight": parts}, "3": parts})
    assert {name: float(np.max(x)) for name, x in moved.items()} == pytest.approx(
        {"0/bias": -0.1}
        | {f"{n}/{part}": r for n, r in [("0/weight", -0.1), ("2/weight", -0.01), ("3", 0)] for part in parts}
    )


@pytest.mark.slow
@pytest.mark.as_users_compile
@pytest.mark.parametrize("kind, own", [("NAdam", {"betas": (0.5, 0.8)}), ("ASGD", {"lambd": 0.1})])
def test_groups_have_the_bits_of_one_device_on_three(kind, own):
    module = torch.nn.Module()
    for name in ("w", "scale", "v"):  # not "shift", which stays as it is
        module.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))
    parts = [{"params": [module.w]}, {"params": [module.scale, module.v], "lr": 0.01, **own}]
    read = cw.torch.optimizer(getattr(torch.optim, kind)(parts, weight_decay=0.01), module=module)
    recipe = tasks.quick(optimizer=read, duration="6st")
    one, *three = (
        cw.fit(recipe, on=cw.On(devices=n, shard_optimizer=shard), progress="none")
        for n, shard in ((1, False), (3, True), (3, False))
    )
    assert [run.devices["update"] for run in three] == ["sharded", "whole"]
    assert {run.fingerprint for run in three} == {one.fingerprint}
    begun = jax.device_get(recipe.task.init(jax.random.key(0))[0])
    moved = {name for name, leaf in begun.items() if not np.array_equal(leaf, one.params[name])}
    assert moved == {"w", "scale", "v"}


INPUTS = np.sin(np.arange(60.0)).reshape(20, 3)
TARGETS = np.cos(np.arange(40.0)).reshape(20, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.drawn(share=0.25)
def test_a_small_net_trains_to_the_same_weights_in_float64(name):
    torch.set_default_dtype(torch.float64)
    try:
        module = net()
        optimizer = OPTIMIZERS[name](module)
        read = cw.torch.optimizer(optimizer, module=module)
        begun = {n: p.detach().numpy().copy() for n, p in module.named_parameters()}
        x, y = torch.from_numpy(INPUTS), torch.from_numpy(TARGETS)
        for _ in range(50):
            optimizer.zero_grad()
            ((module(x) - y) ** 2).mean().backward()
            optimizer.step()
        theirs = {n: p.detach().numpy() for n, p in module.named_parameters()}
    finally:
        torch.set_default_dtype(torch.float32)

    def loss(params):
        hidden = jnp.tanh(INPUTS @ params["0"]["weight"].T + params["0"]["bias"][None])
        outputs = hidden @ params["2"]["weight"].T + params["2"]["bias"][None]
        return ((outputs - TARGETS) ** 2).mean()

    def step(_, state):
        return read.update(jax.grad(loss)(state[0]), state[1], state[0], hyper)

    with jax.enable_x64(True):
        params = {head: {} for head in ("0", "2")}
        for path, value in begun.items():
            head, tail = path.split(".")
            params[head][tail] = jnp.asarray(value)
        hyper = {setting: jnp.float64(schedule.value) for setting, schedule in read.hyper.items()}
        params, _ = jax.jit(lambda state: jax.lax.fori_loop(0, 50, step, state))((params, read.init(params)))
        for path, value in theirs.items():
            head, tail = path.split(".")
            assert np.abs(value - begun[path]).max() > 1e-3 or name == "a part"
            np.testing.assert_allclose(params[head][tail], value, rtol=1e-10, atol=1e-10, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dampened sgd", "nadam", "radam", "rmsprop with momentum", "asgd", "rprop"])
def test_the_same_updates_with_a_scheduler(name):
    check(OPTIMIZERS[name], *SCHEDULERS["cosine"])


def test_rprop_reads_the_first_rate_alone():
    check(OPTIMIZERS["rprop"], lambda o: sched.LambdaLR(o, lambda step: step // 7 % 2), "step")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dampened sgd", "amsgrad", "adamw", "adamax", "nadam", "radam"])
def test_the_same_updates_with_averages_that_a_scheduler_moves(name):
    check(OPTIMIZERS[name], *SCHEDULERS["one cycle"])


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
        (lambda m: Own(m.parameters()), None, {}, "torch-optimizer-unknown"),
        (lambda m: torch.optim.LBFGS(m.parameters()), None, {}, "torch-optimizer-evaluates"),
        (lambda m: torch.optim.SparseAdam(m.parameters()), None, {}, "torch-optimizer-sparse"),
        (lambda m: torch.optim.Muon([m[0].weight]), None, {}, "torch-optimizer-other"),
        (lambda m: torch.optim.Adafactor(m.parameters()), None, {}, "torch-optimizer-other"),
        (lambda m: torch.optim.ASGD(m.parameters(), t0=0), None, {}, "torch-optimizer-averages"),
        (
            lambda m: torch.optim.Adam(groups(m, decoupled_weight_decay=True)),
            None,
            {},
            "torch-optimizer-setting",
        ),
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
    theirs(module, adagrad := OPTIMIZERS["adagrad"](module), None, None)
    with refused(cw.errors.RecipeError, "torch-optimizer-used"):
        cw.torch.optimizer(adagrad)
    theirs(module, adam := OPTIMIZERS["adam"](module), None, None)
    with refused(cw.errors.RecipeError, "torch-optimizer-used"):
        cw.torch.optimizer(adam)
