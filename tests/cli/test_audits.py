"""`chipwise audit` at the command line: of a run, and of two."""

import dataclasses
import importlib
import json
import shutil

import pytest


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    import chipwise as cw

    folder = tmp_path_factory.mktemp("trust") / "run"
    settings = ["duration=8st"]
    source = {"recipe": "digits", "set": settings, "data": None}  # as the command line makes it
    recipe = dataclasses.replace(cw.load("digits", settings), source=source)
    cw.fit(recipe, folder, on=cw.On(devices=1), log_every="4st", checkpoint_every="4st", progress="none")
    return folder


def test_audit_says_and_writes_what_it_found(chipwise, run):
    said = chipwise("audit", run, "--devices", 1)
    assert said.code == 0 and "to the bit" in said.out
    statement = json.loads((run / "audit.json").read_text())
    assert statement["passed"] and statement["made"] == [[0, 4], [4, 8], [8, 8]]
    rows = (run / "ledger.jsonl").read_text().splitlines()
    row = json.loads(rows[1])
    rows[1] = json.dumps(row | {"parameters": "0" * 16})
    (run / "ledger.jsonl").write_text("\n".join(rows) + "\n")
    said = chipwise("audit", run, "--devices", 1, "--json")
    assert (said.code, said.error.code, said.error.facts["step"]) == (5, "audit-differs", 4)
    assert json.loads(said.out)["verdict"]["what"] == ["parameters"]


def test_an_audit_is_written_into_the_folder_that_it_read(chipwise, run, tmp_path, monkeypatch):
    """Somebody moves the run meanwhile, and another one takes its place."""
    audit = importlib.import_module("chipwise.proof.audit")
    path, moved, checked = tmp_path / "run", tmp_path / "moved", audit.audit
    shutil.copytree(run, path)
    (path / "audit.json").unlink(missing_ok=True)

    def check(*given, **options):
        found = checked(*given, **options)
        path.rename(moved)
        path.mkdir()
        return found

    monkeypatch.setattr(audit, "audit", check)
    chipwise("audit", path, "--devices", 1)
    assert not list(path.iterdir()) and (moved / "audit.json").is_file()


@pytest.mark.slow
def test_audit_of_two_says_where_two_part_and_why(chipwise):
    same = chipwise("audit", "digits", "digits", "--devices", 1)
    assert same.code == 0 and "the same to the bit" in same.out
    said = chipwise("audit", "digits", "--set", "seed=1", "--devices", 1, "--json")
    told = json.loads(said.out)
    assert told["verdict"]["code"] == "diff-start" and told["causes"][0]["code"] == "diff-seed"
    assert told["settings"] == [["seed", 0, 1]]


def test_a_run_has_its_own_settings(chipwise, run):
    refused = chipwise("audit", "digits", run, "--set", "seed=1", "--devices", 1)
    assert refused.refused(5, "diff-set-of-run", run=str(run))
    for option, given in (("--steps", "0:"), ("--steps", "0"), ("--every", "10%")):
        assert chipwise("audit", run, run, option, given).refused(2, "audit-of-two", **{option[2:]: given})


def test_a_part_of_the_replicas_is_a_percentage(chipwise):
    said = chipwise("train", "digits", "--devices", 1, "--verify", "1")
    assert (said.code, said.error.code, said.error.facts["verify"]) == (2, "verify-share", "1")
