"""Files of tuned kernels: which are read, and that they decide the kernels of an absent GPU's programs.

Those of an absent GPU need its compiler (`pip install 'chipwise[plan-gpu]'`). No GPU runs anything here.
"""

import base64
import hashlib
import importlib.util
import re
import types

import jax
import pytest

import absent_gpu
from chipwise.base.errors import DeviceError
from chipwise.machine import kernels
from refusals import refused

ENTRY = absent_gpu.entry("CUDA: 9.0", "f32[2] custom-call(f32[2])", 45, "gemm {\n    }")
GRADIENTS = [
    absent_gpu.entry(
        "CUDA: 9.0", f'f32[2] custom-call(f32[2]), custom_call_target="{target}"', 45, "x {\n    }"
    )
    for target in ("__cudnn$convBackwardFilter", "__cudnn$convBackwardInput")
]
GRADIENTS += [absent_gpu.entry("CUDA: 9.0", "{\n  ROOT a = f32[2] convolution(b, c)\n}", 45, "x {\n    }")]
RESULTS = {
    "$convForward": "algorithm {\n      algo_id: 7\n      workspace_size { value: 1024 }\n    }",
    "__cublas": "gemm {\n      algorithm: 3\n    }",
}
"""The kernels of a file for two kinds of calls."""
needs_compiler = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda12_plugin"), reason="no compiler for GPUs"
)


def test_gradients_of_convolutions_are_left_out():
    whole = "version: 3\n" + GRADIENTS[0] + ENTRY + GRADIENTS[1] + GRADIENTS[2]
    assert kernels.steady(whole) == "version: 3\n" + ENTRY


@pytest.mark.parametrize(
    "content, code, facts",
    [
        (None, "kernels-unreadable", {}),
        (b"", "kernels-broken", {}),
        (b"version: 3\n", "kernels-broken", {}),
        (ENTRY.encode(), "kernels-broken", {}),
        (f"version: 3\n{ENTRY}garbage".encode(), "kernels-broken", {}),
        (f"version: 3\n{ENTRY[:-2]}".encode(), "kernels-broken", {}),
        (b"\xff\xfe\x00", "kernels-broken", {}),
        (f"version: 3\n{ENTRY * (kernels.MOST_BYTES // len(ENTRY) + 1)}".encode(), "kernels-unreadable", {}),
        *((f"version: 3\n{ENTRY}{one}".encode(), "kernels-unsteady", {"count": 1}) for one in GRADIENTS),
    ],
)
def test_what_is_no_file_of_kernels(tmp_path, content, code, facts):
    file = tmp_path / "given.textproto"
    if content is not None:
        file.write_bytes(content)
    with refused(DeviceError, code, path=str(file), **facts):
        kernels.read(file)


def test_a_file_names_the_libraries_whose_kernels_it_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "installed", {"nvidia-cublas-cu12": "12.9.1"}.get)
    made = tmp_path / "k.textproto"
    made.write_text(kernels.steady(f"version: 3\n{ENTRY}"))
    assert kernels.read(made).text.startswith("# nvidia-cublas-cu12 12.9.1\nversion: 3\n")
    for known in ({"nvidia-cublas-cu12": "12.9.2"}, {}):
        monkeypatch.setattr(kernels, "installed", known.get)
        here = [f"# {name} {version}" for name, version in known.items()]
        facts = {"path": str(made), "theirs": ["# nvidia-cublas-cu12 12.9.1"], "here": here}
        with refused(DeviceError, "kernels-of-other-libraries", **facts):
            kernels.load(kernels.read(made), types.SimpleNamespace(platform="gpu"), str(made))


def test_a_cache_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(kernels, "_held", {})
    monkeypatch.setenv("CHIPWISE_CACHE", str(tmp_path / "file"))
    made = kernels.Kernels(f"version: 3\n{ENTRY}")
    with refused(DeviceError, "kernels-unkept", path=str(made.path)):
        kernels.load(made, types.SimpleNamespace(platform="gpu"), "k.textproto")


def test_the_digest_is_that_of_the_files_bytes(tmp_path):
    file = tmp_path / "k.textproto"
    file.write_bytes(f"version: 3\n{ENTRY}".encode())
    made = kernels.read(file)
    assert made.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert kernels.stated(made) == {"kernels": made.digest} and kernels.stated(None) == {}
    assert made.digest in made.path.name  # and so in the keys of JAX's cache


def test_a_process_trains_with_one_choice_of_kernels(monkeypatch):
    some, others = kernels.Kernels("a"), kernels.Kernels("b")

    def said(*steps):
        """What a process is told after these steps on a GPU: (exact, kernels) each."""
        monkeypatch.setattr(kernels, "_held", {})
        for exact, chosen in steps[:-1]:
            kernels.claim("gpu", exact, chosen)
        try:
            kernels.claim("gpu", *steps[-1])
        except DeviceError as error:
            return error.code, error.facts["before"]
        return None

    exact, free, tuned, other = (True, None), (False, None), (True, some), (True, others)
    assert said(exact, exact, free, free) is None and said(exact, tuned, tuned, free) is None
    assert (
        said(free, exact) == said(free, tuned) == said(tuned, free, tuned) == ("kernels-tuned", kernels.FREE)
    )
    assert said(tuned, exact) == said(tuned, other) == ("kernels-tuned", some.digest)
    for platform in ("cpu", "cpu", "tpu"):
        kernels.claim(platform, platform == "tpu")
        kernels.claim("cpu", True)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file with a kernel for each forward convolution and product of a small net on an H100; the keys by
    which XLA asks for them; and the program without them."""
    logs = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "autotuner_cache=2"}
    plain, log = absent_gpu.ask("keys", **logs)
    made, keys = f"# jax {jax.__version__}\n{kernels.libraries()}version: 3\n", absent_gpu.LOGGED.findall(log)
    for _, model, name, version in keys:
        if result := next((RESULTS[kind] for kind in RESULTS if kind in name), None):
            made += absent_gpu.entry(model, name, version, result)
    path = tmp_path_factory.mktemp("kernels") / "k.textproto"
    path.write_text(made)
    return path, keys, plain


def chosen(text):
    """The kernels that a compiled program names: (a convolution's algorithm, a product's)."""
    calls = [line for line in text.splitlines() if "custom-call(" in line]
    named = {}
    for kind in ("convForward", "convBackwardFilter", "cublas"):
        found = [re.search(r'"(?:algo_id|selected_algorithm)":"(-?\d+)"', c) for c in calls if kind in c]
        named[kind] = {one and one[1] for one in found}
    return named


@needs_compiler
@pytest.mark.slow
def test_a_file_decides_the_kernels_of_an_absent_gpus_programs(file):
    path, _, plain = file
    first, again = (absent_gpu.ask("text", path)[0] for _ in range(2))
    assert first == again  # two processes
    before, after = chosen(plain), chosen(first)
    assert before["convForward"] == {"-1"} and "3" not in before["cublas"]
    assert after["convForward"] == {"7"} and after["cublas"] == {"3"}
    assert after["convBackwardFilter"] == before["convBackwardFilter"] == {"-1"}  # the first in one order


@needs_compiler
@pytest.mark.slow
def test_kernels_are_timed_for_the_calls_that_exact_programs_make(file):
    """XLA times nothing with deterministic operations, so the timed programs are not the exact ones."""

    def calls(keys):
        return {key for key, _, name, _ in keys if "$conv" in name or "__cublas" in name}

    _, log = absent_gpu.ask("timed", TF_CPP_MIN_LOG_LEVEL="0", TF_CPP_VMODULE="autotuner_cache=2")
    exact = calls(file[1])
    assert len(exact) >= 4 and calls(absent_gpu.LOGGED.findall(log)) == exact


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "change, code",
    [
        (("Cores: 132", "Cores: 108"), "kernels-foreign"),
        (("DNN version: 9", "DNN version: 8"), "kernels-foreign"),
        (("f32[256,256]", "f32[257,257]"), "kernels-foreign"),  # nothing for the product of every file
        (("version: 3\n", "version: 2\n"), "kernels-broken"),
        (("gemm {", "gem {"), "kernels-broken"),
        (("", ""), None),
    ],
)
def test_files_of_other_gpus_and_versions(file, tmp_path, change, code):
    other = tmp_path / "other.textproto"
    other.write_text(file[0].read_text().replace(*change))
    said, _ = absent_gpu.ask("load", other)
    assert said.get("code") == code
    if code:
        assert said["facts"]["path"] == str(other)
    if code == "kernels-foreign":
        assert said["facts"]["here"].startswith("NVIDIA H100")


@needs_compiler
@pytest.mark.slow
def test_exact_programs_take_no_kernels_that_others_left_beside_jaxs_cache(file, tmp_path):
    """JAX lets XLA keep what `exact=False` has tuned in a folder of its cache of compiled programs."""
    _, keys, plain = file
    folder = tmp_path / "xla_gpu_per_fusion_autotune_cache_dir"
    folder.mkdir()
    for key, _, name, _ in keys:
        hashed = base64.urlsafe_b64encode(hashlib.sha256(key.encode()).digest()).decode().rstrip("=")
        if "$convForward" in name:
            (folder / f"{hashed}.textproto").write_text(RESULTS["$convForward"])
    cached = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    assert chosen(absent_gpu.ask("text", "", "free", **cached)[0])["convForward"] == {"7"}
    assert chosen(absent_gpu.ask("text", **cached)[0]) == chosen(plain)
