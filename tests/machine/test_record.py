"""Records: written and read back to the same values; every damage is one clear line."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chipwise.base.errors import DataError
from chipwise.machine.fingerprint import PACKAGES, Fingerprint, this_machine
from chipwise.machine.record import SCHEMA, Record, Series, read
from refusals import refused

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
NUMBER = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.integers(-(2**53), 2**53)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3),
    max_leaves=6,
)
MACHINES = st.builds(
    Fingerprint,
    cpu=TEXT,
    cores=st.integers(1, 512) | st.floats(0.5, 64),
    memory_bytes=st.integers(0, 1 << 50),
    os=TEXT,
    python=TEXT,
    versions=st.dictionaries(TEXT, st.none() | TEXT, max_size=3),
    accelerator=st.none() | TEXT,
    accelerators=st.integers(0, 8),
    commit=st.none() | TEXT,
    dirty=st.none() | st.booleans(),
)
RECORDS = st.builds(
    Record,
    kind=TEXT,
    name=TEXT,
    created=TEXT,
    measured=st.dictionaries(TEXT, JSON, max_size=3),
    figures=st.dictionaries(
        TEXT, st.builds(Series, TEXT, st.lists(NUMBER, min_size=1, max_size=5).map(tuple)), max_size=3
    ),
    machine=MACHINES,
)


def a_record(**changes):
    machine = Fingerprint(
        "A CPU", 2.0, 8 << 30, "Linux 6 x86_64", "3.12.1", {"jax": "1"}, None, 0, "abc", False
    )
    figures = {"examples_per_second.1": Series("examples/s", (3.0, 1.0, 2.0, 10.0))}
    return dataclasses.replace(
        Record("train", "mine", "2026-01-15T12:00:00+00:00", {"examples": 7}, figures, machine), **changes
    )


def saved(tmp_path, **changes):
    """A record's file with some of its fields replaced, or removed by `...`; `a.b` is `b` inside `a`."""
    made = a_record().to_json()
    for path, value in changes.items():
        *outer, last = path.split("/")
        inside = made
        for name in outer:
            inside = inside[name]
        if value is ...:
            del inside[last]
        else:
            inside[last] = value
    file = tmp_path / "r.json"
    file.write_text(json.dumps(made))
    return file


@settings(max_examples=100, deadline=None)
@given(record=RECORDS)
def test_a_record_comes_back_from_text_as_it_was(record):
    text = json.dumps(record.to_json(), allow_nan=False)
    back = Record.from_json(json.loads(text))
    assert back == record and back.machine.hash == record.machine.hash
    assert json.dumps(back.to_json()) == text


def test_files_are_written_whole_and_read_back(tmp_path):
    path = a_record().write(tmp_path / "new" / "r.json")
    assert read(path) == a_record()
    assert json.loads(path.read_text())["schema"] == SCHEMA
    (tmp_path / "file").write_text("")
    with refused(DataError, "record-unwritable", option="--out") as caught:
        a_record().write(tmp_path / "file" / "r.json")
    assert list(caught.value.facts) == ["path", "reason", "option"]
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_a_series_tells_its_median_and_quartiles():
    series = Series("GB/s", (5, 1, 2, 4, 3))
    assert (series.median, series.quartiles) == (3, (2, 4))
    assert Series("s", (7.5,)).quartiles == (7.5, 7.5)
    for runs in ((), (float("nan"),), (1.0, float("inf")), (True,)):
        with pytest.raises(ValueError, match="finite numbers"):
            Series("s", runs)


@pytest.mark.parametrize(
    "changes, code, facts",
    [
        ({"schema": "chipwise.record/2"}, "record-other-schema", {"expected": SCHEMA}),
        ({"schema": "chipwise.record/0"}, "record-other-schema", {"expected": SCHEMA}),
        ({"schema": "chipwise.plan/2"}, "record-other-schema", {"schema": "chipwise.plan/2"}),
        ({"schema": ["chipwise.record/1"]}, "record-other-schema", {}),
        ({"schema": ...}, "record-other-schema", {"schema": "None"}),
        ({"machine/cpu": ...}, "record-field-missing", {"field": "machine.cpu"}),
        ({"machine": ...}, "record-field-missing", {"field": "machine"}),
        ({"machine": [1]}, "record-field-type", {"field": "machine", "value": "[1]", "expected": ["object"]}),
        ({"machine/cores": "2"}, "record-field-type", {"field": "machine.cores", "expected": ["number"]}),
        ({"machine/memory_bytes": True}, "record-field-type", {"value": "true", "expected": ["integer"]}),
        (
            {"machine/dirty": 1},
            "record-field-type",
            {"field": "machine.dirty", "expected": ["boolean", "null"]},
        ),
        (
            {"machine/versions/jax": 1},
            "record-field-type",
            {"field": "machine.versions.jax", "expected": ["string", "null"]},
        ),
        ({"figures": []}, "record-field-type", {"field": "figures", "expected": ["object"]}),
        (
            {"figures/examples_per_second.1/runs": []},
            "record-runs",
            {"field": "figures.examples_per_second.1.runs", "value": "[]"},
        ),
        ({"figures/examples_per_second.1/runs": [float("nan")]}, "record-runs", {}),
        (
            {"figures/examples_per_second.1": 3},
            "record-field-type",
            {"field": "figures.examples_per_second.1"},
        ),
    ],
)
def test_what_is_not_such_a_record_is_told_on_one_line(tmp_path, changes, code, facts):
    file = saved(tmp_path, **changes)
    with refused(DataError, code, source=str(file), **facts) as caught:
        read(file)
    assert str(caught.value).startswith(str(file))


def test_files_that_hold_no_json(tmp_path):
    whole = a_record().write(tmp_path / "r.json").read_bytes()
    bad = tmp_path / "bad.json"
    for content, code in (
        (whole[:-20], "record-not-json"),
        (b"", "record-not-json"),
        (b"\xff\xfe\x00", "record-not-json"),
        (b"[" * 100_000, "record-not-json"),
        (b"[]", "record-other-schema"),
        (b"null", "record-other-schema"),
    ):
        bad.write_bytes(content)
        with refused(DataError, code):
            read(bad)
    with refused(DataError, "record-missing"):
        read(tmp_path / "gone.json")
    with refused(DataError, "record-unreadable"):
        read(tmp_path)


def test_what_readers_may_add_is_passed_over(tmp_path):
    assert read(saved(tmp_path, note="x", **{"machine/room": 3})) == a_record()


def test_the_hash_is_of_the_hardware():
    machine = a_record().machine
    same = dataclasses.replace(
        machine,
        versions={"jax": "2"},
        commit=None,
        dirty=None,
        python="3.13.0",
        memory_bytes=(8 << 30) - 4096,
    )
    assert same.hash == machine.hash and len(machine.hash) == 8
    for change in ({"cpu": "Another"}, {"cores": 4.0}, {"memory_bytes": 9 << 30}, {"accelerators": 1}):
        assert dataclasses.replace(machine, **change).hash != machine.hash


def test_this_machine_tells_what_runs_here():
    class Chip:
        platform, device_kind = "gpu", "A GPU"

    class Host:
        platform, device_kind = "cpu", "cpu"

    here = this_machine([Host()] * 8)
    assert here.cpu and here.cores > 0 and here.memory_bytes > 1 << 20
    assert tuple(here.versions) == PACKAGES and here.versions["numpy"]
    assert (here.accelerator, here.accelerators) == (None, 0)
    assert (here.commit is None) == (here.dirty is None)
    assert here.commit is None or len(here.commit) == 40
    with_chips = this_machine([Chip()] * 2)
    assert (with_chips.accelerator, with_chips.accelerators) == ("A GPU", 2)
    assert "2 × A GPU" in with_chips.title and with_chips.hash != here.hash
