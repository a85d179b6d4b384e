"""A run's story: what a folder tells, and nothing that it does not."""

import json
import math
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import chipwise as cw
import run_folders as runs
import tasks
from chipwise.explain.report.report_parts import parts
from chipwise.explain.report.run_report import report
from chipwise.explain.report.stored_settings import rebuilt
from chipwise.recipe.described import described_rows as settings_of
from chipwise.run.folder.run_reader import holes, read_run
from explain.report.stories import codes, found, typed, whole
from refusals import refused

# ---- a whole run


def test_a_finished_run(tmp_path):
    document = whole(tmp_path)
    json.dumps(document, allow_nan=False)
    assert document["schema"] == "chipwise.report/6" and document["kind"] == "run"
    assert document["status"]["state"] == "finished" and document["status"]["steps"] == 200
    assert document["speed"] == {
        "examples_per_second": 250.0, "quartiles": [245.0, 255.0], "intervals": 19, "share_of_peak": None,
        "of": "result.json", "batch": 50, "replicas": 5,
    }  # fmt: skip
    assert document["fingerprint"] == "ab" * 32
    assert document["metrics"]["eval/loss"] == pytest.approx(0.51, abs=0.001)
    assert document["intervals"][0]["speed"] == 125.0 and document["intervals"][0]["warmup"]
    assert len(document["curves"]["train/loss"]) == 20 and len(document["curves"]["eval/loss"]) == 5
    assert document["curves"]["train/loss"][0][:3] == [10, 0.5, 19.0]


def test_the_ledger_and_the_faults_of_a_run(tmp_path):
    whole(tmp_path)
    run = next(path.parent for path in tmp_path.rglob("recipe.json"))
    head = {"ledger": 1, "from": 0, "recipe": "a", "data": {}, "computed": {}}
    rows = [{"step": step, "parameters": f"{step:016x}"} for step in (40, 80)]
    (run / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (head, *rows)))
    end = {"event": "end", "step": 90, "how": "failed", "code": "devices-unlike"}
    for verified in (
        [],
        {"replicas": "x", "step": 80},
        {"replicas": 6, "step": 80, "faults": [{"step": 30}]},
    ):
        assert "about-verified" not in {one["code"] for one in report(run)["about"]}
        with open(run / "processes.jsonl", "a") as file:
            file.write(json.dumps({**end, "verified": verified}) + "\n")
    told = {one["code"]: one for one in report(run)["about"]}
    assert (told["about-ledger"]["rows"], told["about-ledger"]["step"]) == (2, 80)
    assert [told["about-verified"][name] for name in ("replicas", "of", "step", "faults")] == [6, 400, 80, 1]
    assert (told["about-faults"]["count"], told["about-faults"]["steps"]) == (3, [90] * 3)
    result = json.loads((run / "result.json").read_text())
    result["devices"]["exact"] = False  # so nothing compared the devices
    (run / "result.json").write_text(json.dumps(result))
    assert "about-ledger-alone" in {one["code"] for one in report(run)["about"]}
    (run / "ledger.jsonl").write_text("{}\n")
    assert "about-ledger-damaged" in {one["code"] for one in report(run)["about"]}


def test_the_parts_add_up_to_the_wall_time(tmp_path):
    time = whole(tmp_path)["seconds"]
    assert time["parts"] == {
        "start": 10.0, "compile": 5.0, "train": 78.0, "wait_data": 2.0, "evaluate": 3.0, "checkpoint": 1.0,
        "other": 1.0,
    }  # fmt: skip
    assert sum(time["parts"].values()) == pytest.approx(time["total"]) == 100.0


def test_the_arithmetic(tmp_path):
    rows = dict(whole(tmp_path)["settings"])
    assert rows["batch"] == "50 = 5 replicas × 10"
    assert rows["duration"] == "10ep = 200 steps (20 an epoch)"


def test_a_batch_beyond_any_float_is_left_out():
    assert "batch" not in dict(settings_of({"batch": 10**400, "replicas": 1}, None))
    assert dict(settings_of({"batch": 6, "replicas": 10**400}, None))["batch"].startswith("6 = 10,000")


def test_a_rate_or_a_data_set_beyond_any_float_is_left_out(tmp_path):
    assert rebuilt(10**400) is None and rebuilt({"schedule": "linear", "start": 10**400, "end": 0.0}) is None
    held_out = {**runs.RECIPE["task"]["eval"], "examples": 10**400}
    document = whole(tmp_path, recipe={"task": {**runs.RECIPE["task"], "eval": held_out}})
    assert document["status"]["state"] == "finished"


def test_nothing_stands_out_in_a_plain_run(tmp_path):
    assert whole(tmp_path)["advice"] == []


def test_nothing_is_written_and_no_lock_is_taken(tmp_path):
    path = runs.write(tmp_path / "run", runs.usual(120), checkpoints=[100])
    (path / "lock").write_text("process 1 on elsewhere")
    before = {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in path.rglob("*")}
    assert report(path)["status"]["state"] == "unfinished"
    assert {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in path.rglob("*")} == before


def test_a_run_in_progress(tmp_path):
    path = runs.write(
        tmp_path / "run",
        runs.usual(120),
        checkpoints=[100],
        processes=[runs.started(), runs.ended(60), runs.started(60)],
    )
    document = report(path)
    assert document["status"]["state"] == "running"
    (told,) = document["status"]["facts"]
    assert (told["code"], told["step"], told["total"]) == ("story-run-going-on", 120, 200)
    assert told["pid"] == os.getpid() and codes(document["commands"]) == ["next-repeat-in-program"]
    assert document["resumes"] == [{"when": "2026-01-15T12:00:00+00:00", "step": 60}]


# ---- runs that did not end well


def test_an_unfinished_run_tells_what_its_rows_tell(tmp_path):
    source = {"recipe": "digits", "set": ["lr=0.4"], "data": "/a folder"}
    document = report(runs.write(tmp_path / "run", runs.usual(120), checkpoints=[100], source=source))
    told, kept, _ = document["status"]["facts"]
    assert (told["code"], told["step"], told["total"]) == ("story-run-not-finished", 120, 200)
    assert (kept["code"], kept["step"]) == ("checkpoint-newest", 100)
    time = document["seconds"]
    assert time["parts"]["train"] == pytest.approx(4 + 110 / 5)
    assert (
        sum(time["parts"].values()) == pytest.approx(time["total"]) == document["curves"]["eval/loss"][-1][2]
    )
    assert document["speed"]["of"] == "metrics.jsonl" and document["speed"]["examples_per_second"] == 250.0
    resume = {c["code"]: c["command"] for c in document["commands"]}["next-resume"]
    assert resume == f"chipwise train digits --set lr=0.4 --data '/a folder' --run {tmp_path / 'run'}"


DIVERGED = {"code": "loss-not-finite", "first": 121, "last": 130, "value": "nan"}


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (runs.row(130, diverged=DIVERGED), "story-diverged-loss"),
        (runs.row(130, diverged={**DIVERGED, "code": "parameter-not-finite"}), "story-diverged-parameter"),
        (runs.row(130, eval_loss=math.nan), "story-diverged-some-loss"),
    ],
)
def test_a_diverged_run(tmp_path, last, code):
    document = report(runs.write(tmp_path / "run", [*runs.usual(120), last], checkpoints=[80, 100]))
    assert document["status"]["state"] == "diverged"
    one = found(document, "story-run-diverged")
    told, before = one["also"]
    assert (told["code"], told["first"], told["last"]) == (code, 121, 130)
    assert (before["code"], before["step"]) == ("checkpoint-before", 100)
    assert codes(document["status"]["facts"]) == [
        "story-run-diverged",
        code,
        "story-run-length",
        "checkpoint-newest",
    ]
    assert {"--set lr=0.13", "--set clip=1.0"} < set(typed(one))
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize(
    ("processes", "code"),
    [
        ([], "story-run-end-unknown"),
        ([runs.started(started=1.0)], "story-end-unsaid"),
        ([runs.started(host="another")], "story-end-unsaid"),
        ([runs.started(), runs.ended(120, "stopped", "stopped")], "story-end-stopped"),
        ([runs.started(), runs.ended(120, "failed", "DataError")], "story-end-failed"),
        ([runs.started(), {"event": "end", "step": 120, "how": [1]}], "story-run-end-unknown"),
    ],
)
def test_what_ended_a_run(tmp_path, processes, code):
    path = runs.write(tmp_path / "run", runs.usual(120), processes=processes)
    document = report(path)
    assert document["status"]["state"] == "unfinished"
    assert codes(document["status"]["facts"]) == ["story-run-not-finished", "checkpoint-none", code]


def test_the_machine_of_an_unfinished_run(tmp_path):
    devices = {"platform": "cpu", "kind": "cpu", "count": 8, "simulated": True, "exact": True}
    machine = {"title": "a laptop", "python": "3.11", "versions": {"jax": "0.10"}}
    start = runs.started(devices=devices, machine=machine)
    source = {"recipe": "digits", "set": [], "data": None}
    path = runs.write(
        tmp_path / "run", runs.usual(120), processes=[start, runs.ended(120, "stopped")], source=source
    )
    document = report(path)
    assert document["devices"]["count"] == 8 and "--simulate 8" in document["commands"][0]["command"]
    (told,) = [told for told in document["sources"] if told["code"] == "source-machine-simulated"]
    assert told["machine"] == "a laptop"


def test_a_diverged_run_is_told_once_and_with_the_values_of_one_step(tmp_path):
    rows = [*runs.usual(80), runs.row(84, eval_accuracy=0.0, eval_loss=None)]
    document = report(runs.write(tmp_path / "run", [*rows, runs.row(90, diverged=DIVERGED)]))
    said = document["status"]["facts"]
    assert codes(said) == ["story-run-diverged", "story-diverged-loss", "story-run-length", "checkpoint-none"]
    assert found(document, "story-run-diverged")["also"][0] == said[1]
    assert document["metrics"]["eval/accuracy"] == 0 and document["metrics"]["eval/loss"] is None
    assert document["metric_steps"] == {"train": 80, "eval": 84}


def test_a_diverged_run_is_tried_again_with_one_lower_rate(tmp_path):
    row = runs.row(30, diverged=DIVERGED)
    source = {"recipe": "mine.py:recipe", "set": ["lr = 0.4", "seed=1"], "data": None}
    mine = report(runs.write(tmp_path / "a", [row], checkpoints=[20], source=source))
    lowered = f"chipwise train mine.py:recipe --set seed=1 --set lr=0.13 --run {tmp_path / 'a-again'}"
    assert [(c["code"], c["command"]) for c in mine["commands"]] == [
        ("next-try-again", lowered),
        ("next-evaluate", f"chipwise eval {tmp_path / 'a'} --recipe mine.py:recipe"),
    ]
    source = {"recipe": "digits", "set": ["lr=1e9"], "data": None}
    described = cw.load("digits", ["lr=1e9"]).describe()
    known = report(runs.write(tmp_path / "b", [row], **described, source=source))
    assert "digits --set lr=3.3e+08 --run" in known["commands"][0]["command"]
    code = {"optimizer": "sgd", "lr": {"schedule": "function", "call": "mine"}}
    unknown = report(runs.write(tmp_path / "c", [row], optimizer=code, source=source))
    assert unknown["commands"][0]["command"] == "chipwise find-lr digits --set lr=1e9"
    (program,) = report(runs.write(tmp_path / "d", [row]))["commands"]
    assert (program["code"], program["setting"]) == ("next-try-again-with-in-program", "lr=0.13")


def test_an_empty_run(tmp_path):
    document = report(runs.write(tmp_path / "run"))
    assert document["status"]["state"] == "empty" and document["seconds"] is None
    assert document["curves"] == {} and document["speed"] is None and document["advice"] == []


# ---- stored schedules


@pytest.mark.parametrize(
    "schedule",
    [
        cw.schedules.constant(0.1),
        cw.schedules.linear(0.1, 0.0),
        cw.schedules.cosine(0.1),
        cw.one_cycle(0.4, warmup="5ep", shape="cosine"),
        cw.schedules.exponential(0.01, 0.5, decay="30st", floor=1e-4),
        cw.schedules.piecewise({"0st": 0.1, "50%": 0.01}),
        cw.schedules.warmup(cw.schedules.cosine(1e-3), "5%"),
        cw.schedules.warmup(cw.schedules.warmup(0.3, "5%"), "5%"),
    ],
)
def test_every_schedule_is_rebuilt_from_what_is_stored(schedule):
    assert rebuilt(json.loads(json.dumps(schedule.json()))) == schedule


@pytest.mark.parametrize(
    "stored",
    [
        {"schedule": "function", "call": "mine"},
        {"schedule": "warmup", "of": {"schedule": "function", "call": "mine"}, "length": "5%"},
        {"schedule": "constant", "value": "__import__('os').getpid()"},
        {"schedule": "one_cycle"},
        {"schedule": "Schedule"},
        {"schedule": {}, "of": []},
        "__import__('os').system('true')",
        "constant(__import__('os').getpid())",
        "constant(**{'value': 1.0})",
        "one_cycle(peak=",
        "(" * 5000,
        "eval('1')",
        "open('x')",
        None,
        True,
        [1],
    ],
)
def test_what_is_no_schedule_is_not_run(stored):
    assert rebuilt(stored) is None


def test_a_schedule_that_is_code_says_how_to_draw_it(tmp_path):
    stored = {"schedule": "function", "call": "mine"}
    rate = whole(tmp_path, recipe={"optimizer": {"optimizer": "sgd", "lr": stored}})["schedule"]
    assert "values" not in rate and rate["note"]["code"] == "rate-is-code"


# ---- whose code is run


def test_no_code_of_a_run_is_run(tmp_path):
    marker, file = tmp_path / "was run", tmp_path / "mine.py"
    file.write_text(f"open({str(marker)!r}, 'w').close()\nimport tasks\nrecipe = tasks.recipe(name='mine')\n")
    source = {"recipe": f"{file}:recipe", "set": [], "data": None}
    described = {**tasks.recipe(name="mine").describe(), "source": source}
    assert report(runs.write(tmp_path / "run", **described))["name"] == "mine" and not marker.exists()


# ---- damage


def test_no_run_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        with refused(cw.errors.RunError, "not-a-run", path=str(path)):
            report(path)


def test_a_folder_of_runs_names_them(tmp_path):
    for name in ("b", "a", "c d"):
        runs.write(tmp_path / "runs" / name)
    (tmp_path / "runs" / "other").mkdir()
    command = f"chipwise report {tmp_path / 'runs' / 'a'}"
    with refused(cw.errors.RunError, "folder-of-runs", runs=["a", "b", "c d"], command=command):
        report(tmp_path / "runs")


@pytest.mark.parametrize("text", ["{", "[]", '"text"', "[" * 100_000, ""])
def test_a_damaged_recipe(tmp_path, text):
    path = runs.write(tmp_path / "run", runs.usual())
    (path / "recipe.json").write_text(text)
    with refused(cw.errors.RunError, "recipe-json-damaged", run=str(path)):
        report(path)


def test_a_damaged_result_is_said_and_the_rows_are_told(tmp_path):
    path = runs.write(tmp_path / "run", runs.usual())
    for text in ('{"steps": 200', "[1]", "[" * 100_000):
        (path / "result.json").write_text(text)
        document = report(path)
        assert document["notes"][0]["code"] == "result-damaged"
        assert document["status"]["state"] == "unfinished" and document["metrics"]["eval/loss"] < 1


def test_a_last_line_cut_anywhere_is_usual(tmp_path):
    path = runs.write(tmp_path / "run", runs.usual(40))
    file = path / "metrics.jsonl"
    whole = file.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for end in (start, start + 1, (start + len(whole)) // 2, len(whole) - 2, len(whole) - 1, len(whole)):
        file.write_bytes(whole[:end])
        run = read_run(path)
        assert run.problems == []
        assert len(run.rows) == (5 if end >= len(whole) - 1 else 4)


@pytest.mark.parametrize("value", [[], {}, 3])
def test_a_best_metric_and_a_checkpoint_that_are_none(tmp_path, value):
    best = {"metric": value, "step": 40}
    path = runs.write(tmp_path / "run", runs.usual(), runs.finished(runs.usual(), best=best), [200])
    about = path / "checkpoints" / "200" / "about"
    about.mkdir()
    (about / "metadata").write_text(json.dumps(value))
    assert read_run(path).kept is None and not list(holes(path, None))
    assert report(path)["status"]["state"] == "finished"


def test_other_damaged_lines_are_counted(tmp_path):
    path = runs.write(tmp_path / "run", runs.usual(40))
    lines = (path / "metrics.jsonl").read_text().splitlines()
    lines[1:3] = ['{"step": 20, "tr', '{"step": "20"}', "", "[1, 2]"]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (note,) = report(path)["notes"]
    assert (note["code"], note["count"], note["lines"]) == ("metrics-damaged", 3, [2, 3, 5])


def test_a_recipe_that_lacks_what_a_clock_takes(tmp_path):
    document = report(runs.write(tmp_path / "run", runs.usual(), task=None, optimizer=3, batch="many"))
    assert document["status"]["total"] is None and codes(document["notes"])[-1] == "length-unknown"


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
ROWS = st.lists(
    st.dictionaries(
        st.sampled_from(
            ["step", "epoch", "seconds", "train/loss", "eval/loss", "eval/accuracy", "steps_per_second",
             "examples_per_second", "wait_data_share", "diverged"]
        ),
        VALUES | st.integers(0, 300),
    )
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=ROWS,
    result=st.none()
    | st.dictionaries(st.sampled_from(["speed", "seconds", "steps", "feed", "metrics"]), VALUES),
)
def test_any_rows_make_a_document(tmp_path_factory, rows, result):
    path = runs.write(tmp_path_factory.mktemp("any") / "run", rows, result)
    json.dumps(report(path), allow_nan=False)


# ---- real runs


def small(**changes):
    """Quick to compile, the same programs at any rate."""
    return tasks.recipe(task=tasks.task(loss=tasks.plain_loss, augment=None), replicas=1, **changes)


@pytest.mark.as_users_compile
@pytest.mark.slow
def test_a_real_run_resumed(tmp_path):
    recipe = small()
    how = dict(on=cw.On(devices=1), log_every="4st", eval_every="10st", progress="none")
    cw.fit(recipe, tmp_path / "run", stop_after="12st", **how)
    document = report(tmp_path / "run")
    assert document["status"]["state"] == "unfinished" and document["status"]["checkpoint"] == 12
    assert document["resumes"] == []
    result = cw.fit(recipe, tmp_path / "run", **how)
    document = report(tmp_path / "run")
    assert document["status"]["state"] == "finished" and document["notes"] == []
    assert [start["step"] for start in document["resumes"]] == [12]
    assert [i["last"] for i in document["intervals"]] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert [i["first"] for i in document["intervals"] if i["warmup"]] == [1, 13]
    assert document["fingerprint"] == result.fingerprint
    assert document["metrics"] == pytest.approx(result.metrics)
    covers = document["seconds"]["covers"]
    assert (covers["code"], covers["step"]) == ("covers-finishing-process", 13)
    assert len(document["schedule"]["values"]) == 30 and document["schedule"]["peak"] == 0.02
    wall = [point[2] for point in document["curves"]["train/loss"]]
    assert wall == sorted(wall)


def test_a_real_run_that_diverges(tmp_path):
    recipe = small(
        optimizer=cw.adamw(lr=cw.schedules.piecewise({"0st": 0.01, "15st": 1e38}), weight_decay=0.01)
    )
    with pytest.raises(cw.errors.DivergedError):
        cw.fit(recipe, tmp_path / "run", on=cw.On(devices=1), eval_every=None, log_every="5st",
               checkpoint_every="5st", progress="none")  # fmt: skip
    document = report(tmp_path / "run")
    assert document["status"]["state"] == "diverged"
    before = found(document, "story-run-diverged")["also"][-1]
    assert (before["code"], before["step"]) == ("checkpoint-before", 15)


@pytest.mark.parametrize(
    ("recipe", "result"),
    [
        ({"task": {"train": {"examples": 10**60}}}, None),
        ({}, {"speed": {"examples_per_second": 0, "examples_per_second_quartiles": [0, 1], "intervals": 9}}),
    ],
)
def test_numbers_that_cannot_be_do_not_break_the_story(tmp_path, recipe, result):
    rows = runs.usual()
    folder = runs.write(tmp_path / "run", rows, result and runs.finished(rows) | result)
    stored = json.loads((folder / "recipe.json").read_text())
    (folder / "recipe.json").write_text(json.dumps(stored | recipe))
    assert report(folder)["kind"] == "run"


# ---- the best evaluation, and an early end


BEST = {"metric": "eval/accuracy", "value": 0.9, "step": 120, "ended_early": True, "patience": "2ep"}


def how(document, code):
    (one,) = (told for told in document["commands"] if told["code"] == code)
    return one["command"]


def test_an_early_end_says_so_and_repeats_itself(tmp_path):
    rows = runs.usual(160)
    source = {"recipe": "digits", "set": [], "data": None, "eval_data": "/my/third"}
    document = whole(tmp_path, rows, best=BEST, recipe={"source": source})
    (told,) = document["status"]["facts"]
    about = {n: told[n] for n in ("code", "metric", "value", "best", "step", "total", "patience")}
    assert about == {
        "code": "ended-early", "metric": "eval/accuracy", "value": 0.9, "best": 120, "step": 160,
        "total": 200, "patience": "2ep",
    }  # fmt: skip
    assert document["best"]["step"] == 120 and document["best"]["metrics"].keys() == {
        "eval/loss",
        "eval/accuracy",
    }
    again = how(document, "next-repeat").split()
    for flag, value in (
        ("--keep-best", "eval/accuracy"),
        ("--patience", "2ep"),
        ("--eval-data", "/my/third"),
    ):
        assert again[again.index(flag) + 1] == value
    assert how(document, "next-evaluate").split()[3:] == ["--best"]
    for damaged in ({**BEST, "step": "x"}, {**BEST, "step": 10**400}, {"metric": 3}, [], 7):
        assert whole(tmp_path / f"{id(damaged)}", rows, best=damaged)["best"] is None


def test_numbers_that_are_not_finite_are_no_json(tmp_path):
    rows = runs.usual(160)
    devices = {"count": math.inf, "parameters": math.nan}
    document = whole(tmp_path, rows, devices=devices, recipe={"batch": math.nan, "replicas": math.inf})
    json.dumps(document, allow_nan=False)
    assert document["speed"]["batch"] is document["speed"]["replicas"] is None


@pytest.mark.parametrize("seconds", [0, 1.0, -5.0])
def test_rows_of_less_time_than_their_training_divide_by_no_zero(tmp_path, seconds):
    made = runs.write(tmp_path / "run", [runs.timed(10, seconds=seconds), runs.timed(20, seconds=seconds)])
    document = report(made)
    time = document["seconds"]
    assert time["total"] == pytest.approx(sum(time["parts"].values())) and time["total"] == 4.0
    assert [*parts(document)]


def test_rows_without_any_time_were_not_timed(tmp_path):
    document = report(runs.write(tmp_path / "run", [runs.row(10, 0, train_loss=1.0)]))
    assert document["seconds"] is None and [*parts(document)]


def test_commands_have_no_secret_of_an_address(tmp_path):
    secret = "https://u:pw@host/pack?sig=ABC"
    origin = {"data": secret, "eval_data": secret, "from": secret, "set": [f"text={secret}"]}
    text = json.dumps(whole(tmp_path, recipe={"source": {"recipe": "digits", **origin}}))
    assert text.count("https://host/pack") >= 4 and "u:pw" not in text and "ABC" not in text


@pytest.mark.parametrize("typed", [".", "inside/.."])
def test_a_run_that_is_the_working_directory_is_repeated_beside_it(tmp_path, monkeypatch, typed):
    rows = runs.usual()
    source = {"recipe": "digits", "set": []}
    made = runs.write(tmp_path / "run", rows, runs.finished(rows), source=source)
    (made / "inside").mkdir()
    monkeypatch.chdir(made)
    assert how(report(typed), "next-repeat") == f"chipwise train digits --simulate 2 --run {made}-again"


def test_the_best_of_an_unfinished_run_is_that_of_its_rows(tmp_path):
    start = runs.started(best={"metric": "eval/loss", "patience": None})
    document = report(runs.write(tmp_path / "run", runs.usual(130), processes=[start, runs.ended(130)]))
    assert (document["best"]["step"], document["best"]["ended_early"]) == (120, False)


def test_a_constant_rate_is_no_finding(tmp_path):
    optimizer = {"optimizer": "sgd", "lr": 0.1}
    document = whole(tmp_path, recipe={"optimizer": optimizer})
    assert len(set(document["schedule"]["values"])) == 1
    assert [one["code"] for one in document["advice"] if one["about"] != "time"] == []
