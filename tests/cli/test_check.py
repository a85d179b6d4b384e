import json

from chipwise.base.facts import fact


def test_warnings_are_lines_and_the_code_is_0(chipwise, mine):
    fine = chipwise("check", f"{mine}:recipe", "--set", "replicas=1")
    assert fine.code == 0 and fine.out == f"{fact('no-findings', recipe='mine')}\n"
    doubted = chipwise("check", f"{mine}:recipe", "--set", "replicas=1", "--set", "lr=30", "--on", "v3-8")
    assert doubted.code == 0
    (line,) = doubted.out.splitlines()
    assert line.startswith("warning: ") and "peak lr=30" in line


def test_json_is_one_object(chipwise, mine):
    said = chipwise(
        "check", f"{mine}:recipe", "--set", "replicas=1", "--set", "batch=20", "--json", "--on", "v2-8"
    )
    told = json.loads(said.out)
    assert told["schema"] == "chipwise.check/1" and (told["recipe"], told["on"]) == ("mine", "v2-8")
    finding = next(one for one in told["findings"] if one["code"] == "padding")
    assert finding["given"] == "20 examples a replica" and finding["type"] == "--set batch=24"


def test_errors_have_their_codes(chipwise, mine):
    assert chipwise("check", f"{mine}:recipe", "--on", "v3-7").code == 4
    assert chipwise("check", f"{mine}:recipe", "--set", "batch=25").code == 2
    assert chipwise("check", "digitz").code == 2
