"""The options that programs are compiled with on each kind of chip."""

from types import SimpleNamespace

import jax
import pytest

from chipwise.chips.catalogue import CHIPS
from chipwise.machine.compiler import LOOPS, SCOPED_VMEM_KIB, compiler_options, jitted


@pytest.mark.parametrize("exact", [True, False])
def test_a_tpus_fusions_get_the_memory_of_its_kind(exact):
    for chip in CHIPS:
        for kind in chip.device_kinds if chip.kind == "TPU" else ():
            limit = SCOPED_VMEM_KIB.get(chip.names[0])
            expected = None if limit is None else {"xla_tpu_scoped_vmem_limit_kib": limit}
            assert compiler_options("tpu", exact, kind) == expected


def test_only_exact_programs_of_gpus_are_kept_from_autotuning():
    free, exact = (compiler_options("gpu", exact, "NVIDIA H100 80GB HBM3") for exact in (False, True))
    assert exact == {**free, "xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}


@pytest.mark.parametrize("exact", [True, False])
def test_a_gpus_graphs_have_convolutions_too(exact):
    graphs = compiler_options("gpu", exact, "Tesla T4")["xla_gpu_enable_command_buffer"].split(",")
    assert {"FUSION", "CONVOLUTION"} < set(graphs) and len(set(graphs)) == len(graphs)


def test_only_a_program_that_is_a_loop_has_loops_in_graphs_and_only_on_gpus(monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda function, compiler_options: compiler_options)
    gpu, cpu = (SimpleNamespace(platform=of, device_kind="Tesla T4") for of in ("gpu", "cpu"))
    plain, loops = (jitted(len, gpu, loops=loops) for loops in (False, True))
    graphs = "xla_gpu_enable_command_buffer"
    assert loops == {**plain, **LOOPS} and loops[graphs] == plain[graphs] + ",WHILE"
    assert jitted(len, cpu, loops=True) is None


def test_groups_of_gpus_ask_for_collectives_beside_computation():
    kind = "NVIDIA A100-SXM4-80GB"
    alone, group = (compiler_options("cuda", True, kind, shards) for shards in (1, 2))
    assert group == {**alone, "xla_gpu_enable_latency_hiding_scheduler": True}


def test_nothing_is_said_of_a_cpu_or_an_unknown_tpu():
    assert compiler_options("cpu", True, "cpu", 8) is None
    assert compiler_options("tpu", True, "TPU v99") is None
