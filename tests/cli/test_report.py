"""`chipwise report`: what is printed and written."""

import json

import run_folders as runs


def test_the_story_in_the_terminal(chipwise, tmp_path):
    rows = runs.usual()
    path = runs.write(tmp_path / "run", rows, runs.finished(rows), [200])
    said = chipwise("report", path)
    assert said.code == 0 and said.err == ""
    for words in ("toy: the run", "Finished: 200 steps.", "250 examples/s (245 to 255) at batch 50",
                  "20 an epoch", "training", "78 %", "Nothing stood out"):  # fmt: skip
        assert words in said.out, words


def test_json_and_html(chipwise, tmp_path):
    path = runs.write(tmp_path / "run", runs.usual(120))
    said = chipwise("report", path, "--json", "--html", tmp_path / "report.html")
    document = json.loads(said.out)
    assert said.code == 0 and document["schema"] == "chipwise.report/6"
    assert document["status"]["state"] == "unfinished"
    assert (tmp_path / "report.html").read_text(encoding="utf-8").endswith("</html>")
    assert (
        f"written: {tmp_path / 'again.html'}"
        in chipwise("report", path, "--html", tmp_path / "again.html").out
    )


def test_text_of_a_run_is_neither_markup_nor_terminal_code(chipwise, tmp_path):
    rows = [row | {f"eval/{runs.HOSTILE}": 1.0} for row in runs.usual()]
    path = runs.write(tmp_path / "run", rows, name=runs.HOSTILE, precision="[bold]x[/bold]", seed="[/]")
    said = chipwise("report", path)
    assert said.code == 0 and "\x1b" not in said.out
    assert "[red]" in said.out and "[bold]x[/bold]" in said.out


def test_errors_are_one_line(chipwise, tmp_path):
    said = chipwise("report", tmp_path)
    assert said.code == 5 and said.out == "" and "not a run folder" in said.err
    path = runs.write(tmp_path / "run", runs.usual())
    (tmp_path / "file").write_text("")
    said = chipwise("report", path, "--html", tmp_path / "file" / "report.html")
    assert said.code == 3 and "--html" in said.err
    assert len(said.err.splitlines()) == 1


def test_a_study(chipwise, tmp_path):
    run = {"seed": 0, "run": "seed-0", "done": True, "metrics": {"eval/loss": 0.5}, "steps": 200}
    rows = runs.usual()
    runs.write(tmp_path / "study" / "seed-0", rows, runs.finished(rows))
    made = {"schema": "chipwise.study/1", "recipe": "toy", "source": None, "settings": {}, "seeds": [0],
            "points": [{"set": {}, "runs": [run]}]}  # fmt: skip
    (tmp_path / "study" / "study.json").write_text(json.dumps(made))
    said = chipwise("report", tmp_path / "study", "--html", tmp_path / "study.html")
    assert said.code == 0 and "eval/accuracy 0.8718" in said.out
    assert (tmp_path / "study.html").exists()
