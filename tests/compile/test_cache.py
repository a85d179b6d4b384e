"""The cache of the compilers' answers."""

import contextlib
import json
import os

import pytest

from chipwise.base.errors import DataError
from chipwise.compile import cache
from chipwise.compile.cache import begin_if_missing, compile_each
from chipwise.compile.processes import CompilerProcesses
from planner.asked import ALL, compile_all, request_for, three
from refusals import refused


def test_a_second_time_no_child_is_started(child, tmp_path):
    started = child(ALL)
    first = compile_all([request_for()], cache_dir=tmp_path)
    again = compile_all([request_for(name="another name")], cache_dir=tmp_path)
    assert started() == 1
    assert (first[0].name, again[0].name) == ("replica", "another name")
    assert first[0].temp_bytes == again[0].temp_bytes == 7


def test_the_same_program_twice_is_compiled_once(child, tmp_path):
    child(ALL)
    seen = []
    told = compile_all([request_for()] * 2, cache_dir=tmp_path, progress=lambda *a: seen.append(a))
    assert seen == [(0, 1), (1, 1)]
    assert told[0] == told[1]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"name": "x", "of another": 1}', b"\xff\xfe\x00"])
def test_a_damaged_entry_is_made_again(child, tmp_path, damage):
    started, asked = child(ALL), [request_for()]
    compile_all(asked, cache_dir=tmp_path)
    (entry,) = tmp_path.glob("*.json")
    whole = json.loads(entry.read_bytes())
    entry.write_bytes(damage)
    assert compile_all(asked, cache_dir=tmp_path)[0].temp_bytes == 7
    again = json.loads(entry.read_bytes())
    assert started() == 2 and again == whole
    entry.write_text(json.dumps({**whole, "temp_bytes": 8}))  # another number
    assert compile_all(asked, cache_dir=tmp_path)[0].temp_bytes == 7
    entry.unlink()
    os.mkfifo(entry)  # not waited for
    assert compile_all(asked, cache_dir=tmp_path)[0].temp_bytes == 7 and started() == 4
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("tmp")]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CHIPWISE_CACHE", raising=False)
    assert cache.cache_folder(None) == tmp_path / "chipwise" / "plan"
    monkeypatch.setenv("CHIPWISE_CACHE", str(tmp_path / "own"))
    assert cache.cache_folder(None) == tmp_path / "own" / "plan"
    monkeypatch.setenv("CHIPWISE_CACHE", "~nobody-of-this-name/cache")
    with refused(DataError, "homeless"):
        cache.cache_folder(None)


def test_a_process_begins_once_before_it_is_asked_and_only_for_what_is_missing(child, tmp_path):
    started = child(ALL)
    asked = three()
    with contextlib.closing(CompilerProcesses(tmp_path)) as processes:
        for request in asked:
            begin_if_missing(request, processes, tmp_path)
        answers = dict(compile_each(asked, cache_dir=tmp_path, processes=processes))
        assert [answers[i].temp_bytes for i in range(3)] == [7, 7, 7] and started() == 1
        begin_if_missing(asked[0], processes, tmp_path)
        assert not processes._ready


def test_one_that_is_not_asked_ends_with_the_others(child, tmp_path):
    child(ALL)
    processes = CompilerProcesses(tmp_path)
    begin_if_missing(request_for(), processes, tmp_path)
    (unasked,) = processes._ready.values()
    processes.close()
    assert unasked._process.poll() is not None and not unasked._folder.exists()
