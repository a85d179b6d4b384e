import dataclasses
import errno
import json
import os
import pickle

import jax
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.deploy.pretrained import pretrained
from chipwise.step.state import first_state
from refusals import refused

ONE = cw.On(devices=1)
FIRST = jax.tree.map(np.asarray, tasks.init(jax.random.key(7)))


@pytest.fixture
def file(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file(
        {name: np.asarray(a, order="C") for name, a in {**FIRST[0], **FIRST[1]}.items()},
        tmp_path / "w.safetensors",
    )
    return tmp_path / "w.safetensors"


def test_a_task_begins_with_the_weights_of_a_file(file):
    task = pretrained(file).start(tasks.task())
    params, state = task.init(jax.random.key(0))
    for name, value in FIRST[0].items():
        assert np.array_equal(params[name], value)
    assert np.array_equal(state["var"], FIRST[1]["var"]) and state["calls"].dtype == np.int32


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "bool", "complex64", "float8_e4m3fn"])
def test_quantized_weights_are_refused_by_name(dtype):
    """Their scales are elsewhere; whole numbers of the task's own, such as counts, are none."""
    name = next(iter(FIRST[0]))
    arrays = {**FIRST[0], **FIRST[1], name: np.asarray(jax.numpy.asarray(FIRST[0][name], dtype))}
    some = [f"{name} {dtype} for float32"]
    with refused(cw.errors.RecipeError, "weights-quantized", path="arrays", some=some, count=1):
        pretrained(arrays).start(tasks.task())
    half = {**arrays, name: FIRST[0][name].astype(np.float16)}
    assert pretrained(half).start(tasks.task()).weights


def test_floats_are_no_counts():
    wrong = {**FIRST[0], **FIRST[1], "calls": np.asarray(FIRST[1]["calls"], np.float32)}
    with refused(cw.errors.RecipeError, "weights-quantized", some=["calls float32 for int32"]):
        pretrained(wrong).start(tasks.task())


@pytest.mark.parametrize("dtype", [np.float32, "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(dtype, value):
    name, first = next(iter(FIRST[0].items()))
    odd = np.asarray(first, jax.numpy.dtype(dtype)).copy()
    odd.reshape(-1)[:2] = value
    with refused(cw.errors.DataError, "weights-not-finite", some=[f"{name} 2"], count=1):
        pretrained({**FIRST[0], **FIRST[1], name: odd}).start(tasks.task())


def in_two_files(folder, index):
    """A folder with all arrays in `a`, and other values of two of them in `b`."""
    numpy = pytest.importorskip("safetensors.numpy")
    folder.mkdir()
    both = {name: np.asarray(a, order="C") for name, a in {**FIRST[0], **FIRST[1]}.items()}
    numpy.save_file(both, folder / "a.safetensors")
    numpy.save_file({name: both[name] + 1 for name in list(both)[:2]}, folder / "b.safetensors")
    if index is not None:
        places = {"weight_map": {name: index.get(name, "a.safetensors") for name in both}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(places))
    return both


def test_of_two_files_with_a_name_the_index_decides(tmp_path):
    first, second = list(FIRST[0])[:2]
    both = in_two_files(tmp_path / "indexed", {second: "b.safetensors"})
    with pytest.warns(UserWarning, match=f"{second} in a.safetensors") as told:
        arrays = pretrained(tmp_path / "indexed").arrays
    assert f"{first} in b.safetensors" in str(told[0].message)
    assert np.array_equal(arrays[first], both[first])
    assert np.array_equal(arrays[second], both[second] + 1)
    in_two_files(tmp_path / "plain", None)
    with refused(cw.errors.DataError, "weights-twice", name=first, file="b.safetensors"):
        pretrained(tmp_path / "plain")


def test_a_recipe_is_described_with_all_weights_that_it_began_with(file):
    weights, plain = pretrained(file), tasks.recipe()
    name, part = plain.describe()["task"]["init"], f" from weights {weights.digest[:16]}"
    once = weights.start(plain.task)
    twice = weights.start(once)
    for task, parts in ((once, part), (twice, part + part)):
        assert dataclasses.replace(plain, task=task).describe()["task"]["init"] == name + parts


@pytest.mark.slow
def test_other_weights_give_another_result(file):
    plain = tasks.recipe(duration="2st")
    begun = dataclasses.replace(plain, task=pretrained(file).start(plain.task))
    assert (
        cw.fit(begun, on=ONE, progress="none").fingerprint
        != cw.fit(plain, on=ONE, progress="none").fingerprint
    )


def test_a_new_head_and_other_names(file):
    def renamed(name):
        return {"w": "old"}.get(name, name)

    weights = pretrained(file)
    with refused(cw.errors.RecipeError, "weights-of-another-model", missing=["params.w"]):
        weights.start(tasks.task(), rename=renamed)
    found = weights.match(tasks.task(), fresh=["v"], rename=lambda name: None if name == "calls" else name)
    assert (found.fresh, found.missing, found.unused) == (["params.v"], ["state.calls"], ["calls"])
    task = weights.start(tasks.task(), fresh=["v"])
    key = jax.random.key(3)
    assert np.array_equal(task.init(key)[0]["v"], tasks.init(key)[0]["v"])
    assert np.array_equal(task.init(key)[0]["w"], FIRST[0]["w"])
    assert "new" in str(weights.match(tasks.task(), fresh=["v"]))
    with refused(cw.errors.RecipeError, "weights-all-fresh"):
        weights.start(tasks.task(), fresh=["*"])


def test_weights_come_before_what_the_data_would_give(file):
    task = tasks.task(from_data=lambda train: {name: np.zeros_like(FIRST[0][name]) for name in ("v", "w")})
    begun = first_state(tasks.recipe(task=pretrained(file).start(task, fresh=["v"])))
    assert np.array_equal(begun.params["w"], FIRST[0]["w"]) and not np.any(begun.params["v"])


@pytest.mark.slow
def test_a_run_is_a_start(tmp_path):
    result = cw.fit(tasks.recipe(duration="2st"), tmp_path / "run", on=ONE, progress="none")
    params, state = pretrained(tmp_path / "run").start(tasks.task()).init(jax.random.key(0))
    assert all(np.array_equal(params[name], value) for name, value in result.params.items())
    assert np.array_equal(state["mean"], result.state["mean"])


def test_arrays_that_another_library_read_are_weights():
    weights = pretrained({"params": FIRST[0], "state": FIRST[1], "step": np.int32(4), "note": "mine"})
    params, state = weights.start(tasks.task()).init(jax.random.key(0))
    assert all(np.array_equal(params[name], value) for name, value in FIRST[0].items())
    assert np.array_equal(state["mean"], FIRST[1]["mean"])
    assert weights.match(tasks.task()).unused == ["step"]
    with refused(cw.errors.DataError, "weights-none"):
        pretrained({"note": "mine"})


def test_a_state_dict_is_read_and_code_in_a_pickle_is_not_run(tmp_path):
    torch = pytest.importorskip("torch")
    arrays = {**FIRST[0], **FIRST[1]}
    torch.save(
        {"epoch": 3, "state_dict": {f"module.{n}": torch.from_numpy(np.array(a)) for n, a in arrays.items()}},
        tmp_path / "w.pth",
    )
    params, _ = pretrained(tmp_path / "w.pth").start(tasks.task()).init(jax.random.key(0))
    assert np.array_equal(params["w"], FIRST[0]["w"])

    class Harm:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    torch.save({"w": Harm()}, tmp_path / "harm.pth")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Harm()))
    for name in ("harm.pth", "plain.pt"):
        with refused(cw.errors.DataError, "weights-damaged"):
            pretrained(tmp_path / name)
    assert not (tmp_path / "harm").exists()


def test_a_view_that_repeats_a_value_states_more_than_its_file_holds(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.zeros(1).expand(1 << 40)}, tmp_path / "w.pt")
    with refused(cw.errors.DataError, "weights-damaged", path=tmp_path / "w.pt"):
        pretrained(tmp_path / "w.pt")


def test_weights_that_the_system_cannot_read_are_not_called_damaged(tmp_path, monkeypatch):
    safetensors = pytest.importorskip("safetensors.numpy")
    from safetensors import SafetensorError

    def load(file):
        raise SafetensorError(f"I/O error: Input/output error (os error {errno.EIO})")

    file = tmp_path / "w.safetensors"
    safetensors.save_file({"w": np.zeros(3, np.float32)}, file)
    monkeypatch.setattr(safetensors, "load_file", load)
    with refused(cw.errors.DataError, "unreadable", path=file):
        pretrained(file)


PIPES = ["w.safetensors", "w.pt", "w.bin", "folder/w.safetensors", "folder/config.json"]


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_place_of_weights_is_not_waited_for(tmp_path, name):
    pipe = tmp_path / "pipes" / name
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    code = "weights-none" if name.endswith("json") else "weights-damaged"
    with refused(cw.errors.DataError, code):
        pretrained(pipe.parent if "/" in name else pipe)


def test_bad_files_are_one_line(file, tmp_path):
    whole = file.read_bytes()
    for name, content in (
        ("cut", whole[: len(whole) // 2]),
        ("head", whole[:6]),
        ("other", b"no weights here"),
    ):
        (tmp_path / f"{name}.safetensors").write_bytes(content)
        with refused(cw.errors.DataError, "weights-damaged"):
            pretrained(tmp_path / f"{name}.safetensors")
    with refused(cw.errors.DataError, "weights-absent"):
        pretrained(tmp_path / "gone.pt")
    with refused(cw.errors.DataError, "weights-format"):
        (tmp_path / "w.xyz").write_bytes(b"")
        pretrained(tmp_path / "w.xyz")
    (tmp_path / "empty").mkdir()
    with refused(cw.errors.DataError, "weights-none"):
        pretrained(tmp_path / "empty")
    with refused(cw.errors.RecipeError, "weights-of-another-model", matched=0):
        pretrained(file).start(cw.load("digits").task)
