"""Counts what the host starts in a step on a GPU that is not here, by XLA's own list of a program's thunks.

    python benchmarks/launches.py                     # what has no row yet, then the page
    python benchmarks/launches.py --only mnist --on h100

A thunk is a kernel, a copy or a call of a library. XLA puts those that it may record into CUDA graphs
("command buffers"), and writes the list that it runs beside its other dumps. The programs are compiled for
the chip by its own compiler, in a process that shows it, with the options of an untuned run. Each becomes
a row of `launches.csv` at once, so that a stopped program continues. A row that is there is not made again.
"""

from __future__ import annotations

import argparse
import collections
import csv
import functools
import hashlib
import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__)
ROWS = HERE.with_suffix(".csv")
NETS = ("mnist", "digits", "cifar10-davidnet")
REPLICAS = (1, 8)
TARGETS = ("t4", "a100", "h100")
OLD_DRIVER, DEFAULT, SINGLE, MANY = "old driver", "XLA's default", "single steps", "many steps"
FORMS = {OLD_DRIVER: ("h100",), DEFAULT: ("h100",), SINGLE: TARGETS, MANY: ()}
"""The targets of each form. One of many steps is compiled beside its single steps."""
VERSIONS = {OLD_DRIVER: "12.2.0"}
"""The version of CUDA that the driver has. XLA reads it to know what a graph may have."""
RUNTIME = "12.9.0"
EQUAL = "equal"
STEPS = 32  # of a call that runs many
COLUMNS = ["net", "replicas", "target", "form", "program", "calls"]
COLUMNS += ["alone", "graphs", "commands", "broken_by", "kernels", "jax"]

ABOUT = """# What the host starts in a step on a GPU

`python benchmarks/launches.py`, by XLA's compiler ({versions}) for GPUs that are not here. Nobody measured
any of it on a GPU: `python benchmarks/gpu.py --next` does, where one is at hand.

A step's programs run on one device with its data: `pick` once, `replica` once for each replica, `reduce` and
`update` once, or `step` in place of the last three for one replica. A *launch* is what the host starts: a
thunk (a kernel, a copy or a call of a library) by itself, or a CUDA graph. *Commands* are the thunks within
the graphs, which the GPU starts by itself.

* `old driver`: one before CUDA 12.3, for which XLA leaves calls of libraries out of graphs.
* `XLA's default`: without the option that puts convolutions into graphs.
* `single steps`: as chipwise compiles.
* `many steps`: `On(steps_per_call={steps})`, one program with a loop over steps, and in it one over replicas.
  Nets with more than 32 MB of gradients over all replicas have none.
"""

FOUND = """
## What it says

* **Outside of graphs there is hardly anything left to take in.** Each program with at least five thunks
  (`xla_gpu_graph_min_graph_size`) is one graph from its first to its last thunk. What stays are the two
  gathers of `pick` and the addition of `reduce`, too few for a graph.
* **What breaks a graph into pieces** are convolutions without `CONVOLUTION` in
  `xla_gpu_enable_command_buffer`, and all calls of libraries where the driver is older than CUDA 12.3 or its
  version is unknown. Pieces of fewer than five thunks then stay outside too. Copies within the device and
  sorts break nothing. No net here has a thunk of another kind.
* **A loop in a graph**, by programs compiled by hand that are in no row, needs `WHILE` and
  `xla_gpu_graph_min_graph_size=1`. XLA counts a loop as one thunk whatever is in it. With the usual five, a
  program that is a loop and three copies gets no graph, and neither does its loop's body. Without `WHILE`,
  each turn's body is a graph, and the host waits for the loop's condition in each turn.
* **Bits**: what XLA may take into graphs changes no program's kernels, in all that rounds. Those of many
  steps are those of `replica`, `reduce` and `update` together in {equal} of {all_} cases above. Where XLA
  fuses otherwise within the loop, chipwise sees that in the compiled text, and a call runs a single step.
* **What a graph costs**: XLA records its commands again where an array of a call is at another address than
  in the call before. In a step, each call of `replica` has another result. With many steps in a call there is
  one graph, recorded at most once a call.
"""


@dataclass(frozen=True)
class Launches:
    """What a program starts: thunks by themselves, by kind, graphs, and the commands in these."""

    alone: collections.Counter[str]
    graphs: int
    commands: int


_THUNK = re.compile(r"^( *)\d+: (k\w+)")
_GRAPH = "kCommandBuffer"


def counted(text: str) -> Launches:
    """Reads a list of thunks as XLA dumps it. What is in a loop or a branch counts once."""
    alone, graphs, commands = collections.Counter[str](), 0, 0
    inside: int | None = None
    for indent, kind in ((len(m[1]), m[2]) for m in map(_THUNK.match, text.splitlines()) if m):
        if inside is not None and indent > inside:
            commands += 1
            continue
        inside = indent if kind == _GRAPH else None
        graphs += kind == _GRAPH
        alone[kind] += kind != _GRAPH
    return Launches(+alone, graphs, commands)


def dumped(folder: Path) -> Iterator[tuple[str, Launches]]:
    """The name of each program that XLA dumped into `folder`, and what it starts."""
    for file in sorted(folder.glob("*.thunk_sequence.txt")):
        name = file.name.removesuffix(".thunk_sequence.txt")
        converted = folder / f"{name}.thunk_sequence_after_thunk_passes.txt"
        text = (converted if converted.exists() else file).read_text()
        yield re.sub(r"^module_\d+\.(jit_)?", "", name), counted(text)


# ---- in a process that shows the compiler


def step_of(net: str, replicas: int) -> tuple[Any, Any]:
    """The step on one GPU, and its blueprint."""
    import chipwise as cw
    from chipwise.step.blueprint import blueprint
    from chipwise.step.layout import Layout
    from chipwise.step.step import Step

    recipe = cw.load(net, [f"replicas={replicas}"], synthetic=net != "digits")
    step = Step(recipe, Layout.of(recipe, 1))
    return step, blueprint(step, resident=True, platform="gpu")


def rows_of(net: str, replicas: int, target: str, form: str) -> Iterator[dict[str, Any]]:
    """A row for each program of the step."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from chipwise.chips.targets import parse
    from chipwise.compile import absent_device
    from chipwise.machine.compiler import LOOPS, compiler_options
    from chipwise.machine.program_kernels import kernels, same
    from chipwise.step.blueprint import many_steps

    jax.devices()
    place = parse(target)
    about, _ = absent_device.topologies(place)
    driver = f'driver_version: "{VERSIONS.get(form, RUNTIME)}" runtime_version: "{RUNTIME}"'
    stated = f'gpu_device_info {{ {driver} compile_time_toolkit_version: "{RUNTIME}"'
    config = about["target_config"].replace("gpu_device_info {", stated, 1)
    (device,) = topologies.get_topology_desc(platform="cuda", **{**about, "target_config": config}).devices
    options = compiler_options("cuda", True, place.chip.device_kinds[0]) or {}
    if form == DEFAULT:
        del options["xla_gpu_enable_command_buffer"]

    def row(name: str, calls: int, lowered: Callable[[str], Any]) -> tuple[dict[str, Any], Any]:
        """The row of a program that is lowered to be dumped to a folder, and its kernels."""
        with tempfile.TemporaryDirectory() as folder:
            made = lowered(folder).compile()
            ((_, found),) = dumped(Path(folder))
        rounding = kernels(made.as_text())
        broken_by = " ".join(f"{kind}:{n}" for kind, n in sorted(found.alone.items()))
        about = {"net": net, "replicas": replicas, "target": target, "form": form}
        counts = {"alone": found.alone.total(), "graphs": found.graphs, "commands": found.commands}
        read = hashlib.sha256(repr(sorted(rounding.items())).encode()).hexdigest()[:12]
        named = {"program": name, "calls": calls, "broken_by": broken_by, "kernels": read}
        return {**about, **named, **counts, "jax": jax.__version__}, rounding

    def row_of(one: Any, calls: int, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        def shape(spec: Any) -> Any:
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=SingleDeviceSharding(device))

        def lowered(folder: str) -> Any:
            asked = {**options, "xla_dump_to": folder}
            function = inspect.unwrap(one.function)
            jitted = jax.jit(function, donate_argnums=one.donate, compiler_options=asked)
            return jitted.lower(*jax.tree.map(shape, one.specs))

        return row(one.name, calls, lowered)

    step, made = step_of(net, replicas)
    each = [row_of(one, made.calls if one.name == "replica" else 1, options) for one in made.programs]
    yield row_of(made.pick, 1, options)[0]
    yield from (one for one, _ in each)
    for name, exchange in made.exchanges.items():
        function, spec = exchange.over([device])
        dumping = functools.partial(jax.jit, function)  # which chipwise compiles without options
        yield row(
            name, 1, lambda to, of=dumping, spec=spec: of(compiler_options={"xla_dump_to": to}).lower(spec)
        )[0]
    many = many_steps(step, made, "gpu")
    if form == SINGLE and many is not None:
        one, rounding = row_of(many, 1, {**options, **LOOPS})
        apart = sum((kernels for _, kernels in each), collections.Counter())
        found = EQUAL if same(rounding, apart, made.calls - 1) else "others"
        yield {**one, "form": MANY, "kernels": found}


# ---- the table


def stored() -> list[dict[str, str]]:
    if not ROWS.exists():
        return []
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def page(rows: list[dict[str, str]]) -> str:
    found = {(r["net"], r["replicas"], r["target"], r["form"], r["program"]): r for r in rows}
    versions = ", ".join(sorted({f"JAX {r['jax']}" for r in rows}))
    lines = [ABOUT.format(versions=versions, steps=STEPS), "## A step", ""]
    lines += ["| net | replicas | on | form | launches | thunks alone | graphs | commands |"]
    lines += ["|---" * 8 + "|"]
    for net, replicas, target, form in dict.fromkeys(key[:4] for key in sorted(found, key=_order)):
        each = [r for key, r in found.items() if key[:4] == (net, replicas, target, form)]
        alone, graphs, commands = (
            sum(int(r["calls"]) * int(r[of]) for r in each) for of in ("alone", "graphs", "commands")
        )
        cells = [f"{alone + graphs:,}", f"{alone:,}", f"{graphs:,}", f"{commands:,}"]
        if form == MANY:
            (one,) = each
            equal = one["kernels"] == EQUAL
            cells = [f"{graphs} in {STEPS} steps" if equal else "single steps: other kernels", "", "", ""]
        lines.append(f"| {net} | {replicas} | {target} | {form} | {' | '.join(cells)} |")
    lines += ["", "## Its programs", ""]
    lines += ["| net | replicas | on | form | program | calls | alone | graphs | commands | kinds alone |"]
    lines += ["|---" * 10 + "|"]
    for key in sorted(found, key=_order):
        r = found[key]
        cells = [r[name] for name in ("calls", "alone", "graphs", "commands", "broken_by")]
        lines.append(f"| {' | '.join(key)} | {' | '.join(cells)} |")
    many = [r["kernels"] == EQUAL for key, r in found.items() if key[3] == MANY]
    return "\n".join(lines) + "\n" + FOUND.format(equal=sum(many), all_=len(many))


def _order(key: tuple[str, ...]) -> tuple[int, ...]:
    net, replicas, target, form, _ = key
    return NETS.index(net), int(replicas), TARGETS.index(target), list(FORMS).index(form)


def add(rows: list[dict[str, Any]]) -> None:
    fresh = not ROWS.exists()
    with ROWS.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def environment() -> dict[str, str]:
    """That of a process which compiles for absent GPUs."""
    from chipwise.compile.processes import COMPILERS, compiler_environment

    found = COMPILERS["cuda"]()
    shown = compiler_environment(found.platform, found.path)
    return {**shown, "JAX_ENABLE_COMPILATION_CACHE": "false"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(NETS), help="These nets.")
    parser.add_argument("--on", default=",".join(TARGETS), help="These targets.")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        net, replicas, target, form = chosen.child
        add(list(rows_of(net, int(replicas), target, form)))
        return
    there = {(r["net"], r["replicas"], r["target"], r["form"]) for r in stored()}
    for form, targets in FORMS.items():
        for target in (one for one in chosen.on.split(",") if one in targets):
            for net in chosen.only.split(","):
                for replicas in map(str, REPLICAS):
                    if (net, replicas, target, form) not in there:
                        words = (net, replicas, target, form)
                        command = [sys.executable, str(HERE), "--child", *words]
                        subprocess.run(command, env=environment(), check=True)
    ROWS.with_suffix(".md").write_text(page(stored()), encoding="utf-8")


if __name__ == "__main__":
    main()
