"""Compiled programs on disk: whose folder it may be, what goes when it is full, what an entry is known by."""

import inspect
import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import cache_key
from jax._src.lru_cache import LRUCache
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from chipwise.machine import compilation_cache as cache

NAMES = ["jax_compilation_cache_dir", *cache.SETTINGS]


@pytest.fixture(autouse=True)
def as_a_user(monkeypatch):
    """Without the folder that the tests share, and with all as it was afterwards."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache_key, "get", inspect.unwrap(cache_key.get))
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def used(folder):
    with cache.cached_in(folder) as chosen:
        return chosen


def entries(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.endswith("-cache"))


def test_a_folder_of_the_user_alone_is_used_and_then_jax_is_as_before(tmp_path):
    folder, before = tmp_path / "new" / "programs", (cache_key.get, LRUCache.put)
    with cache.cached_in(folder) as chosen:
        assert chosen and folder.stat().st_mode & 0o777 == 0o700
        assert jax.config.jax_compilation_cache_dir == str(folder)
        with cache.compiled_once():
            assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_compilation_cache_dir is None and (cache_key.get, LRUCache.put) == before


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_folder_open_to_others_is_not_used(tmp_path, mode):
    folder = tmp_path / "programs"
    folder.mkdir()
    folder.chmod(mode)
    assert not used(folder)


def test_a_link_a_file_and_another_users_folder_are_not_used(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "file").write_text("")
    assert not any(used(tmp_path / name) for name in ("link", "file", "file/below"))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not used(tmp_path / "own")


def test_a_cache_that_the_user_chose_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    assert not used(tmp_path / "programs") and not (tmp_path / "programs").exists()


def test_the_least_recently_used_programs_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "BYTES", 200)
    folder = tmp_path / "programs"
    folder.mkdir(mode=0o700)
    for i in range(4):
        (folder / f"{i}-cache").write_bytes(bytes(100))
        os.utime(folder / f"{i}-cache", (1000 + i, 1000 + i))
    assert used(folder)
    assert entries(folder) == ["2-cache", "3-cache"]


@pytest.mark.as_users_compile
def test_devices_of_a_cpu_share_an_entry_and_its_bits(tmp_path, monkeypatch):
    monkeypatch.setitem(cache.SETTINGS, "jax_persistent_cache_min_compile_time_secs", 0.0)
    x = np.random.default_rng(0).standard_normal((33, 33)).astype(np.float32)

    def made(device):
        jax.clear_caches()
        return np.asarray(jax.jit(lambda x: jnp.tanh(x @ x) * 0.37 + x)(jax.device_put(x, device)))

    with cache.cached_in(tmp_path / "programs"):
        fresh, *others = [made(device) for device in (*jax.devices()[:3], jax.devices()[0])]
    assert all((other == fresh).all() for other in others)
    assert sum("lambda" in name for name in entries(tmp_path / "programs")) == 1


def test_another_processor_has_another_entry(tmp_path, monkeypatch):
    monkeypatch.setitem(cache.SETTINGS, "jax_persistent_cache_min_compile_time_secs", 0.0)
    monkeypatch.setattr(cache, "processor", lambda: "other")
    with cache.cached_in(tmp_path / "programs"):
        jax.clear_caches()
        jax.jit(lambda x: jnp.sin(x) * 3)(jnp.ones(5))
    names = entries(tmp_path / "programs")
    assert names and all(name.endswith("-other-cache") for name in names)


def test_a_folder_that_others_could_replace_is_not_used():
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's own folder lets nobody in
        shared = Path(name)
        shared.chmod(0o777)
        assert not used(shared / "below" / "programs")
        shared.chmod(0o1777)
        assert used(shared / "below" / "programs")


def test_xlas_own_folder_stays_when_programs_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "BYTES", 0)
    folder = tmp_path / "programs"
    (folder / "autotune").mkdir(parents=True)
    folder.chmod(0o700)
    (folder / "0-cache").write_bytes(bytes(100))
    assert used(folder) and [path.name for path in folder.iterdir()] == ["autotune"]


def test_an_entry_is_written_completely_or_not_at_all(tmp_path, monkeypatch):
    def full(*paths, **folders):
        raise OSError("No space left on device")

    monkeypatch.setitem(cache.SETTINGS, "jax_persistent_cache_min_compile_time_secs", 0.0)
    with cache.cached_in(tmp_path / "programs"):
        jax.clear_caches()
        with monkeypatch.context() as patched, pytest.warns(UserWarning, match="No space left"):
            patched.setattr(os, "replace", full)
            assert jax.jit(lambda x: jnp.cos(x) * 5)(jnp.float32(0)) == 5
    assert list((tmp_path / "programs").iterdir()) == []


def test_a_process_with_other_cores_has_entries_of_its_own(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    found = set()
    for cores in ({0}, {0, 1}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores, raising=False)
        found.add(cache.processor())
    assert len(found) == 2
