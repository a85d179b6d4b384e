import dataclasses
import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.base.locks import hold
from chipwise.deploy import export as module
from chipwise.deploy import formats
from chipwise.deploy.model import Trained
from chipwise.step import keys
from refusals import refused

NEEDS = {"stablehlo": "flatbuffers", "onnx": "jax2onnx", "safetensors": "safetensors"}


def untrained(name, *settings, seed=0):
    """A built-in model, none of whose parameters and statistics are round numbers."""
    recipe = cw.load(name, list(settings))
    params, state = jax.device_get(jax.jit(recipe.task.init)(keys.init_key(seed)))
    rng = np.random.default_rng(seed)

    def moved(x, by=0.0):
        return (x * rng.uniform(0.8, 1.2, x.shape) + by * rng.normal(size=x.shape)).astype(x.dtype)

    return Trained(recipe, jax.tree.map(lambda x: moved(x, 0.1), params), jax.tree.map(moved, state))


def logits(params, state, inputs):
    return tasks.plain_logits(params, inputs)


def small(**changes):
    params, state = jax.tree.map(np.asarray, tasks.init(jax.random.key(1)))
    settings = {"predict": logits, "loss": tasks.plain_loss, "classes": tasks.CLASSES, **changes}
    return Trained(tasks.recipe(task=tasks.task(**settings)), params, state)


@pytest.mark.parametrize(
    "to", [pytest.param(to, marks=() if to == "stablehlo" else pytest.mark.slow) for to in NEEDS]
)
def test_every_format_runs_elsewhere_and_gives_the_same(tmp_path, to):
    pytest.importorskip(NEEDS[to])
    model = untrained("digits")
    made = cw.export(model, to, tmp_path / "m")
    compared = (0, None, "") if to == "safetensors" else (360, 0, "evaluation")
    assert (made.format, made.examples, made.labels_differ, made.data) == (to, *compared)
    assert 0 <= made.difference < 1e-4 and made.bytes == made.file.stat().st_size
    assert to == "safetensors" or made.largest > 0.1
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


TRANSFORMERS = (
    "vit-s16 image=16 patch=8 depth=2 width=48 heads=3",
    "gpt2-124m context=16 vocabulary=99 depth=2 width=32 heads=2",
    "bert-base length=16 vocabulary=99 depth=2 width=32 heads=2",
    "llama-8b context=16 vocabulary=99 depth=2 width=32 heads=4 kv_heads=2 hidden=48",
)


def exported(name, to, folder, examples):
    """A small built-in model in `folder`, and examples that it takes."""
    pytest.importorskip(NEEDS[to])
    recipe, *settings = name.split()
    model = untrained(recipe, *settings)
    source = module.like(model.recipe.task.train, model.recipe.task.classes)
    made = cw.export(model, to, folder / "m", data=source, examples=examples)
    return made, module.take(source, np.arange(examples))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_run_in_onnx_runtime_and_give_the_same(tmp_path, name):
    made, rows = exported(name, "onnx", tmp_path, 5)
    session = pytest.importorskip("onnxruntime").InferenceSession(str(made.file))
    (found,) = session.run(None, {i.name: rows[i.name] for i in session.get_inputs()})
    spread = np.ptp(found, axis=0).max()  # between examples, since a constant would be equal too
    assert len(found) == made.examples == 5 and made.difference < 1e-3 * spread and spread > 0.01


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("to", NEEDS)
@pytest.mark.parametrize(
    "name",
    ["mnist", "cifar10-davidnet", "imagenet-resnet50 image=64 width=16", *TRANSFORMERS],
)
def test_the_built_in_models_leave_in_every_format(tmp_path, name, to):
    made, _ = exported(name, to, tmp_path, 130)
    assert made.examples == (0 if to == "safetensors" else 130)  # weights alone: nothing to run
    assert made.difference <= 1e-4 * max(1, made.largest)


def test_the_stablehlo_is_read_by_jax_alone_with_any_batch(tmp_path):
    pytest.importorskip("flatbuffers")
    model = small()
    made = cw.export(model, "stablehlo", tmp_path / "m.stablehlo")
    exported = jax.export.deserialize(bytearray(made.file.read_bytes()))
    assert set(exported.platforms) == set(formats.PLATFORMS)
    for rows in (1, 7):
        x = tasks.data(rows, 1).columns["x"]
        found = exported.call({"x": x})["logits"]
        np.testing.assert_allclose(found, cw.predict(model, cw.Arrays(x=x)).outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_an_onnx_file_says_what_it_is(tmp_path):
    pytest.importorskip("jax2onnx")
    import onnx

    model = small(class_names=("a", "b", "c", "d", "e"))
    made = cw.export(model, "onnx", tmp_path / "m.onnx")
    read = onnx.load(made.file)
    about = {p.key: p.value for p in read.metadata_props}
    assert about["classes"].split("\n") == ["a", "b", "c", "d", "e"]
    assert about["fingerprint"] == model.fingerprint
    (entry,) = read.graph.input
    assert entry.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert [one.name for one in read.graph.output] == ["logits"]


def test_bf16_recipes_are_exported_in_float32(tmp_path):
    pytest.importorskip("flatbuffers")
    model = small()
    model = dataclasses.replace(model, recipe=dataclasses.replace(model.recipe, precision="bf16"))
    made = cw.export(model, "stablehlo", tmp_path / "m.stablehlo")
    assert made.difference < 1e-5
    assert made.labels_differ == 0


def test_safetensors_have_every_weight_by_name(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    model = small()
    cw.export(model, "safetensors", tmp_path / "m.safetensors")
    read = numpy.load_file(tmp_path / "m.safetensors")
    assert sorted(read) == sorted(
        [*(f"params.{n}" for n in model.params), *(f"state.{n}" for n in model.state)]
    )
    assert np.array_equal(read["params.w"], model.params["w"])


def test_an_exported_file_has_the_same_bytes_each_time_and_the_mode_of_others(tmp_path):
    pytest.importorskip("safetensors")
    (tmp_path / "other").touch()
    model = small(class_names=("é", "\u2028", *"cde"))
    files = [cw.export(model, "safetensors", tmp_path / str(n)).file for n in range(6)]
    assert len({file.read_bytes() for file in files}) == 1
    assert {file.stat().st_mode for file in files} == {(tmp_path / "other").stat().st_mode}


def test_weights_leave_a_task_without_predict(tmp_path, monkeypatch):
    numpy = pytest.importorskip("safetensors.numpy")
    made = cw.export(small(predict=None), "safetensors", tmp_path / "m.safetensors")
    assert made.examples == 0 and "params.w" in numpy.load_file(made.file)
    monkeypatch.setattr(numpy, "load_file", lambda path: {"params.w": np.zeros(3, np.float32)})
    with refused(cw.errors.RecipeError, "export-weights-differ"):
        cw.export(small(), "safetensors", tmp_path / "n.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("to", ["stablehlo", "onnx"])
@pytest.mark.parametrize(
    "counts",
    [
        lambda x: x.reshape(len(x), -1),
        lambda x: jnp.stack([x[i] for i in range(x.shape[0])]),
        lambda x: x if x.shape[0] < 5 else -x,
    ],
)
def test_a_predict_that_needs_the_number_of_examples_is_told_so(tmp_path, to, counts):
    pytest.importorskip(NEEDS[to])
    model = small(predict=lambda params, state, inputs: counts(tasks.plain_logits(params, inputs)))
    with refused(cw.errors.RecipeError, "export-any-batch", format=to) as caught:
        cw.export(model, to, tmp_path / "m")
    assert caught.value.facts["where"].startswith(" at test_export.py:")


@pytest.mark.slow
def test_a_file_that_its_own_library_cannot_run_is_not_written(tmp_path):
    pytest.importorskip("jax2onnx")
    model = small(
        predict=lambda params, state, inputs: (
            tasks.plain_logits(params, inputs).at[:, 99].set(1.0, mode="drop")
        )
    )
    with refused(cw.errors.RecipeError, "export-unrunnable", library="onnxruntime"):
        cw.export(model, "onnx", tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_outputs_that_are_taken_for_logits_are_said(tmp_path):
    pytest.importorskip("flatbuffers")

    def unstated(params, state, inputs):
        return tasks.plain_logits(params, inputs) ** 3

    for returns, said_so in ((None, ["outputs-unstated"]), ("logits", [])):
        said, model = [], small(predict=unstated, returns=returns)
        cw.export(model, "stablehlo", tmp_path / "m", fresh=True, say=said.append)
        assert [fact.code for fact in said] == said_so


def test_several_outputs_keep_their_names(tmp_path):
    pytest.importorskip("flatbuffers")

    def both(params, state, inputs):
        made = tasks.plain_logits(params, inputs)
        return {"score": jnp.max(made, axis=1), "best": jnp.argmax(made, axis=1)}

    made = cw.export(small(predict=both), "stablehlo", tmp_path / "m")
    assert made.labels_differ is None and made.examples == 53


def test_a_model_that_comes_out_otherwise_is_not_written(tmp_path, monkeypatch):
    pytest.importorskip("flatbuffers")
    kind = formats.FORMATS["stablehlo"]

    def wrong(request, path):
        run = kind.open(request, path)
        return lambda inputs: {name: value + np.float32(0.1) for name, value in run(inputs).items()}

    monkeypatch.setitem(formats.FORMATS, "stablehlo", dataclasses.replace(kind, open=wrong))
    with refused(cw.errors.RecipeError, "export-differs", format="stablehlo", examples=53) as caught:
        cw.export(small(), "stablehlo", tmp_path / "m")
    assert caught.value.facts["difference"] == pytest.approx(0.1, rel=1e-3)
    assert not list(tmp_path.iterdir())


def test_small_outputs_are_compared_by_their_size(tmp_path, monkeypatch):
    pytest.importorskip("flatbuffers")
    kind = formats.FORMATS["stablehlo"]

    def doubled(request, path):
        run = kind.open(request, path)
        return lambda inputs: {name: 2 * value for name, value in run(inputs).items()}

    def tiny(params, state, inputs):
        return 1e-5 * jnp.abs(tasks.plain_logits(params, inputs))[:, :2]

    assert cw.export(small(predict=tiny), "stablehlo", tmp_path / "m").largest < 1e-3
    monkeypatch.setitem(formats.FORMATS, "stablehlo", dataclasses.replace(kind, open=doubled))
    with refused(cw.errors.RecipeError, "export-differs"):
        cw.export(small(predict=tiny), "stablehlo", tmp_path / "other")


def test_data_without_what_the_model_reads_is_one_line(tmp_path):
    with refused(cw.errors.DataError, "predict-columns"):
        cw.export(small(), "stablehlo", tmp_path / "m", data=cw.Arrays(y=np.zeros((3, 2), np.float32)))


def test_a_recipe_without_its_data_is_checked_on_made_up_examples(tmp_path):
    pytest.importorskip("flatbuffers")
    from chipwise.data.synthetic import Absent

    data = tasks.data(53, 1)
    absent = Absent(53, data.spec, "Nothing", {"label": tasks.CLASSES})
    made = cw.export(small(eval=absent), "stablehlo", tmp_path / "m", examples=20)
    assert (made.data, made.examples) == ("made-up", 20)


def test_what_cannot_be_is_one_line(tmp_path, monkeypatch):
    with refused(cw.errors.DataError, "export-format", name="onx", near="onnx"):
        cw.export(small(), "onx", tmp_path / "m")
    with refused(cw.errors.RecipeError, "task-without-predict"):
        cw.export(small(predict=None), "onnx", tmp_path / "m")
    (tmp_path / "there").write_text("mine")
    with refused(cw.errors.DataError, "export-exists"):
        cw.export(small(), "stablehlo", tmp_path / "there")
    monkeypatch.setitem(__import__("sys").modules, "flatbuffers", None)
    with refused(cw.errors.RecipeError, "export-library", library="flatbuffers"):
        cw.export(small(), "stablehlo", tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_a_folder_is_never_replaced(tmp_path):
    (tmp_path / "mine").write_text("kept")
    pytest.importorskip("safetensors")
    with refused(cw.errors.DataError, "export-unwritable", path=tmp_path):
        cw.export(small(), "safetensors", tmp_path, fresh=True)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_folder_is_replaced_only_if_an_export_made_it(tmp_path, monkeypatch):
    def write(request, path):
        path.mkdir()
        (path / "config.json").write_text("new")

    kind = dataclasses.replace(formats.FORMATS["huggingface"], write=write, open=lambda *_: None)
    monkeypatch.setitem(formats.FORMATS, "huggingface", kind)
    folder = tmp_path / "runs"
    cw.export(small(), "huggingface", folder)
    (folder / "config.json").write_text("old")
    cw.export(small(), "huggingface", folder, fresh=True)
    (folder / "checkpoints").mkdir()
    with refused(cw.errors.DataError, "export-folder-holds", path=folder, names=["checkpoints"]):
        cw.export(small(), "huggingface", folder, fresh=True)
    assert {one.name for one in folder.iterdir()} == {"config.json", "checkpoints"}
    assert [one.name for one in tmp_path.iterdir()] == ["runs"]


def test_a_disk_that_fails_under_the_library_is_an_error_of_the_system(tmp_path, monkeypatch):
    """safetensors makes an error of its own of it."""
    library = pytest.importorskip("safetensors.numpy")
    save, nowhere = library.save_file, "/proc/no folder/m"
    monkeypatch.setattr(library, "save_file", lambda arrays, path, about: save(arrays, nowhere, about))
    with refused(cw.errors.DataError, "export-unwritable", path=tmp_path / "m") as caught:
        cw.export(small(), "safetensors", tmp_path / "m")
    assert os.strerror(errno.ENOENT) in caught.value.facts["reason"] and not list(tmp_path.glob("*"))


def test_what_a_killed_export_left_is_removed_by_the_next_one(tmp_path):
    beside = tmp_path / ".m.making"
    (beside / "tmp1").mkdir(parents=True)
    (beside / "tmp1" / "model.safetensors").write_bytes(b"half")
    with hold(beside), refused(cw.errors.RunError, "folder-in-use", path=str(beside)):
        cw.export(small(), "safetensors", tmp_path / "m")
    cw.export(small(), "safetensors", tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
