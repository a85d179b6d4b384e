"""What is kept of each case in `tests/golden`, how it is computed, and what has moved.

    programs/CASE.json          digests of the step's programs, of their traces alone
    keys/CASE.json              keys of the programs for absent chips, as in a plan's cache
    trainings/KIND/CASE.json    after `STEPS` steps the fingerprint, metrics, and the ledger

**Programs and keys** are of what is traced. They are equal on every processor, in every checkout
and in any order of the cases. They hold for the versions of packages in `holds.json` beside them,
and are compared only there. A program's digest is the one by which a run knows that it continues
with the same code: of what follows the picking of examples, without names and places. A key is of
the whole program, the compiler's options and the chip.

**Trainings** are the bits themselves. They are equal on all device counts, which is checked on
every machine. They are compared with stored ones only on the kind of processor (`kind_here`) that
these were stored for: XLA compiles for the widest vectors of a processor, and sums in another
order for others.

A value may move with a package's version, or where what a recipe computes is meant to change. If
a digest moves and no training does, the same bits come from other operations, and a run that an
earlier version began asks whether it may continue. If a key moves, every user's plans compile
again. If a training moves and no digest does, something outside of the programs changed: the
compiler, its options, the order of the data, or the sum over devices.
"""

from __future__ import annotations

import datetime
import inspect
import json
import platform
import re
import tempfile
from pathlib import Path
from typing import Any

import jax

import chipwise as cw
from chipwise.chips.targets import named, sizes
from chipwise.machine.host_facts import installed
from chipwise.machine.plugins import text_in
from chipwise.planner.ask import PlanRequest
from chipwise.planner.compile_step import _exported, _requests
from chipwise.recipe.source import rows_of, spec_of
from chipwise.run.evaluate import evaluation
from chipwise.run.folder.run_reader import read_ledger
from chipwise.run.session import Session
from chipwise.step.program_digest import digest
from chipwise.step.state import abstract_model, first_digest

FOLDER = Path(__file__).with_name("golden")

PARTS = ("programs", "keys", "trainings")

CHIPS = ("v5e", "a100", "t4")

Values = dict[str, Any]


# ---- what is computed


def programs(recipe: cw.Recipe) -> Values:
    """Program name to digest: "first" makes the first state, "evaluation" is a block of it."""
    with Session(recipe, cw.On(devices=recipe.shards, platform="cpu", feed="device")) as session:
        group = session.placement.local[0]
        made = {"first": first_digest(recipe)}
        for program in session.programs.blueprint.programs:
            traced = jax.make_jaxpr(inspect.unwrap(program.function))(*group.shapes(program.specs))
            made[program.name] = digest([traced])
    source = recipe.task.eval
    if source is not None:
        computes = evaluation(recipe, source, group.device)
        columns = rows_of(spec_of(source), computes.size)
        given = (*abstract_model(recipe), columns, jax.ShapeDtypeStruct((2,), "int32"))
        made["evaluation"] = digest([jax.make_jaxpr(computes.block)(*given)])
    return {name: _short(value) for name, value in made.items()}


def keys(recipe: cw.Recipe) -> Values:
    """Target to program name to key, on the fewest chips that hold a replica. Compiles nothing.

    The versions of compilers, which are a part of a key in the cache, are left out.
    """
    made: Values = {}
    # Neither prices nor the cache are read: a plan ends here before its programs are compiled.
    question = PlanRequest(recipe, prices=(), today=datetime.date.min, cache=Path())
    for name in CHIPS:
        target = next(sizes(named(name), recipe.shards))
        step = question.traced(target)
        asked = _requests(target, step, _exported(step, target.chip))
        # Exchanges follow, whose keys are of the text of the code that makes them.
        exported = asked[: len(step.programs)]
        made[target.name] = {one.name: _short(one.key(versions="")) for one in exported}
    return made


def training(recipe: cw.Recipe, devices: int) -> Values:
    """The fingerprint, the metrics and the digests after each step, by a run on `devices`."""
    on = cw.On(devices=devices, platform="cpu")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        result = cw.fit(recipe, run, on=on, ledger="1st", log_every="1st", progress="none")
        ledger = read_ledger(run)
    assert ledger is not None
    rows = {str(step): row for step, row in ledger.rows.items()}
    return {"fingerprint": result.fingerprint, "metrics": dict(result.metrics), "rows": rows}


def _short(sha256: str) -> str:
    """Enough of a SHA-256 to tell two values apart, and to be read in a line."""
    return sha256[:16]


# ---- where it is stored, and what it holds for


def versions_here() -> dict[str, str | None]:
    """The packages that decide what is traced and compiled."""
    return {package: installed(package) for package in ("jax", "jaxlib", "flax", "optax")}


def kind_here() -> str:
    """What decides bits besides a program, such as `x86_64-AuthenticAMD-25-1-avx2-jax-0.10.2`.

    It names the processor's architecture, maker, family, model and widest vectors, and JAX's
    version.
    """
    said = dict(re.findall(r"(?m)^(\w[\w ]*?)\s*: ?(.*)$", text_in("/proc/cpuinfo")))
    fields = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    flags = (said.get("flags") or said.get("Features") or "").split()
    vectors = next((name for name in ("avx512f", "avx2", "sve", "asimd") if name in flags), "plain")
    parts = [platform.machine(), *(said[name] for name in fields if name in said), vectors]
    return "-".join([*parts, "jax", jax.__version__])


def folder_of(part: str) -> Path:
    """Where this machine's values of a part are, or would be."""
    return FOLDER / part / kind_here() if part == "trainings" else FOLDER / part


def why_not_compared(part: str) -> str | None:
    """Why values computed here cannot be compared with the stored ones; `None` if they can."""
    file, here = folder_of(part) / "holds.json", versions_here()
    if not file.exists():
        return f"no golden {part} are stored in {folder_of(part).relative_to(FOLDER)}"
    held = json.loads(file.read_text())
    if held == here:
        return None
    there = ", ".join(f"{name} {held[name]}" for name in held if held[name] != here.get(name))
    return f"golden {part} hold for {there}"


def stored(part: str, name: str) -> Values | None:
    """The stored values of a case; `None` for a case that is new."""
    file = folder_of(part) / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def store(part: str, name: str, values: Values) -> None:
    """Writes the values of a case, a line for each step or chip."""
    folder = folder_of(part)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "holds.json").write_text(json.dumps(versions_here(), indent=1) + "\n")
    text = json.dumps(values, indent=1)
    text = _INNERMOST.sub(lambda found: re.sub(r"\s*\n\s*", " ", found[0]), text)
    (folder / f"{name}.json").write_text(text + "\n")


_INNERMOST = re.compile(r"(?<=: )\{[^{}]*\}")
"""In JSON, an object that is a value, and contains none."""


# ---- what has moved


def moved(old: Values | None, new: Values) -> list[str]:
    """What differs between values of a case: programs, keys, or the ledger's first other row."""
    if old is None:
        return ["nothing is stored for this case"]
    rows = _first_row(old.get("rows", {}), new.get("rows", {}))
    return [*rows, *_differing(_named(old), _named(new))]


def _named(values: Values, before: str = "") -> dict[str, Any]:
    """All values but rows, by their names: `replica`, or `a100 replica`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name != "rows":
            flat |= _named(value, f"{before}{name} ")
        elif name != "rows":
            flat[before + name] = value
    return flat


def _first_row(old: dict[str, Values], new: dict[str, Values]) -> list[str]:
    """The first step with another row, and which of its digests are others."""
    for step in sorted({*old, *new}, key=int):
        if old.get(step) != new.get(step):
            about = f"step {step} is the first that differs: "
            differing = _differing(old.get(step, {}), new.get(step, {}))
            return [about + "; ".join(differing)]
    return []


def _differing(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    return [f"{name}: {old.get(name, 'absent')} -> {new.get(name, 'absent')}" for name in names]
