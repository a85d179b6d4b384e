import json

import pytest

from chipwise.base.facts import fact


@pytest.mark.slow
def test_a_run_leaves_as_weights(chipwise, digits, tmp_path):
    pytest.importorskip("safetensors")
    out = tmp_path / "m.safetensors"
    said = chipwise("export", digits, "--to", "safetensors", "--out", out, "--json")
    assert said.code == 0, said.err
    shown = json.loads(said.out)
    assert (shown["format"], shown["examples"], shown["labels_differ"], shown["data"]) == (
        "safetensors", 0, None, "",
    )  # fmt: skip
    assert shown["file"] == str(out) and shown["bytes"] == out.stat().st_size
    said = chipwise("export", digits, "--to", "safetensors", "--out", out, "--fresh")
    assert str(fact("written", path=out)) in said.out
    assert str(fact("exported-weights", runs="safetensors")) in said.out
    assert chipwise("export", digits, "--to", "safetensors", "--out", out).refused(3, "export-exists")


@pytest.mark.slow
def test_a_program_of_one_size_says_so(chipwise, digits, tmp_path):
    pytest.importorskip("flatbuffers")
    said = chipwise("export", digits, "--to", "stablehlo", "--batch", 8, "--out", tmp_path / "m")
    assert str(fact("exported-batch", batch=8)) in said.out
    said = chipwise("export", digits, "--to", "stablehlo", "--out", tmp_path / "any", "--json")
    assert json.loads(said.out)["batch"] is None


def test_bad_input_is_one_line(chipwise, digits, tmp_path):
    assert chipwise("export", digits, "--to", "tflite").refused(3, "export-format", name="tflite")
    assert chipwise("export", tmp_path, "--to", "onnx").refused(5, "not-a-run")
