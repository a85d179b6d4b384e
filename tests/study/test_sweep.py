"""Many runs as one: each is what it would be alone, none is made twice, and a stop loses nothing."""

import dataclasses
import json
import os
import shutil
import signal

import jax
import pytest

import chipwise as cw
import tasks
from chipwise.base.errors import RunError
from chipwise.base.locks import hold
from chipwise.machine.compilation_cache import compiled_once
from chipwise.recipe.settings import apply
from chipwise.run.folder.run_folder import RunFolder
from chipwise.run.session import Session
from chipwise.study import study_file, study_runs
from chipwise.study.sweep import sweep
from refusals import refused

pytestmark = pytest.mark.as_users_compile

RATES = {"lr": [0.02, 0.04]}
FAST = {"on": cw.On(devices=1), "log_every": "2st", "eval_every": None, "progress": "none"}


def plain(**changes):
    """The small task at its quickest to compile."""
    task = tasks.task(loss=tasks.plain_loss, augment=None)
    return tasks.recipe(**{"task": task, "duration": "5st", "replicas": 2, "ema": 0.9, **changes})


def alone(rate, seed):
    recipe = apply(plain(), {"lr": str(rate)})
    return cw.fit(dataclasses.replace(recipe, seed=seed), **FAST)


@pytest.fixture
def trained(monkeypatch):
    """The folders of the runs that were really trained, in order."""
    folders, fit = [], study_runs.fit

    def noting(recipe, run, **options):
        folders.append("/".join(run.parts[-2:]))
        return fit(recipe, run, **options)

    monkeypatch.setattr(study_runs, "fit", noting)
    return folders


def names(*seeds, points=("lr=0.02", "lr=0.04")):
    return [f"{point}/seed-{seed}" for seed in seeds for point in points]


@pytest.mark.slow
def test_runs_are_what_they_are_alone_and_seeds_alternate_outermost(tmp_path, trained):
    rounds = []
    study = sweep(
        plain(), RATES, seeds=2, run=tmp_path, after_round=lambda s: rounds.append(len(trained)), **FAST
    )
    assert trained == names(0, 1)
    assert rounds == [2, 4]
    for rate, point in zip((0.02, 0.04), study.points, strict=True):
        assert point.settings == {"lr": str(rate)}
        for run in point.runs.values():
            stored = json.loads((tmp_path / run.run / "result.json").read_text())
            assert run.done and run.steps == 5 and run.seconds > 0
            assert run.metrics == stored["metrics"]
            assert run.fingerprint == stored["fingerprint"]
    assert study.points[1].runs[1].fingerprint == alone(0.04, 1).fingerprint
    assert study_file.read(tmp_path) == study


@pytest.mark.slow
def test_what_is_there_is_not_trained_again_and_more_extends_it(tmp_path, trained):
    first = sweep(plain(), {"lr": ["0.02"]}, seeds=1, run=tmp_path, **FAST)
    more = sweep(plain(), {"lr": [".020", 0.04]}, seeds=[0, 5], run=tmp_path, **FAST)
    assert trained == ["lr=0.02/seed-0", "lr=0.04/seed-0", *names(5)]
    assert more.points[0].runs[0] == first.points[0].runs[0]
    assert (more.settings, more.seeds) == ({"lr": ["0.02", "0.04"]}, [0, 5])
    again = sweep(plain(), {"lr": [0.04]}, seeds=[5], run=tmp_path, **FAST)
    assert len(trained) == 4
    assert again == more  # the study remembers what this command did not name
    (tmp_path / "study.json").unlink()
    assert sweep(plain(), {"lr": [0.02, 0.04]}, seeds=[0, 5], run=tmp_path, **FAST) == more
    assert len(trained) == 4


def stop_at(monkeypatch, run, step):
    log = RunFolder.log

    def log_and_stop(self, row):
        log(self, row)
        if str(self.path).endswith(run) and row["step"] >= step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunFolder, "log", log_and_stop)


@pytest.mark.slow
def test_a_stop_saves_the_run_and_the_study_goes_on_to_the_same_bits(tmp_path, monkeypatch, trained):
    before = signal.getsignal(signal.SIGTERM)
    stop_at(monkeypatch, "lr=0.04/seed-0", 2)
    settings = {**FAST, "log_every": "1st"}
    with refused(cw.errors.Stopped, "study-stopped", signal="SIGTERM", done=1, total=4):
        sweep(plain(duration="40st"), RATES, seeds=2, run=tmp_path, **settings)
    assert signal.getsignal(signal.SIGTERM) is before
    assert [run.done for point in study_file.read(tmp_path).points for run in point.runs.values()] == [
        True, False, False, False,
    ]  # fmt: skip
    assert 0 < cw.run.restore_run(plain(), tmp_path / "lr=0.04/seed-0").steps < 40
    monkeypatch.setattr(RunFolder, "log", RunFolder.log.__closure__[0].cell_contents)
    study = sweep(plain(duration="40st"), RATES, seeds=1, run=tmp_path, **FAST)
    assert trained == ["lr=0.02/seed-0", "lr=0.04/seed-0", "lr=0.04/seed-0"]
    whole = cw.fit(apply(plain(duration="40st", seed=0), {"lr": "0.04"}), **FAST)
    assert study.points[1].runs[0].fingerprint == whole.fingerprint


@pytest.mark.slow
def test_a_stop_too_late_for_its_run_stops_before_the_next(tmp_path, monkeypatch, trained):
    evaluate = Session.evaluate

    def evaluate_and_stop(self):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self)

    monkeypatch.setattr(Session, "evaluate", evaluate_and_stop)
    with refused(cw.errors.Stopped, "study-stopped", signal="SIGINT", done=1, total=2):
        sweep(plain(), seeds=2, run=tmp_path, **FAST)
    assert trained == [f"{tmp_path.name}/seed-0"]
    assert study_file.read(tmp_path).points[0].runs[0].done


@pytest.mark.slow
def test_a_run_that_diverged_is_a_result(tmp_path, trained):
    settings = {"lr": [1e38, 0.02]}
    recipe = plain(optimizer=cw.sgd(lr=0.1), ema=None)
    study = sweep(recipe, settings, seeds=1, run=tmp_path, **FAST)
    wild, tame = (point.runs[0] for point in study.points)
    assert wild.diverged["code"] == "loss-not-finite" and wild.diverged["value"] in ("nan", "inf")
    assert 1 <= wild.diverged["first"] <= wild.diverged["last"] <= 5
    assert not wild.done and tame.done
    assert sweep(recipe, settings, seeds=1, run=tmp_path, **FAST) == study
    assert len(trained) == 2
    for file in (tmp_path / wild.run).rglob("*"):
        if file.name == "recipe.json":
            file.unlink()  # as who deletes the folder to try it again
    sweep(recipe, settings, seeds=1, run=tmp_path, **FAST)
    assert len(trained) == 3


@pytest.mark.parametrize(
    ("settings", "options", "error", "said"),
    [
        ({"lr": [0.1, "fast"]}, {}, cw.errors.RecipeError, "--set lr=fast: expected a number"),
        ({"lrr": [0.1]}, {}, cw.errors.RecipeError, "Did you mean 'lr'"),
        ({"batch": [24, 25]}, {}, cw.errors.DeviceError, "25"),
        ({}, {"eval_every": "soon"}, cw.errors.RecipeError, "soon"),
        ({}, {"on": cw.On(devices=99)}, cw.errors.DeviceError, "99 devices"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(tmp_path, settings, options, error, said):
    with pytest.raises((error, cw.errors.RecipeError), match=said):
        sweep(plain(), settings, seeds=2, run=tmp_path / "new", **{**FAST, **options})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"set": ["lr=1"]}, "recipe-is-finished"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_made(tmp_path, options, code):
    with refused(cw.errors.RecipeError, code):
        sweep(plain(), seeds=2, run=tmp_path / "new", **FAST, **options)
    assert not (tmp_path / "new").exists()


def test_an_option_that_fit_has_not_is_a_type_error(tmp_path):
    with pytest.raises(TypeError, match="no option 'stop_after'"):
        sweep(plain(), seeds=2, run=tmp_path, stop_after="1st")


def doubled(params, state, batch, key, train):
    sums, state = tasks.plain_loss(params, state, batch, key, train)
    return sums | {"loss": cw.Sum(sums["loss"].total * 2, sums["loss"].count)}, state


def test_finished_rows_do_not_answer_for_edited_code(tmp_path, trained, monkeypatch):
    sweep(plain(), {}, seeds=1, run=tmp_path, **FAST)
    monkeypatch.setattr(doubled, "__qualname__", "plain_loss")  # as in a file that was edited
    made = plain(task=tasks.task(loss=doubled, augment=None))
    with refused(RunError, "finished-run-of-other-programs"):
        sweep(made, {}, seeds=2, run=tmp_path, **FAST)
    assert len(trained) == 1
    sweep(made, {}, seeds=1, run=tmp_path, changed_code=True, **FAST)
    sweep(plain(), {}, seeds=1, run=tmp_path, **FAST)
    assert len(trained) == 1


def test_a_run_that_diverged_does_not_answer_for_edited_code(tmp_path, trained, monkeypatch):
    wild = {"optimizer": cw.sgd(lr=1e38), "ema": None}
    (point,) = sweep(plain(**wild), {}, seeds=1, run=tmp_path, **FAST).points
    assert point.runs[0].diverged
    monkeypatch.setattr(doubled, "__qualname__", "plain_loss")
    made = plain(**wild, task=tasks.task(loss=doubled, augment=None))
    with refused(RunError, "finished-run-of-other-programs"):
        sweep(made, {}, seeds=1, run=tmp_path, **FAST)
    shutil.rmtree(tmp_path / "seed-0")
    sweep(made, {}, seeds=1, run=tmp_path, **FAST)
    assert len(trained) == 2


def changed(file, change):
    stored = json.loads(file.read_text())
    change(stored)
    file.write_text(json.dumps(stored))


def without(folder, *kept):
    for file in folder.iterdir():
        if file.is_file() and file.name not in kept:
            file.unlink()


def of_another(folder, name):
    """Puts the file of another finished run in the place of a run's."""
    shutil.copy(folder.with_name("seed-1") / name, folder / name)


PLANTED = {
    "a result alone": lambda folder: without(folder, "result.json"),
    "a recipe and a result": lambda folder: without(folder, "result.json", "recipe.json"),
    "no ledger": lambda folder: (folder / "ledger.jsonl").unlink(),
    "no rows": lambda folder: (folder / "metrics.jsonl").unlink(),
    "another metric": lambda folder: changed(
        folder / "result.json", lambda result: result["metrics"].update({"train/loss": 1e-3})
    ),
    "no digest": lambda folder: changed(folder / "result.json", lambda result: result.pop("ledger")),
    "another digest": lambda folder: changed(
        folder / "result.json", lambda result: result.update(ledger="0" * 64)
    ),
    "another run's result": lambda folder: of_another(folder, "result.json"),
    "another run's ledger": lambda folder: of_another(folder, "ledger.jsonl"),
    "a list for metrics": lambda folder: changed(folder / "result.json", lambda r: r.update(metrics=[1])),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_a_result_counts_with_its_recipe_and_its_ledger_alone(tmp_path, planted):
    study = sweep(plain(duration="2st"), seeds=2, run=tmp_path, **FAST)
    job = study_runs.StudyRun({}, 0, tmp_path / "seed-0")
    assert job.finished() == study.points[0].runs[0]
    planted(job.folder)
    assert job.finished() is None


@pytest.mark.slow
def test_what_was_planted_is_trained(tmp_path, trained):
    true = sweep(plain(), seeds=1, run=tmp_path / "true", **FAST).points[0].runs[0]
    folder = tmp_path / "study" / "seed-0"
    folder.mkdir(parents=True)
    shutil.copy(tmp_path / "true" / "seed-0" / "result.json", folder)
    changed(folder / "result.json", lambda result: result["metrics"].update({"train/loss": 1e-9}))
    found = sweep(plain(), seeds=1, run=tmp_path / "study", **FAST).points[0].runs[0]
    assert len(trained) == 2 and found.metrics == true.metrics and found.fingerprint == true.fingerprint


def test_folders_of_something_else_are_refused(tmp_path):
    sweep(plain(), seeds=1, run=tmp_path / "s", **FAST)
    with refused(cw.errors.RunError, "study-run-of-another-recipe", folder=tmp_path / "s/seed-0"):
        sweep(plain(batch=12), seeds=2, run=tmp_path / "s", **FAST)
    with refused(cw.errors.RunError, "study-of-another-recipe", differences=[("recipe", "recipe", "b")]):
        sweep(plain(name="b"), seeds=2, run=tmp_path / "s", **FAST)
    with refused(cw.errors.RunError, "single-run-here", folder=tmp_path / "s/seed-0"):
        sweep(plain(), seeds=2, run=tmp_path / "s/seed-0", **FAST)
    with hold(tmp_path / "s"), pytest.raises(cw.errors.RunError, match=f"in use by process {os.getpid()}"):
        sweep(plain(), seeds=2, run=tmp_path / "s", **FAST)
    (tmp_path / "file").write_text("")
    with refused(cw.errors.RunError, "study-unwritable"):
        sweep(plain(), seeds=2, run=tmp_path / "file/s", **FAST)


def test_runs_that_another_rule_ends_are_refused(tmp_path):
    recipe = plain(task=tasks.task(loss=tasks.plain_loss, augment=None, eval=tasks.data(20, 1)))
    best = {"keep_best": "eval/loss"}
    sweep(recipe, seeds=1, run=tmp_path, **FAST)
    sweep(recipe, seeds=1, run=tmp_path, **best, **FAST)
    rule = {"differences": [("keep_best", None, "eval/loss"), ("patience", None, "2st")]}
    with refused(cw.errors.RunError, "study-run-of-another-recipe", folder=tmp_path / "seed-0", **rule):
        sweep(recipe, seeds=2, run=tmp_path, patience="2st", **best, **FAST)
    shutil.rmtree(tmp_path / "seed-0")
    for seeds in (1, 2):
        sweep(recipe, seeds=seeds, run=tmp_path, patience="2st", **best, **FAST)
    with refused(cw.errors.RunError, "study-run-of-another-recipe"):
        sweep(recipe, seeds=3, run=tmp_path, **best, **FAST)


def test_a_seed_that_the_recipe_drops_is_noticed(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import tasks\n\ndef recipe(seed: int = 0):\n    return tasks.recipe(seed=0)\n")
    with refused(cw.errors.RecipeError, "seed-dropped", seed=0):
        sweep(f"{file}:recipe", seeds=[3], run=tmp_path / "s", **FAST)


def test_the_compiled_programs_are_kept_while_the_study_is_worked_on_and_no_longer():
    before = jax.config.jax_compilation_cache_dir
    with compiled_once():
        assert jax.config.jax_compilation_cache_dir == before  # a cache that is there stays
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with compiled_once():
            folder = jax.config.jax_compilation_cache_dir
            assert os.path.isdir(folder)
        assert jax.config.jax_compilation_cache_dir is None
        assert not os.path.exists(folder)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
