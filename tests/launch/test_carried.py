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


@pytest.mark.slow
def test_packages_have_the_versions_that_are_here(tmp_path, monkeypatch):
    needs = carried.requirements({"PIL", "os", "nowhere_at_all", "chipwise"}, ())
    assert needs == [f"pillow=={metadata.version('pillow')}"]
    (tmp_path / "of_this_machine.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with refused(RecipeError, "launch-import-elsewhere", name="of_this_machine"):
        carried.requirements({"of_this_machine"}, ())
    assert carried.requirements({"of_this_machine"}, ["git+https://example.org/of_this_machine"]) == []
