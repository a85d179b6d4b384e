"""Exact programs on GPUs, compiled for chips that are not here: products by the vendor's library, no atomics.

Needs the compiler, not a GPU (`pip install 'chipwise[plan-gpu]'`), and a process that does not hide it:

    CHIPWISE_COMPILES=cuda python -m pytest -m slow tests/run/test_gpu_kernels.py
"""

import importlib.util
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import chipwise as cw
from chipwise.machine import plugins
from chipwise.machine.compiler import compiler_options
from chipwise.planner.tracing import training_step
from chipwise.step.layout import Layout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not plugins.gpu_wanted(), reason="hidden: CHIPWISE_COMPILES=cuda shows it"),
    pytest.mark.skipif(not importlib.util.find_spec("jax_cuda12_plugin"), reason="no compiler for GPUs"),
]

LARGE = 1e7  # operations of a product that must not run in a kernel that nobody tuned
CHIPS = {  # name: (compute capability, cores, FP32 units a core, threads a core, shared memory a core)
    "NVIDIA A100-SXM4-40GB": ((8, 0), 108, 64, 2048, 167936),
    "Tesla T4": ((7, 5), 40, 64, 1024, 65536),
}
EXACT = compiler_options("cuda", True, "Tesla T4")


@pytest.fixture(scope="module")
def compilers(monkeypatch_module):
    """Chip name to a function: (function, shapes, options, folder) to the compiled program's text and PTX."""
    import nvidia.cuda_nvcc

    nvcc = next(iter(nvidia.cuda_nvcc.__path__))
    monkeypatch_module.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch_module.setenv("PATH", f"{nvcc}/bin", prepend=":")
    # Nothing reads a program of an absent chip back from JAX's cache
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    jax.devices()
    yield {name: _compiler(name) for name in CHIPS}
    jax.config.update("jax_compilation_cache_dir", before)
    reset_cache()


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def _compiler(name):
    (major, minor), cores, units, threads, shared = CHIPS[name]
    text = f"""gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
        shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared - 1024}
        threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: {units}
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
        memory_bandwidth: 1000000000000 l2_cache_size: 4194304 clock_rate_ghz: 1.4
        device_memory_size: 16000000000 registers_per_core_limit: 65536 registers_per_block_limit: 65536
        cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: NONE }}
        device_vendor: "NVIDIA Corporation" name: "{name}" device_address_bits: 64
        driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
        dnn_version: "9.10.0" }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}" """
    topology = topologies.get_topology_desc("", "cuda", target_config=text, topology="1x1x1")
    here = NamedSharding(Mesh(np.asarray(topology.devices).reshape(1), ("x",)), PartitionSpec())

    def compiled(function, shapes, options, folder):
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
        jitted = jax.jit(function, compiler_options={**(options or {}), "xla_dump_to": str(folder)})
        text = jitted.lower(*shapes).compile().as_text()
        return text, "".join(path.read_text() for path in Path(folder).glob("*.ptx"))

    return compiled


def products(text):
    """Operations of each product that the program computes outside of a library call."""
    shapes = {
        name: [int(n) for n in dims.split(",") if n]
        for name, dims in re.findall(r"%([\w.-]+) = \w+\[([\d,]*)\]", text)
    }
    found = []
    for name, left, contracted in re.findall(
        r"%([\w.-]+) = \S+ dot\(%([\w.-]+),[^\n]*lhs_contracting_dims=\{([\d,]*)\}", text
    ):
        depth = math.prod(shapes[left][int(i)] for i in contracted.split(",") if i)
        found.append(2 * math.prod(shapes[name]) * depth)
    found += [math.inf] * len(re.findall(r" convolution\(", text))
    return found


def atomics(ptx):
    return re.findall(r"\b(?:atom|red)\.\S+", ptx)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    "name",
    ["digits", "mnist", "cifar10-davidnet", "imagenet-resnet50", "vit-s16", "gpt2-124m"],
)
def test_built_in_recipes_have_library_products_and_no_atomics(chip, name, compilers, tmp_path):
    recipe = cw.load(name, synthetic=name != "digits")
    programs = training_step(recipe, Layout(recipe.batch, recipe.replicas, 1), resident=False)
    for program in (programs.replica, programs.programs[-1]):
        function = getattr(program.function, "__wrapped__", program.function)
        text, ptx = compilers[chip](function, program.specs, EXACT, tmp_path / program.name)
        assert ptx
        assert not atomics(ptx)
        assert not [n for n in products(text) if n > LARGE]
        # A scatter that might meet itself is written as a sort of every number: slower than what it serves
        sorted_lengths = [int(n) for n in re.findall(r"= \(?\w+\[(\d+)\][^\n]* sort\(", text)]
        assert max(sorted_lengths, default=0) <= 1 << 16


@pytest.mark.parametrize("chip", CHIPS)
def test_the_checks_find_what_they_look_for(chip, compilers, tmp_path):
    matrix = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

    def product(a, b):
        return jax.nn.relu(a @ b)

    untuned = {name: value for name, value in EXACT.items() if "triton" not in name}
    found = products(compilers[chip](product, (matrix, matrix), untuned, tmp_path / "a")[0])
    assert found == ([2**31] if CHIPS[chip][0] >= (8, 0) else [])  # older ones have no Triton kernels
    assert not products(compilers[chip](product, (matrix, matrix), EXACT, tmp_path / "b")[0])

    def scatter(rows, at):
        return jnp.zeros((64, 1024)).at[at].add(rows, mode="drop")

    shapes = (matrix, jax.ShapeDtypeStruct((1024,), jnp.int32))
    assert atomics(compilers[chip](scatter, shapes, None, tmp_path / "c")[1])
    assert not atomics(compilers[chip](scatter, shapes, EXACT, tmp_path / "d")[1])
