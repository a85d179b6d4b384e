import json

from chipwise.words.facts import fact


def test_one_json_object_or_a_table_and_the_lines_to_type(chipwise, mine):
    said = chipwise("bench", f"{mine}:recipe", "--largest-batch", "--devices", 1, "--at-most", 48, "--json")
    told = json.loads(said.out)
    assert said.code == 0 and said.err == "" and told["schema"] == "chipwise.find_batch/3"
    assert told["batch"] == 48 and not told["confirmed"]
    arguments = ("--devices", 1, "--at-most", 48, "--set", "rate=0.3")
    said = chipwise("bench", f"{mine}:recipe", "--largest-batch", *arguments)
    assert str(fact("compiling-batch", batch=48)) in said.err
    assert all(
        str(one) in said.out for one in (fact("bound-asked", limit=48), fact("batch-not-tried", batch=48))
    )
    commands = [f"chipwise transfer {mine}:recipe --set rate=0.3 --batch 48"]
    commands.append(f"chipwise bench {mine}:recipe --set rate=0.3 --set batch=48")
    assert str(fact("largest-is-not-best", commands=commands)) in said.out


def test_mistakes_are_one_line(chipwise, mine):
    for code, arguments in ((2, ("--at-most", "2")), (2, ("--set", "btach=3"))):
        said = chipwise("bench", f"{mine}:recipe", "--largest-batch", *arguments)
        assert said.code == code and said.err.count("\n") == 1 and said.out == "", arguments
