"""A trace of some steps, for TensorBoard's profiler."""

from jax.profiler import ProfileData

import tasks
from chipwise.engine.on import On
from chipwise.measure.bench import measure_train


def test_traces_come_last_and_the_record_says_where(tmp_path):
    record = measure_train(
        tasks.recipe(), steps=2, warmup=2, on=On(devices=1), profile=tmp_path / "t", progress="none"
    )
    told = record.measured["profile"]
    assert told["folder"] == str(tmp_path / "t") and 3 <= told["steps"] <= 20
    (trace,) = (tmp_path / "t").glob("plugins/profile/*/*.xplane.pb")
    names = [line.name for plane in ProfileData.from_file(str(trace)).planes for line in plane.lines]
    assert names
