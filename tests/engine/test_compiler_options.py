"""The options that programs are compiled with on each kind of chip."""

import pytest

from chipwise.chips.catalogue import CHIPS
from chipwise.engine.step import SCOPED_VMEM_KIB, compiler_options


@pytest.mark.parametrize("exact", [True, False])
def test_a_tpus_fusions_get_the_memory_of_its_kind(exact):
    for chip in CHIPS:
        for kind in chip.device_kinds if chip.kind == "TPU" else ():
            limit = SCOPED_VMEM_KIB.get(chip.names[0])
            expected = None if limit is None else {"xla_tpu_scoped_vmem_limit_kib": limit}
            assert compiler_options("tpu", exact, kind) == expected


def test_only_exact_programs_of_gpus_are_kept_from_autotuning():
    assert compiler_options("gpu", False, "NVIDIA H100 80GB HBM3") is None
    exact = compiler_options("gpu", True, "NVIDIA H100 80GB HBM3")
    assert exact is not None and exact["xla_gpu_autotune_level"] == 0


def test_nothing_is_said_of_a_cpu_or_an_unknown_tpu():
    assert compiler_options("cpu", True, "cpu") is None
    assert compiler_options("tpu", True, "TPU v99") is None
