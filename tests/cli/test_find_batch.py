import json


def test_a_table_what_it_changes_and_the_line_to_type(chipwise, mine):
    said = chipwise("find-batch", f"{mine}:recipe", "--devices", 1, "--at-most", 48, "--set", "rate=0.3")
    assert said.code == 0 and said.err == ""
    assert "at most 48 asked for" in said.out and "a real step was made with it" in said.out
    assert "The largest batch is not the best one" in said.out and "examples/s at batch 48" in said.out
    assert f"chipwise transfer {mine}:recipe --batch 48 --set rate=0.3" in said.out
    assert "lr " in said.out and "Goyal" in said.out


def test_absent_chips_as_json(chipwise, mine):
    said = chipwise("find-batch", f"{mine}:recipe", "--on", "t4,v100", "--at-most", 24, "--json")
    told = json.loads(said.out)
    assert said.code == 0 and told["schema"] == "chipwise.find_batch/1"
    assert [(s["target"], s["batch"], s["transfer"]) for s in told["searches"]] == [
        ("t4", 24, None),
        ("v100", 24, None),
    ]


def test_mistakes_are_one_line(chipwise, mine):
    for code, arguments in (
        (2, ("--at-most", "2")),
        (4, ("--on", "t5")),
        (4, ("--on", "t4", "--devices", "1")),
        (2, ("--set", "btach=3")),
    ):
        said = chipwise("find-batch", f"{mine}:recipe", *arguments)
        assert said.code == code and said.err.count("\n") == 1 and said.out == "", arguments
