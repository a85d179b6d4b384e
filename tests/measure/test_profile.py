"""Traces: of a real step on the CPU, and of the planes that GPUs and TPUs write."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData
from jaxlib._hlo import hlo_module_from_text

import tasks
from chipwise.engine.on import On
from chipwise.hlo.proto import program_bytes
from chipwise.measure.bench import measure_train
from chipwise.measure.profile import Spent, capture, explain, operations, own_time, read


@pytest.fixture(scope="module")
def step():
    def function(x):
        return jnp.sort(jnp.tanh(x @ x.T), axis=0)

    return jax.jit(function).lower(jnp.ones((64, 64))).compile()


def test_a_trace_names_the_operations_of_the_step(step, tmp_path):
    made = []
    trace = capture(
        tmp_path, 4, lambda: made.append(step(jnp.ones((64, 64)))), lambda: jax.block_until_ready(made)
    )
    assert len(made) == 4 and trace.is_relative_to(tmp_path) and trace.name.endswith(".xplane.pb")
    found = explain(trace, [program_bytes(step)], 4)
    assert found["folder"] == str(tmp_path) and found["steps"] == 4 and found["milliseconds_per_step"] > 0
    assert sum(operation["share"] for operation in found["operations"]) == pytest.approx(1)
    for of in ("sort", "dot_general"):
        assert [o["count"] for o in found["operations"] if of in o["source"]][:1] == [1], of
    times = [operation["milliseconds"] for operation in found["operations"]]
    assert times == sorted(times, reverse=True) and min(times) >= 0


def test_a_second_trace_is_read_and_not_the_first(step, tmp_path):
    def trace(steps):
        return capture(tmp_path, steps, lambda: jax.block_until_ready(step(jnp.ones((64, 64)))), lambda: None)

    trace(1)
    runs, devices = read(trace(3))
    assert devices == 1 and {run.count for run in runs if run.module == "jit_function"} == {3}


def written(tmp_path, text):
    (tmp_path / "t.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return tmp_path / "t.xplane.pb"


def plane(name, lines, events, stats):
    """A plane as protocol buffer text: `lines` of (name, [(event, begin, duration, {stat: text})])."""
    names = {event: number for number, event in enumerate(events, start=1)}
    keys = {stat: number for number, stat in enumerate(stats, start=1)}
    body = [f'name: "{name}"']
    for title, rows in lines:
        said = []
        for event, begin, duration, of in rows:
            has = "".join(f' stats {{ metadata_id: {keys[k]} str_value: "{v}" }}' for k, v in of.items())
            said.append(
                f"events {{ metadata_id: {names[event]} offset_ps: {begin * 1000} "
                f"duration_ps: {duration * 1000}{has} }}"
            )
        body.append(f'lines {{ name: "{title}" {" ".join(said)} }}')
    body += [f'event_metadata {{ key: {n} value {{ id: {n} name: "{e}" }} }}' for e, n in names.items()]
    body += [f'stat_metadata {{ key: {n} value {{ id: {n} name: "{k}" }} }}' for k, n in keys.items()]
    return f"planes {{ {' '.join(body)} }}\n"


def test_a_tpu_says_everything_on_one_line_of_its_plane(tmp_path):
    operation, copy = "%fusion.7 = f32[8]{0} fusion(f32[8]{0} %p)", "%copy.1 = f32[8]{0} copy(f32[8]{0} %p)"
    chip = [
        ("Steps", [("0", 0, 900, {})]),
        ("XLA Modules", [("jit_step(12)", 0, 900, {})]),
        (
            "XLA Ops",
            [
                (operation, 0, 300, {}),
                (copy, 300, 100, {}),
            ],
        ),
    ]
    events = ["0", "jit_step(12)", operation, copy]
    text = "".join(plane(f"/device:TPU:{i}", chip, events, []) for i in range(2))
    for other in ("/host:CPU", "/device:TPU:0 SparseCore 0", "/device:CUSTOM:Megascale Trace"):
        text += plane(other, [("python", [("step", 0, 5, {"hlo_op": "not.mine"})])], ["step"], ["hlo_op"])
    runs, devices = read(written(tmp_path, text))
    assert devices == 2
    first, second = operations(runs, [], 1 * devices)
    assert (first.name, first.count) == ("fusion.7", 1)
    assert first.milliseconds == pytest.approx(300e-6) and first.share == pytest.approx(0.75)
    assert second.name == "copy.1"


def test_a_gpu_has_a_line_for_each_stream(tmp_path):
    of = {"hlo_op": "gemm_fusion_dot.2", "hlo_module": "jit_step"}
    chip = [
        ("Stream #13(Compute)", [("sm90_gemm", 0, 200, of), ("sm90_gemm", 300, 200, of)]),
        ("Stream #14(Memcpy)", [("MemcpyD2D", 10, 100, {"hlo_op": "copy.4", "hlo_module": "jit_step"})]),
        ("Host Threads", [("launch", 0, 1000, {})]),
    ]
    text = plane("/device:GPU:0", chip, ["sm90_gemm", "MemcpyD2D", "launch"], ["hlo_op", "hlo_module"])
    runs, devices = read(written(tmp_path, text))
    assert devices == 1 and {(r.module, r.name, r.count) for r in runs} == {
        ("jit_step", "gemm_fusion_dot.2", 2),
        ("jit_step", "copy.4", 1),
    }
    text = """HloModule jit_step, is_scheduled=true

%fused (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%p, %p), metadata={op_name="jit(step)/jvp(Net)/dot_general"}
}

ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %copy.4 = f32[8,8]{1,0} copy(%a)
  ROOT %gemm_fusion_dot.2 = f32[8,8]{1,0} fusion(%copy.4), kind=kCustom, calls=%fused
}
"""
    program = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    product, copy = operations(runs, [program], 2)
    assert (product.name, product.source, product.count) == ("gemm_fusion_dot.2", "jvp(Net)/dot_general", 1)
    assert (copy.name, copy.source, copy.count) == ("copy.4", "", 0.5)

    run = [Spent("", "gemm_fusion_dot.2", 1, 1.0)]  # its program is not named
    (alone,), (unclear,) = operations(run, [program], 1), operations(run, [program, program], 1)
    assert (alone.source, unclear.source) == ("jvp(Net)/dot_general", "")


def test_a_trace_without_operations_is_no_error(tmp_path):
    trace = written(tmp_path, plane("/host:CPU", [("python", [("f", 0, 5, {})])], ["f"], ["hlo_op"]))
    assert read(trace) == ([], 1) and operations([], [], 3) == []


def test_own_time_leaves_out_what_runs_inside():
    nested = [
        (0.0, 100.0, "while"),
        (10.0, 30.0, "a"),
        (30.0, 60.0, "b"),
        (40.0, 50.0, "c"),
        (100.0, 120.0, "d"),
    ]
    assert dict(own_time(nested)) == {"while": 50, "a": 20, "b": 20, "c": 10, "d": 20}


def test_traces_come_last_and_into_the_record(tmp_path):
    record = measure_train(
        tasks.recipe(), steps=2, warmup=2, on=On(devices=1), profile=tmp_path / "t", progress="none"
    )
    told = record.measured["profile"]
    assert told["folder"] == str(tmp_path / "t") and 3 <= told["steps"] <= 20 and told["operations"]
    assert record.measured["timed_steps"] == 2
