"""Nothing that only says where and how a recipe runs changes a bit, for nets that a seed draws."""

import dataclasses

import numpy as np
import pytest

import chipwise as cw
import small_nets

QUICK = (*range(17), 29, 61, 236)
"""5 and 29 differ by feed where `replica` picks its examples, 61 by devices where a gather takes its
rows, and 236 where a device updates a single value."""

KEPT = (13,)
"""Those of `QUICK` that are kept, stopped and resumed, which takes three runs. The others are streamed, and
slow tests keep many more."""

FIRSTS = range(30, 330, 10)
AT_ONCE = 10  # nets of a test, from each of `FIRSTS` on


def answer(recipe: cw.Recipe, **how) -> tuple[str, dict]:
    """The fingerprint of a run, and what it evaluated, with all bits, or where it diverged. (How many steps
    "train/loss" is of depends on `log_every`.)"""
    try:
        with np.errstate(all="ignore"):
            result = cw.fit(recipe, **{"progress": "none", "eval_every": None, "log_every": "1st", **how})
    except cw.errors.DivergedError as error:
        return "diverged", {"step": error.facts["step"]}
    evaluated = {name: value for name, value in sorted(result.metrics.items()) if name.startswith("eval/")}
    return result.fingerprint, {name: float(value).hex() for name, value in evaluated.items()}


def ways(seed: int, recipe: cw.Recipe) -> list[dict]:
    """Two other ways to run, which draw every field of `On` and every switch of `fit` that must not change a
    bit. Those that cost a program or a file each are spread over seeds."""
    rng, blocks = np.random.default_rng([seed, 1]), recipe.block_count
    counts = [int(n) for n in range(1, min(blocks, 8) + 1)]
    devices = int(rng.choice(counts))
    cut = np.sort(rng.choice(np.arange(1, blocks), devices - 1, replace=False)) if blocks > 1 else []
    shares = np.diff([0, *cut, blocks])
    streamed = cw.On(
        devices=devices,
        shares=tuple(int(n) for n in shares) if rng.integers(2) and devices > 1 else (),
        feed="host",
        workers=int(rng.integers(1, 3)),
        shard_optimizer=bool(rng.integers(2)) and devices > 1,
        stuck=0,
    )
    kept = cw.On(
        devices=counts[-1],
        feed="device",
        verify="50%" if blocks > 1 and rng.integers(2) else "0%",
        noise=bool(blocks > 1 and rng.integers(2)),
    )
    return [{"on": streamed}, {"on": kept, "ledger": "1st", "eval_every": "4st"}]


def check(seed: int, folder, *, only: int | None = None) -> None:
    """Compares the net's plain run with its three other ways, or `only` one of them."""
    recipe = small_nets.recipe(seed)
    plain = answer(recipe, on=cw.On(devices=1, feed="device"))
    streamed, kept = ways(seed, recipe)
    if only is None:
        many = cw.On(devices=1, feed="device", steps_per_call=2 + seed % 9)
        assert answer(recipe, on=many, log_every="20st") == plain, (seed, many)
    if only != 1:
        assert answer(recipe, **streamed) == plain, (seed, streamed)
    if only != 0:
        answer(recipe, run=folder / str(seed), stop_after="5st", **kept)
        on = dataclasses.replace(kept["on"], verify="0%", noise=False)
        told = {**kept, "on": on, "checkpoint_every": "1st", "keep": 1}
        assert answer(recipe, run=folder / str(seed), **told) == plain, (seed, kept)


@pytest.mark.as_users_compile
@pytest.mark.parametrize("seed", QUICK)
def test_no_way_to_run_changes_a_bit(seed, tmp_path):
    check(seed, tmp_path, only=int(seed in KEPT))


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("first", FIRSTS)
def test_nor_for_many(first, tmp_path):
    for seed in range(first, first + AT_ONCE):
        check(seed, tmp_path)
