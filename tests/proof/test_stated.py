"""Whatever is changed in a run folder, an audit tells it, or says that it did not audit that."""

import functools
import shutil

import pytest

import chipwise as cw
from changed_runs import ALL, METADATA, ONE, RUNS, recipe, told, trained
from chipwise.proof.audit import audit
from chipwise.run.on import On

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of a run of some kind and seed, trained when it is asked for."""
    root = tmp_path_factory.mktemp("stated")

    @functools.cache
    def made(kind, seed=3):
        return trained(root / f"{kind}-{seed}", kind, seed=seed)

    return made


@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("name", ALL)
def test_a_change_is_told_or_listed(runs, tmp_path, name):
    kind, change, expected = ALL[name]
    run = shutil.copytree(runs(kind), tmp_path / "run")
    given = change(run, lambda: runs(kind, 4))
    found, unaudited = told(run, given or recipe(**RUNS[kind].changes))
    assert not any("\n" in line for line in unaudited)
    if isinstance(expected, tuple):
        assert expected in found
    else:
        assert not found
        assert expected is None or any(expected in line for line in unaudited)


@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_of_each_kind_passes(runs, kind):
    found, unaudited = told(runs(kind), recipe(**RUNS[kind].changes))
    assert not found and METADATA in unaudited
    assert not any(name in line for line in unaudited for name in ("best", "fingerprint", "checkpoints/"))


@pytest.mark.drawn
@pytest.mark.parametrize("stop", [None, "9st"])
@pytest.mark.parametrize("feed", ["device", "host"])
@pytest.mark.parametrize("log", ["1st", "3st", "7st", "100st"])
@pytest.mark.parametrize("evaluated", ["6st", "20st", None])
def test_honest_runs_pass(tmp_path, stop, feed, log, evaluated):
    how = {"on": On(devices=2, feed=feed), "log_every": log, "eval_every": evaluated, "progress": "none"}
    how |= {"checkpoint_every": "5st"}
    if stop is not None:
        cw.fit(recipe(), tmp_path / "run", stop_after=stop, **how)
        assert audit(tmp_path / "run", recipe(), on=ONE)[1]["passed"]
    cw.fit(recipe(), tmp_path / "run", **how)
    for steps in ("0:", "8:13", None):
        verdict, statement = audit(tmp_path / "run", recipe(), steps=steps, on=On(devices=3))
        assert statement["passed"] and statement["same_bits"], (verdict, statement["found"])
        if steps == "0:":
            assert not any("result" in line and "fingerprint" in line for line in statement["unaudited"])


def test_what_users_log_is_listed(tmp_path):
    for event in cw.training(recipe(), tmp_path / "run", on=ONE, progress="none", log_every="5st"):
        if event.kind == "log":
            event.log({"mine/bleu": 0.25})
            event.text("mine/text", "a text")
    verdict, statement = audit(tmp_path / "run", recipe(), steps="0:", on=ONE)
    assert statement["passed"], verdict
    assert (
        any("mine/bleu" in line for line in statement["unaudited"])
        and "media.jsonl" in statement["unaudited"]
    )
