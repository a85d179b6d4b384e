"""`on` compiles any JAX function for one device of a chip that is not here.

The chip's own compiler runs on this machine, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from ..base import DeviceError, Fact, invalid, plain
from ..base.annotations import as_annotated
from ..base.displayed import Displayed
from ..base.prediction import Range
from ..chips.catalogue import named
from ..chips.targets import Target, parse, sizes
from ..machine.plugins import hidden
from ..models.chip_traits import traced_for
from .absent_device import UNTUNED, available, figures, sources, timed, topologies, total_seconds
from .answers import Answer, CompileRequest, refusal
from .cache import compile_each
from .exports import EXPORTING, cudnn_assumed, export_program
from .hlo.kernel import Kernel


@dataclass(frozen=True)
class Compiled(Displayed):
    """A function compiled for one device of an absent chip. All figures are of one call."""

    function: str
    """The function's name."""
    chip: str
    """The chip's name in the catalogue, such as "TPU v5e"."""
    seconds: Range
    """The predicted seconds, without the host's time to start the program."""
    kernels: tuple[Kernel, ...]
    """The kernels, longest first. Their seconds add up to `seconds.value`."""
    flops: float
    """The FLOPs of the products, two for each multiply-add."""
    memory_bytes: dict[str, int]
    """The memory that the program needs, by kind: "arguments", "outputs" (without those that
    overwrite a donated argument), "temporary" and "code"."""
    available_bytes: int | None
    """The memory that a program can use. `None` if it is unknown."""
    notes: tuple[Fact, ...]
    """Where the figures come from, and what they leave out."""
    hlo: str = field(repr=False)
    """The optimised program, as XLA writes it."""

    @property
    def needed_bytes(self) -> int:
        """The sum of `memory_bytes`."""
        return sum(self.memory_bytes.values())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with `needed_bytes`."""
        return plain(self) | {"needed_bytes": self.needed_bytes}


@as_annotated
@hidden()  # tracing starts JAX
def on(target: str, function: Callable[..., Any], *args: Any) -> Compiled:
    """Compiles a function for one device of a chip that is not here, and times its kernels there.

    Runs nothing, and uses no accelerator. Answers are cached.

    *Arguments:*

    - `target`: a chip, such as `"v5e"`, `"t4"` or `"a100"`, or a target of one device.
    - `function`: any JAX function, plain or jitted. A jitted one keeps its donated arguments.
    - `args`: its arguments: arrays, numbers and `jax.ShapeDtypeStruct`, or trees of them. A
      partial function binds other values.

    *Returns* its memory, seconds, kernels and HLO. Raises `DeviceError` for an unknown chip, for
    several devices, if the chip's compiler is not installed, or if it refuses the program. Raises
    `RecipeError` for an argument of another type. Errors of the function itself pass through.
    """
    place = _device(target)
    jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
    shapes = jax.tree_util.tree_map_with_path(_shape, args)
    with traced_for(place.chip):
        answer = _answer(place, jitted, shapes)
    if answer.problem is not None:
        raise DeviceError.of(answer.problem)
    kernels = timed(place.chip, answer.kernels)
    memory = {
        "arguments": answer.argument_bytes,
        "outputs": answer.output_bytes,
        "temporary": answer.temp_bytes,
        "code": answer.code_bytes,
    }
    return Compiled(
        function=answer.name,
        chip=place.chip.name,
        seconds=total_seconds(place.chip, kernels),
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)),
        flops=answer.flops,
        memory_bytes=memory,
        available_bytes=available(place)[0],
        notes=(*sources(place.chip), *answer.notes),
        hlo=answer.hlo,
    )


def _answer(place: Target, jitted: Any, shapes: tuple[Any, ...]) -> Answer:
    """The compiler's answer about a function of arguments with these `shapes`."""
    with EXPORTING, cudnn_assumed():
        traced = jitted.trace(*shapes)
    about = figures(place.chip)
    name = traced.fun_name
    given = jax.tree.leaves(traced.args_info)
    try:
        program = export_program(jitted, shapes, about["platform"])
    except Exception as error:  # it can be traced, but not lowered for this chip
        return refusal(name, error, about["platform"])
    if program.devices > 1:
        wrong = "{function} runs on {devices} devices: leave out its meshes and shardings."
        raise DeviceError("compile-devices", wrong, function=name, devices=program.devices)
    donated = tuple(i for i, one in enumerate(given) if one.donated)
    options = UNTUNED if place.chip.kind == "GPU" else None
    request = CompileRequest(
        name, topologies(place)[0], program, donated, options=options, text=True, **about
    )
    ((_, answer),) = compile_each([request])
    return answer


def _device(text: str) -> Target:
    """The smallest target with the chip called `text`, or the target of one device so called."""
    chip = named(text)
    if chip is not None and chip.kind == "TPU":
        return next(sizes(chip))
    target = parse(text)
    if target.devices > 1:
        wrong = "{target} has {devices} devices, and a function is compiled for one: type {chip}."
        raise DeviceError(
            "compile-devices",
            wrong,
            target=target.name,
            devices=target.devices,
            chip=target.chip.names[0],
        )
    return target


def _shape(path: Any, value: Any) -> jax.ShapeDtypeStruct:
    """The shape of the argument at `path`, wherever its array is."""
    try:
        return jax.eval_shape(lambda array: array, value)
    except TypeError:
        what = f"args{jax.tree_util.keystr(path)}"
        wanted = "an array, a number or a jax.ShapeDtypeStruct: bind others with functools.partial"
        raise invalid("compile-argument", what, value, wanted) from None
