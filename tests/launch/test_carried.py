"""What travels with a job: a wheel that pip takes, the modules beside the recipe, packages by version."""

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from importlib import metadata

import pytest

from chipwise.base.errors import RecipeError
from chipwise.launch import carried
from chipwise.launch.launch_job import check_also, local_data
from refusals import refused


def test_the_wheel_is_whole_and_its_bytes_are_those_of_its_files():
    ((name, content),) = carried.wheel().items()
    assert carried.wheel() == {name: content}
    archive = zipfile.ZipFile(io.BytesIO(content))
    rows = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(archive.namelist()[-1]).decode()))}
    assert list(rows) == archive.namelist() and {"chipwise/cli/__init__.py", "chipwise/py.typed"} < set(rows)
    for path in list(rows)[:-1]:
        digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(path)).digest()).decode().rstrip("=")
        assert rows[path] == f"sha256={digest}"
    project, version, build, *tags = name.removesuffix(".whl").split("-")
    assert (project, version) == ("chipwise", metadata.version("chipwise"))
    assert build[0].isdigit() and tags == ["py3", "none", "any"]


@pytest.mark.slow
def test_pip_installs_the_wheel(tmp_path):
    ((name, content),) = carried.wheel().items()
    (tmp_path / name).write_bytes(content)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", "there", name]
    subprocess.run(pip, cwd=tmp_path, check=True, timeout=120)
    shown = "import sys; sys.path.insert(0, 'there'); import chipwise.cli; print(chipwise.__file__)"
    command = [sys.executable, "-c", f"{shown}; sys.exit(chipwise.cli.main(['chips']))"]
    said = subprocess.run(command, cwd=tmp_path, check=True, timeout=120, capture_output=True, text=True)
    assert said.stdout.startswith(str(tmp_path / "there"))


def test_modules_beside_the_recipe_go_along(tmp_path):
    files = {
        "own.py": "import pkg.deep.net as n\nfrom space import leaf\ndef f():\n    from later import x",
        "pkg/__init__.py": "from . import other\nfrom .other import thing, gone",
        "pkg/other.py": "import jax.numpy\nthing = 1",
        "pkg/deep/__init__.py": "",
        "pkg/deep/net.py": "from ..other import thing\nimport torch.nn\nif thing:\n    import nowhere_at_all",
        "space/leaf.py": "import own",
        "later.py": "import os, later",
        "not_imported.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found, others = carried.modules(tmp_path / "own.py")
    assert set(found) == set(files) - {"not_imported.py"}
    assert others == {"jax", "torch", "os", "nowhere_at_all"}


def test_a_folder_of_data_hides_no_package(tmp_path):
    (tmp_path / "datasets").mkdir()
    (tmp_path / "own.py").write_text("import datasets\nimport datasets.arrow_dataset\nimport own")
    assert carried.modules(tmp_path / "own.py") == (
        {"own.py": b"import datasets\nimport datasets.arrow_dataset\nimport own"},
        {"datasets"},
    )


def test_what_pip_took_from_elsewhere_is_not_taken_from_the_index(monkeypatch):
    class Fetched:
        version = "0.1"

        def read_text(self, name):
            return '{"url": "https://example.org/mine", "vcs_info": {"vcs": "git", "commit_id": "1"}}'

    monkeypatch.setattr(carried, "_owners", lambda: {"mine": ["my-package"]})
    monkeypatch.setattr(carried.metadata, "distribution", lambda name: Fetched())
    with refused(RecipeError, "launch-import-elsewhere", name="mine", where="https://example.org/mine"):
        carried.requirements({"mine"}, ["mine-too", "git+https://example.org/miner"])
    for spec in (
        "my_package==2",
        "mine",
        "my.package[all] @ git+https://e.org/x",
        "git+https://e.org/mine.git",
    ):
        assert carried.requirements({"mine"}, [spec]) == []


def test_another_package_with_a_longer_name_takes_no_pin_away(monkeypatch):
    monkeypatch.setattr(carried, "_owners", lambda: {"PIL": ["pillow"]})
    pin = [f"pillow=={metadata.version('pillow')}"]
    assert carried.requirements({"PIL"}, ["pillow-heif", "git+https://example.org/pillow2"]) == pin


def test_the_plan_s_own_packages_are_not_replaced():
    for spec in ("jax==0.11.0", "Orbax_Checkpoint >=1", "chipwise @ git+https://e.org/x", "libtpu<1"):
        with refused(RecipeError, "launch-also-planned", also=spec):
            check_also(["torch", spec])
    check_also(["jaxtyping", "jax[cuda12]", "git+https://example.org/jax"])
    check_also([f"numpy=={metadata.version('numpy')}"])


def test_what_every_job_pins_may_come_from_anywhere(monkeypatch):
    monkeypatch.setattr(carried, "_owners", lambda: {"numpy": ["numpy"]})
    monkeypatch.setattr(carried.metadata, "distribution", lambda name: pytest.fail(name))
    assert carried.requirements({"numpy"}, []) == []


def test_data_on_this_machine_is_a_whole_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_data("~/photos") == tmp_path / "photos" == local_data(f"file://{tmp_path}/photos")
    assert local_data("s3://mine/photos") is local_data(None) is None


@pytest.mark.slow
def test_packages_have_the_versions_that_are_here(tmp_path, monkeypatch):
    needs = carried.requirements({"PIL", "os", "nowhere_at_all", "chipwise"}, ())
    assert needs == [f"pillow=={metadata.version('pillow')}"]
    (tmp_path / "of_this_machine.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with refused(RecipeError, "launch-import-elsewhere", name="of_this_machine"):
        carried.requirements({"of_this_machine"}, ())
    assert carried.requirements({"of_this_machine"}, ["git+https://example.org/of_this_machine"]) == []
