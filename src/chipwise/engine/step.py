"""The one step: what `fit` runs, what a benchmark times, what a plan compiles.

A step is three programs, one more with gradient clipping. None touches the host:

    replica   one replica's gradient, sums and state, as one flat vector      on each device
    reduce    the sum of all replicas' vectors in the order of a fixed tree   across devices
    square    the squares of the gradient's chunks, for clipping by norm      on each device
    update    optimizer, averages, state                                      on each device

All but `reduce` are compiled for a single device, and a device with several replicas runs the same program
several times. (On the CPU, where starting a small net's program costs more than running it, the program is
the body of a loop: `in_turn`.) This is why results do not depend on the number of devices. If one program
computed all replicas, the compiler would fuse each replica's operations differently depending on the code
around them, use fused multiply-adds or not, and order the terms of a reduction accordingly. Measured on the
CPU, the gradients on 1 and on 2 devices then differ in the last place after a single step. In separate
programs, values of several devices meet only in additions.

`vmap` maps one call over the replicas of a block; by default, each replica is a block. Within a block, the
compiler may batch and add in any order, since the order is the same everywhere. A single block and the
update are one program. With `exact=False` the back end chooses the order of additions over devices, and any
number of devices that divides the replicas shares the blocks, cut further if they must be.

There is another reason for separate collectives: on the CPU, a waiting collective holds a thread of the pool
in which the other simulated devices compute, so a program that does both can deadlock.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..chips import find
from ..data.sources import Spec, spec_of
from ..models.chip_traits import traced_for
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from . import feed
from .layout import Layout, Ranges, tree_sum
from .leaves import OwnLeaves
from .program_digest import mark
from .replica import contribution
from .state import TrainState, abstract_state, read
from .update import Update, shares_out

GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONVOLUTION"
"""What XLA starts in CUDA graphs: its default, and convolutions."""


def compiler_options(platform: str, exact: bool, device_kind: str, shards: int = 1) -> dict[str, Any] | None:
    """XLA's options for the programs of a step on a JAX device of `device_kind`.

    For reproducible results on GPUs: no atomics, and no kernel chosen by timing it; XLA takes the first that
    cuDNN and cuBLASLt propose for the shape. `xla_gpu_autotune_level=0` does not do that: no kernel is then
    chosen for a convolution, and cuDNN's default took 3,000 times as long (bfloat16, 3x3, 64 to 128 channels,
    an H200 with JAX 0.11.2). Triton's matrix products, untuned, have tiles of 16 x 8, which use a few per
    cent of the chip, so they are off. For groups of `shards` GPUs: the
    scheduler that starts a collective before its result is needed, which is on by itself only for some chips,
    such as H100. It changes the order of operations, not what they add. On TPUs: `SCOPED_VMEM_KIB`.

    CUDA graphs also of convolutions, which XLA leaves out: a small net's step waits for the host to start
    its kernels one by one. On an H100 a step of `mnist` took 6.8 ms and takes 2.3, one of
    `cifar10-davidnet` 9.5 and 8.4, with the same bits.
    """
    if platform in ("gpu", "cuda", "rocm"):
        options: dict[str, Any] = {"xla_gpu_enable_command_buffer": GRAPHS}
        if exact:
            options |= {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}
        return options | ({"xla_gpu_enable_latency_hiding_scheduler": True} if shards > 1 else {})
    chip = find(device_kind) if platform == "tpu" else None
    if chip is not None and chip.names[0] in SCOPED_VMEM_KIB:
        return {"xla_tpu_scoped_vmem_limit_kib": SCOPED_VMEM_KIB[chip.names[0]]}
    return None


SCOPED_VMEM_KIB = {"v6e": 65_536, "v5p": 32_768}
"""On-chip memory for one fusion, where libtpu's default makes large products slow. For 24,576 x 4,096 x
14,336 in bfloat16 libtpu 0.0.42 states 840 TFLOP/s with it and 559 without on a v6e, 451 and 390 on a v5p; on
other TPUs it makes little difference. Google's recipes for the v6e raise it too
(github.com/AI-Hypercomputer/tpu-recipes)."""


class RowRange(NamedTuple):
    """The rows of an array that a device has, and which of these, counted from the first, no other owns."""

    first: int
    after: int
    own: int
    end: int


class Step:
    """The programs of a recipe's step as pure functions of arrays, for one device of a layout.

    *Arguments:* `resident`: whether `data` holds every example, and is indexed on the device; otherwise
    `data` is the device's rows of the step's batch; `state`: `abstract_state(recipe)`, if known; `device`:
    the device for which kernels are chosen, by default that of `models.chip_traits`.

    *Fields:* `calls`, the calls of `replica` on a device in a step, each of which computes `together`
    replicas; `fused`, whether `replica_and_update` replaces all programs, since there is only one block and
    so one device; `updates`, the update and the layout of its vector; `sharded`, whether the optimizer's
    state is sharded over the devices (see `engine.holding`), which `shard_optimizer` requires or forbids.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        *,
        resident: bool,
        state: TrainState | None = None,
        device: jax.Device | None = None,
        shard_optimizer: bool | None = None,
    ):
        self.recipe, self.layout, self.resident, self.device = recipe, layout, resident, device
        self.spec = spec_of(recipe.task.train)
        self.together, self.calls = layout.together, layout.blocks_per_device
        self.fused = layout.blocks == 1
        self.state = abstract_state(recipe) if state is None else state
        self.updates = Update(recipe, self.state)
        self.sharded = shares_out(self.updates, self.state, layout.devices, shard_optimizer)
        self.group = 0
        if self.sharded:
            owns = [self.windows[0].own(group) for group in range(layout.devices)]
            self.group = max(range(layout.devices), key=lambda group: owns[group][1] - owns[group][0])

    @functools.cached_property
    def traced(self):
        """`replica`, jitted, so that all callers share one trace."""
        return jax.jit(self.replica)

    def replica(self, params, frozen, state, step, scale, at, data, place) -> jax.Array:
        """The vector of the replicas from `place` on, `(n,)` float32; see `Update.vector`. `params` is the
        vector of `Update.flat`."""
        return self._vector((params, frozen, state, step, scale), at, data, place)

    def in_turn(self, *given) -> Any:
        """The sum of the vectors of all blocks of a device in tree order, `(n,)`: `replica` in a loop, so
        that the host makes a single call. If devices add differently, since the layout is not `aligned`, the
        result is the list of all vectors, of which only a device's own are made.
        """
        each = self.each_in_turn(*given)
        return tree_sum(each, jnp.add) if self.layout.aligned else each

    def each_in_turn(self, params, frozen, state, step, scale, at, data, places, calls) -> list[jax.Array]:
        """The vectors of all blocks of a device, `(n,)` each.

        `calls` is an input, `()` int32; `places` `(calls, 2)` has at least two rows, and `data` the examples
        of at least two blocks. Otherwise the compiler would see that the loop has a single turn, inline its
        body and optimize it differently.
        """
        if self.calls == 1:
            padding = self.layout.group_batch
            at = {**at, "indices": jnp.pad(at["indices"], ((0, 0), (0, padding)))}
            if not self.resident:
                data = {k: jnp.pad(v, [(0, padding)] + [(0, 0)] * (v.ndim - 1)) for k, v in data.items()}

        def turn(i, vectors):
            place = lax.dynamic_index_in_dim(places, i, keepdims=False)
            vector = self.traced(params, frozen, state, step, scale, at, data, place)
            return lax.dynamic_update_slice(vectors, vector[None], (i, jnp.int32(0)))

        vectors = jnp.zeros((places.shape[0], self.updates.size), jnp.float32)
        vectors = lax.fori_loop(jnp.int32(0), calls, turn, vectors)
        return [vectors[i] for i in range(self.calls)]

    def update(self, state: TrainState, total: jax.Array, hyper: dict, squares: Any):
        size, masks = self.updates.flat.size, self.updates.spread()
        with traced_for(self.device):
            return self.updates(state, total[:size], total[size:], hyper, squares, masks)

    def update_chunk(self, state: TrainState, summed, beside, hyper: dict, squares, masks: dict):
        """`update` for a device's part of the vector and of the optimizer's state, if they are `sharded`."""
        with traced_for(self.device):
            return self.updates(state, summed, beside, hyper, squares, masks, self._part)

    def square(self, total: jax.Array) -> jax.Array:
        with traced_for(self.device):
            return self.updates.square(total, self._part)

    def measured(self, vector: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the whole gradient in a block's vector, or in the sum: its squares as `Update.square`, and the
        loss's count `()`."""
        beside = vector[self.updates.flat.size :]
        with traced_for(self.device):
            return self.updates.square(vector), self.updates.aside.unpack(beside)["sums"]["loss"].count

    def replica_and_update(self, state, frozen, window, data, place) -> tuple[TrainState, jax.Array]:
        """A whole step. `frozen` is not part of `state`, since it is not overwritten."""
        params, _, task_state, step, scale = read(state)
        total = self._vector((params, frozen, task_state, step, scale), window["rows"], data, place)
        return self.after(state, total, window["hyper"])

    def after(self, state: TrainState, total: jax.Array, hyper: dict) -> tuple[TrainState, jax.Array]:
        """All programs after the sum `total`."""
        squares = self.square(total) if self.updates.squares is not None else None
        return self.update(state, total, hyper, squares)

    def specs(self) -> dict[str, Any]:
        """The shapes of the programs' inputs on one device: `state`, `window`, `data`, `place`, `vector` and
        `squares`, as `ShapeDtypeStruct`s. Reads no data and touches no device."""
        recipe, n = self.recipe, self.layout.group_batch
        data = stored(self.spec, len(recipe.task.train) if self.resident else n, self.resident)
        return {
            "state": self.carried,
            "window": feed.window_spec(recipe, n),
            "data": data,
            "place": jax.ShapeDtypeStruct((2,), jnp.int32),
            "vector": jax.ShapeDtypeStruct((self.updates.size,), jnp.float32),
            "squares": self.updates.squares,
        }

    @property
    def carried(self) -> TrainState:
        """The shapes of the state on a device, with its parameters as a vector."""
        state = dataclasses.replace(self.state, params=self.updates.flat.shape)
        if not self.sharded:
            return state
        return jax.eval_shape(lambda state: self.part_of(state, self.group), state)

    @functools.cached_property
    def windows(self) -> tuple[Ranges, Ranges]:
        """Of the vector's values, and of their squares, what each device updates, if they are `sharded`."""
        return self.updates.windows(self.layout.devices)

    def on(self, group: int) -> Step:
        """The step of another device, whose programs are others if it updates other leaves."""
        other = copy.copy(self)
        other.group = group
        return other

    @property
    def alike(self) -> bool:
        """Whether all devices run the same programs."""
        return not self.sharded or self.updates.leaves is None

    @property
    def _part(self) -> OwnLeaves | None:
        """What this device updates by leaf, if that is not all."""
        leaves = self.updates.leaves
        return None if self.alike or leaves is None else leaves.part(self.group, self.layout.devices)

    def cuts(self, group: int) -> dict[str, list[RowRange | None]]:
        """Of "optimizer" and "ema" what a device has of each leaf, in rows of `rowed`; None if all."""
        values, leaves = self.windows[0], self.updates.leaves
        window = RowRange(values.start(group), values.start(group) + values.part, *values.own(group))
        if leaves is None:
            flat = [self.is_flat(leaf) for leaf in jax.tree.leaves(self.state.optimizer)]
            return {"optimizer": [window if one else None for one in flat], "ema": [window]}
        rows = {
            i: RowRange(a, b, 0, b - a) for i, (a, b) in leaves.part(group, self.layout.devices).span.items()
        }
        own = [None if i is None else rows.get(i, RowRange(0, 0, 0, 0)) for i in leaves.owners]
        return {"optimizer": own, "ema": [window]}

    def rowed(self, name: str, whole: Tree) -> Tree:
        """A part of the whole state with an axis along which each leaf can be cut."""
        leaves = self.updates.leaves
        return whole if leaves is None or name == "ema" or whole is None else leaves.rows(whole)

    def part_of(self, state: TrainState, group: int) -> TrainState:
        """`state` with a device's part of the optimizer's state and of the average."""

        def part(name: str) -> Tree:
            leaves, structure = jax.tree.flatten(self.rowed(name, getattr(state, name)))
            pairs = zip(leaves, self.cuts(group)[name], strict=False)  # there may be no average
            own = [x if cut is None else x[cut.first : cut.after] for x, cut in pairs]
            return jax.tree.unflatten(structure, own)

        return dataclasses.replace(state, optimizer=part("optimizer"), ema=part("ema"))

    def is_flat(self, leaf: Any) -> bool:
        """Whether a leaf of the optimizer's state has one value for each value of the parameter vector."""
        return leaf.shape == (self.updates.flat.size,)

    def update_specs(self, hyper: dict) -> tuple[Any, ...]:
        """The shapes of the inputs of `update`, or of `update_chunk` if `sharded`, on a device.

        *Arguments:* `hyper` of the window, arrays or shapes.
        """
        updates, specs = self.updates, self.specs()
        state = specs["state"].without("donated")
        if not self.sharded:
            return state, specs["vector"], hyper, specs["squares"]
        params = jax.ShapeDtypeStruct((self.windows[0].part,), updates.flat.dtype)
        beside = jax.ShapeDtypeStruct((updates.size - updates.flat.size,), jnp.float32)
        masks = {
            name: jax.ShapeDtypeStruct(params.shape, dtype) for name, (dtype, _) in updates.masks().items()
        }
        summed = jax.ShapeDtypeStruct(params.shape, jnp.float32)
        state = dataclasses.replace(state, params=params)
        return state, summed, beside, hyper, updates.squares, masks

    def _vector(self, inputs, at, data, place) -> jax.Array:
        inputs = (self.updates.flat.unpack(inputs[0]), *inputs[1:])
        batch, indices, epochs, number = self._taken(inputs[3], at, data, place)
        with traced_for(self.device):
            contributed = contribution(self.recipe, inputs, batch, indices, epochs, number, at["seed"])
        return self.updates.vector(contributed)

    def _taken(self, step, at, data, place) -> tuple[Any, ...]:
        """The `rows` of the replicas from `place` on, with a first axis for these if they are several."""
        about = self.layout, self.resident, self.spec, self.recipe.clock.examples
        take: Any = functools.partial(rows, *about, step, at, data)
        if self.together > 1:
            take, place = jax.vmap(take), place[None] + jnp.arange(self.together, dtype=jnp.int32)[:, None]
        batch, indices, epochs, number = take(place)
        return batch, indices, epochs, mark(number)


def stored(spec: Spec, count: int, resident: bool) -> Spec:
    """The shapes of `count` examples on a device: as rows (`feed.flat`) if `resident`, else as a batch."""

    def shape(column: Any) -> tuple[int, ...]:
        return (math.prod(column.shape),) if resident and column.shape else column.shape

    return {name: jax.ShapeDtypeStruct((count, *shape(s)), s.dtype) for name, s in spec.items()}


def rows(layout: Layout, resident: bool, spec: Spec, examples: int, step, at: dict, data: dict, place):
    """The batch of one replica: columns `(replica_batch, ...)`, indices, epochs, and the replica's number.

    *Arguments:* `spec` of one example; `examples` of the data; `at`: `start`, `indices` (of this device),
    `epoch` and `cut` of the window; `place` `(2,)` int32, the replica's number among all replicas and on this
    device.
    """
    row, n, (number, local) = step - at["start"], layout.replica_batch, place
    indices = lax.dynamic_slice(at["indices"], (row, local * n), (1, n))[0]
    if resident:
        batch = feed.pick(data, indices, spec)
    elif layout.shards > 1:  # one axis for replicas, since the rows of each are cut over the devices
        batch = {k: lax.dynamic_index_in_dim(v, local, keepdims=False) for k, v in data.items()}
    else:
        batch = {k: lax.dynamic_slice_in_dim(v, local * n, n) for k, v in data.items()}
    # A batch may begin in one epoch and end in the next, which begins at position `cut`.
    position = number * n + jnp.arange(n, dtype=jnp.int32)
    epochs = at["epoch"][row] + (position >= at["cut"][row]).astype(jnp.int32)
    if layout.batch > examples:  # or in a later one
        epochs += jnp.maximum(position - at["cut"][row], 0) // examples
    return batch, indices, epochs, number
