"""Code that a stranger has planted in a folder, a file or a text: nothing runs it."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import chipwise as cw
import run_folders
from chipwise.base.errors import ChipwiseError
from chipwise.data import write_packed
from chipwise.data.pack.packing import pack
from chipwise.data.pack.tokenise import TextForm, read_tokenizer
from chipwise.deploy.model import recipe_of
from chipwise.deploy.pretrained import pretrained
from chipwise.run.folder.run_reader import read_run

MODULES = "tokenizers array resource json struct encodings sitecustomize usercustomize numpy".split()  # noqa: SIM905
"""What a Python that is started imports, or a process of chipwise's own."""


class Runs:
    """What unpickling runs."""

    def __init__(self, code):
        self.code = code

    def __reduce__(self):
        return exec, (self.code,)


def tokenizer(folder):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "x": 1}, unk_token="x"))
    made.save(str(folder / "t.json"))
    return folder / "t.json"


def a_module(name):
    def plant(folder, code):
        cut = tokenizer(folder)
        (folder / f"{name}.py").write_text(code)
        assert list(read_tokenizer(cut).encode(b"x")) == [1]

    return plant


def a_pickle(name):
    def plant(folder, code):
        (folder / name).write_bytes(pickle.dumps({"w": Runs(code)}))
        pretrained(folder / name)

    return plant


def a_pickle_beside_a_config(folder, code):
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Runs(code)}))
    pretrained(folder)


def modules_that_a_config_names(folder, code):
    numpy = pytest.importorskip("safetensors.numpy")
    auto = {"auto_map": {"AutoConfig": "evil.Config", "AutoTokenizer": "evil.Cut"}}
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"model_type": "gpt2", **auto}))
    (folder / "evil.py").write_text(code)
    numpy.save_file({"wte.weight": np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    weights = pretrained(folder)
    assert "auto_map" not in weights.texts.get("tokenizer_config.json", {})


def a_template_of_chats(folder, code):
    numpy = pytest.importorskip("safetensors.numpy")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    text = f"{{{{ cycler.__init__.__globals__.__builtins__.exec({code!r}) }}}}"
    (folder / "chat_template.jinja").write_text(text)
    numpy.save_file({"wte.weight": np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    assert pretrained(folder).texts["chat_template.jinja"] == text


def objects(name):
    def plant(folder, code):
        odd = np.array([Runs(code), None], object)
        with open(folder / name, "wb") as file:
            np.savez(file, x=odd) if name.endswith("npz") else np.save(file, odd, allow_pickle=True)
        pack(folder / name, folder / "out") if name.endswith("npz") else np_shard(folder)

    return plant


def np_shard(folder):
    write_packed(folder / "pack", [{"x": np.zeros((4, 2), np.float32)}])
    shard = next((folder / "pack").rglob("*.npy"))
    os.replace(folder / "x.npy", shard)
    cw.data.take(cw.PackedFolder(folder / "pack"), [0])


def a_source(stated):
    """A run folder that says how its recipe is made."""

    def plant(folder, code):
        (folder / "evil.py").write_text(code)
        rows = run_folders.usual()
        source = {"recipe": "digits", "set": [], "data": None}
        source |= {name: value % {"code": code, "folder": folder} for name, value in stated.items()}
        source["set"] = [source["set"]] if isinstance(source["set"], str) else source["set"]
        run = run_folders.write(folder / "run", rows, run_folders.finished(rows), source=source)
        recipe_of(read_run(run))

    return plant


def a_decay(folder, code):
    """A text in place of a function."""
    cw.recipe.sgd(lr=0.1, decay=code)


def a_text_to_pack(folder, code):
    (folder / "a.jsonl").write_text(json.dumps({"text": code, "__reduce__": code}) + "\n")
    pack(folder / "a.jsonl", folder / "out", text=TextForm(tokens=4))


PLANTS = {f"{name}.py in the current folder": a_module(name) for name in MODULES}
PLANTS |= {f"a pickle called {name}": a_pickle(name) for name in ("w.pt", "w.bin", "w.ckpt", "w.safetensors")}
PLANTS |= {
    "a pickle beside a config": a_pickle_beside_a_config,
    "modules that a config names": modules_that_a_config_names,
    "a template of chats": a_template_of_chats,
    "objects in an npz": objects("x.npz"),
    "objects in a shard": objects("x.npy"),
    "a file as source": a_source({"recipe": "%(folder)s/evil.py:recipe"}),
    "a module as source": a_source({"recipe": "evil"}),
    "an expression as source": a_source({"recipe": "exec(%(code)r)"}),
    "an expression as setting": a_source({"set": "lr=exec(%(code)r)"}),
    "an expression as data": a_source({"data": "%(folder)s/$(touch RAN)"}),
    "a text as a function": a_decay,
    "a text to pack": a_text_to_pack,
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_what_was_planted_does_not_run(plant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = tmp_path / "RAN"
    try:
        plant(tmp_path, f"open({str(ran)!r}, 'w').close()")
    except ChipwiseError as error:
        assert "\n" not in str(error)
    assert not ran.exists()


@pytest.mark.parametrize("how", ["module", "pickle"])
def test_the_code_would_run_elsewhere(how, tmp_path):
    """Or the test above could not fail."""
    ran = tmp_path / "RAN"
    code = f"open({str(ran)!r}, 'w').close()"
    if how == "pickle":
        pickle.loads(pickle.dumps(Runs(code)))
    else:
        (tmp_path / "tokenizers.py").write_text(code)
        subprocess.run([sys.executable, "-c", "import tokenizers"], cwd=tmp_path, check=True)
    assert ran.exists()
