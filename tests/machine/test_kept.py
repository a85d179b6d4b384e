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
from jax.experimental.compilation_cache import compilation_cache

from chipwise.machine import kept

NAMES = ["jax_compilation_cache_dir", *kept.SETTINGS]


@pytest.fixture(autouse=True)
def as_a_user(monkeypatch):
    """Without the folder that the tests share, and with all as it was afterwards."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache_key, "get", inspect.unwrap(cache_key.get))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def entries(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.endswith("-cache"))


def test_the_folder_is_the_users_alone(tmp_path):
    folder = tmp_path / "new" / "programs"
    assert kept.keep(folder) and folder.stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir == str(folder)


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_folder_open_to_others_is_not_used(tmp_path, mode):
    folder = tmp_path / "programs"
    folder.mkdir()
    folder.chmod(mode)
    assert not kept.keep(folder) and jax.config.jax_compilation_cache_dir is None


def test_nor_is_a_link_a_file_or_anothers_folder(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "file").write_text("")
    assert not any(kept.keep(tmp_path / name) for name in ("link", "file", "file/below"))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not kept.keep(tmp_path / "own")


def test_what_the_user_chose_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    assert not kept.keep(tmp_path / "programs") and not (tmp_path / "programs").exists()


def test_what_was_used_longest_ago_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "BYTES", 200)
    folder = tmp_path / "programs"
    folder.mkdir(mode=0o700)
    for i in range(4):
        (folder / f"{i}-cache").write_bytes(bytes(100))
        os.utime(folder / f"{i}-cache", (1000 + i, 1000 + i))
    assert kept.keep(folder)
    assert entries(folder) == ["2-cache", "3-cache"]


def test_devices_of_a_cpu_share_an_entry_and_its_bits(tmp_path, monkeypatch):
    monkeypatch.setitem(kept.SETTINGS, "jax_persistent_cache_min_compile_time_secs", 0.0)
    assert kept.keep(tmp_path / "programs")
    x = np.random.default_rng(0).standard_normal((33, 33)).astype(np.float32)

    def made(device):
        jax.clear_caches()
        return np.asarray(jax.jit(lambda x: jnp.tanh(x @ x) * 0.37 + x)(jax.device_put(x, device)))

    fresh, *others = [made(device) for device in (*jax.devices()[:3], jax.devices()[0])]
    assert all((other == fresh).all() for other in others)
    assert sum("lambda" in name for name in entries(tmp_path / "programs")) == 1


def test_another_processor_is_another_entry(tmp_path, monkeypatch):
    monkeypatch.setitem(kept.SETTINGS, "jax_persistent_cache_min_compile_time_secs", 0.0)
    monkeypatch.setattr(kept, "processor", lambda: "other")
    assert kept.keep(tmp_path / "programs")
    jax.clear_caches()
    jax.jit(lambda x: jnp.sin(x) * 3)(jnp.ones(5))
    names = entries(tmp_path / "programs")
    assert names and all(name.endswith("-other-cache") for name in names)


def test_nor_is_one_that_others_could_replace():
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's own folder lets nobody in
        shared = Path(name)
        shared.chmod(0o777)
        assert not kept.keep(shared / "below" / "programs")
        shared.chmod(0o1777)
        assert kept.keep(shared / "below" / "programs")


def test_a_folder_of_xlas_stays_when_programs_go(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "BYTES", 0)
    folder = tmp_path / "programs"
    (folder / "autotune").mkdir(parents=True)
    folder.chmod(0o700)
    (folder / "0-cache").write_bytes(bytes(100))
    assert kept.keep(folder) and [path.name for path in folder.iterdir()] == ["autotune"]


def test_an_entry_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(*paths):
        raise OSError("No space left on device")

    monkeypatch.setitem(kept.SETTINGS, "jax_persistent_cache_min_compile_time_secs", 0.0)
    assert kept.keep(tmp_path / "programs")
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
        found.add(kept.processor())
    assert len(found) == 2
