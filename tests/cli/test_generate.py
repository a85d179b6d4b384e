"""`chipwise generate` at the command line."""

import dataclasses
import json

import pytest

SIZES = {"depth": 1, "width": 16, "heads": 2, "context": 64, "vocabulary": 257}
TRAINING = {"batch": 8, "replicas": 2, "duration": "2st", "precision": "f32"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    import chipwise as cw
    from chipwise.data.pack.tokenise import TextForm

    folder = tmp_path_factory.mktemp("text")
    (folder / "book.txt").write_text("One morning it was two. " * 100)
    cw.pack(folder / "book.txt", folder / "tokens", text=TextForm(tokens=65), split=0.2)
    settings, data = [f"{k}={v}" for k, v in (SIZES | TRAINING).items()], str(folder / "tokens")
    source = {"recipe": "gpt2-124m", "set": settings, "data": data}  # as the command line makes it
    recipe = dataclasses.replace(cw.load("gpt2-124m", settings, data), source=source)
    cw.fit(recipe, folder / "run", on=cw.On(devices=1), progress="none")
    return folder / "run"


@pytest.mark.slow
def test_it_goes_on_with_a_prompt_and_with_several(chipwise, run):
    words = ("generate", run, "--prompt", "One", "--tokens", 6, "--devices", 1)
    one, told = chipwise(*words), chipwise(*words, "--json")
    assert one.code == told.code == 0 and one.out.startswith("One") and one.out.endswith("\n")
    found = json.loads(told.out)
    (text,) = found["texts"]
    assert "".join(c for c in text if c.isprintable()) in one.out.replace("\n", "") or "\\x" in one.out
    assert len(found["tokens"][0]) == 6 and found["ends"] == ["length"] and found["prompts"] == ["One"]
    both = chipwise(*words[:-1], 2, "--prompt", "two", "--json")
    assert json.loads(both.out)["tokens"][0] == found["tokens"][0]
    assert "6 tokens" in one.err


@pytest.mark.slow
def test_what_it_refuses_in_a_line(chipwise, run, digits):
    above = {"tokens": 65, "context": 64}
    assert chipwise("generate", run, "--prompt", "x" * 65).refused(2, "prompt-above-context", **above)
    nowhere = run / "none.json"
    assert chipwise("generate", run, "--tokenizer", nowhere).refused(3, "tokenizer-missing", path=nowhere)
    assert chipwise("generate", digits).refused(2, "task-without-decode", recipe="digits")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_exported_model_says_the_same_in_transformers(chipwise, run, tmp_path):
    pytest.importorskip("safetensors")
    told = chipwise("export", run, "--to", "huggingface", "--out", tmp_path / "m", "--json")
    assert told.code == 0 and json.loads(told.out)["format"] == "huggingface"
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    net = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "m").eval()
    found = chipwise("generate", run, "--prompt", "One", "--tokens", 20, "--temperature", 0, "--json")
    (ours,) = json.loads(found.out)["tokens"]
    with torch.no_grad():
        given = torch.tensor([list(b"One")])
        whole = net.generate(given, max_new_tokens=20, do_sample=False, pad_token_id=256)[0, 3:].tolist()
    assert net.config.eos_token_id == 256 and [one for one in whole if one != 256] == ours


@pytest.mark.slow
def test_a_folder_of_transformers_goes_on_without_its_sizes(chipwise, run, tmp_path):
    pytest.importorskip("safetensors")
    assert chipwise("export", run, "--to", "huggingface", "--out", tmp_path / "m").code == 0
    data = run.parent / "tokens"
    words = ["--data", data, "--set", "batch=8", "--set", "replicas=2", "--set", "duration=1st"]
    words += ["--set", "precision=f32", "--devices", 1, "--quiet"]
    told = chipwise("train", "gpt2-124m", "--from", tmp_path / "m", "--run", tmp_path / "run", *words)
    assert told.code == 0, told.err
    stored = json.loads((tmp_path / "run" / "recipe.json").read_text())["source"]
    assert {"depth=1", "width=16", "heads=2", "context=64", "vocabulary=257"} <= set(stored["set"])
    other = chipwise("train", "llama-8b", "--from", tmp_path / "m", "--run", tmp_path / "no", *words)
    assert other.refused(2, "weights-of-another-recipe", theirs="gpt2-124m")
    assert not (tmp_path / "no").exists()
    (tmp_path / "m" / "config.json").unlink()  # the run needs the folder no more
    said = chipwise("generate", tmp_path / "run", "--prompt", "One", "--tokens", 3, "--json")
    assert said.code == 0 and len(json.loads(said.out)["tokens"][0]) == 3
