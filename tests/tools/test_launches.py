"""`benchmarks/launches.py`: what it counts in XLA's list of a program's thunks, and its page."""

import csv
import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BROKEN = """000: kCommandBuffer  [source       | next=003 (1)]
    001: kCustomKernel [source       | next=002 (1)] loop_add_fusion_5 grid: [1, 1, 1] threads: [1, 1, 1]
    002: kCopy         [prev=001 (1) | sink        ] kCopy
003: kConvolution    [prev=000 (1) | next=004 (1)] kConvolution
004: kCustomKernel   [prev=003 (1) | next=000 (1)] input_reduce_fusion_5 grid: [48, 1, 1]
000: kCommandBuffer  [prev=004 (1) | next=006 (1)]
    005: kCustomKernel [source       | sink        ] loop_exponential_multiply_fusion grid: [3, 1, 1]
006: kCustomKernel   [prev=000 (1) | sink        ] loop_concatenate_fusion grid: [1963, 1, 1]
"""
LOOP_IN_A_GRAPH = """000: kCommandBuffer [source | sink]
    001: kCopy         [source       | next=002 (2)] kCopy
    002: kWhile        [prev=001 (1) | sink        ]
condition:
        003: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1] threads: [1, 1, 1]
      body:
        004: kCustomKernel   [source       | next=005 (1) ] loop_add_fusion_5 grid: [1, 1, 1]
        005: kCublasLtMatmul [prev=004 (1) | sink         ] kCublasLtMatmul
"""
GRAPH_IN_A_LOOP = """001: kCopy         [source       | next=002 (2)] kCopy
002: kWhile        [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source | next=006 (1)]
        004: kCustomKernel   [source       | next=005 (1) ] loop_add_fusion_5 grid: [1, 1, 1]
        005: kCublasLtMatmul [prev=004 (1) | sink         ] kCublasLtMatmul
    006: kCustomKernel [prev=000 (1) | sink] loop_add_fusion_6 grid: [1, 1, 1] threads: [1, 1, 1]
"""


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import launches

    return launches


@pytest.mark.parametrize(
    "text, alone, graphs, commands",
    [
        (BROKEN, {"kConvolution": 1, "kCustomKernel": 2}, 2, 3),
        (LOOP_IN_A_GRAPH, {}, 1, 5),
        (GRAPH_IN_A_LOOP, {"kCopy": 1, "kWhile": 1, "kCustomKernel": 2}, 1, 2),
        ("", {}, 0, 0),
    ],
)
def test_thunks_by_themselves_graphs_and_their_commands(launches, text, alone, graphs, commands):
    assert launches.counted(text) == launches.Launches(Counter(alone), graphs, commands)


def test_the_list_after_graphs_were_made_is_read_if_there_is_one(launches, tmp_path):
    for name, text in {
        "module_0001.jit_replica.thunk_sequence.txt": "001: kCopy [source | sink] kCopy\n",
        "module_0001.jit_replica.thunk_sequence_after_thunk_passes.txt": LOOP_IN_A_GRAPH,
        "module_0044.jit_pick.thunk_sequence.txt": "001: kCustomKernel [source | sink] loop_gather_fusion\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert dict(launches.dumped(tmp_path)) == {
        "replica": launches.Launches(Counter(), 1, 5),
        "pick": launches.Launches(Counter(kCustomKernel=1), 0, 0),
    }


def test_the_page_is_that_of_the_stored_rows(launches):
    assert (BENCHMARKS / "launches.md").read_text() == launches.page(launches.stored())


def test_what_may_be_in_graphs_changes_no_kernels(launches):
    rows = launches.stored()
    found = {(r["net"], r["replicas"], r["target"], r["form"], r["program"]): r for r in rows}
    assert {key[3] for key in found} == set(launches.FORMS) and len(found) == len(rows)
    assert {key[:3] for key in found} == {
        (net, str(n), on) for net in launches.NETS for n in launches.REPLICAS for on in launches.TARGETS
    }
    for key, row in found.items():
        if key[3] != launches.MANY:
            assert row["kernels"] == found[*key[:3], launches.SINGLE, key[4]]["kernels"], key


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("jax_cuda12_plugin"), reason="no compiler for GPUs")
def test_many_steps_of_an_absent_gpu_are_one_graph_with_the_kernels_of_single_steps(launches, tmp_path):
    """In a process of its own: the compiler reads its environment once."""
    program = tmp_path / "launches.py"
    program.write_text((BENCHMARKS / "launches.py").read_text())
    command = [sys.executable, str(program), "--child", "digits", "8", "h100", launches.SINGLE]
    subprocess.run(command, env=launches.environment(), check=True, capture_output=True)
    with program.with_suffix(".csv").open(newline="") as file:
        rows = {row["program"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["pick", "replica", "update", "reduce", "steps"]
    for name in ("replica", "update", "steps"):
        assert (rows[name]["alone"], rows[name]["graphs"]) == ("0", "1")
    known = [row for row in launches.stored() if (row["net"], row["replicas"]) == ("digits", "8")]
    if known[0]["jax"] == rows["steps"]["jax"]:  # another XLA may fuse otherwise
        assert rows["steps"]["kernels"] == launches.EQUAL
        assert all(row in known for row in rows.values())
