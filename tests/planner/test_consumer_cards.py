"""What pages say of cards that people own stands in the answers that the benchmark keeps."""

import json
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = runpy.run_path(str(ROOT / "benchmarks" / "consumer_cards.py"), run_name="consumer_cards")
ANSWERS = json.loads(PROGRAM["ANSWERS"].read_text())
PAGE = PROGRAM["PAGE"].read_text()
PLAN = (ROOT / "docs" / "plan.md").read_text()


def test_the_page_is_what_its_program_writes():
    def without_version(text):
        return re.sub(r"with jax [\d.]+\.", "", text)

    assert without_version(PROGRAM["page"](ANSWERS)) == without_version(PAGE)


def test_the_plans_page_says_for_how_many_cards_each_net_was_compiled():
    fine = {net: done for net, (done, _) in PROGRAM["counts"](ANSWERS).items()}
    assert fine["digits"] == len(PROGRAM["CARDS"]) == int(re.search(r"all (\d+)\s\[cards", PLAN)[1])
    larger = {net: int(count) for net, count in re.findall(r"`([\w-]+)`\sfor\s(\d+)\b", PLAN)}
    assert larger | {"digits": fine["digits"]} == fine


def test_the_plans_page_has_the_order_of_every_table_with_its_cards():
    orders = re.findall(r"Rank correlation of (\d+) cards: ([\d.]+)\.\n", PAGE)
    assert re.findall(r"([01]\.\d\d)\sover\s(\d+)", PLAN) == [(order, cards) for cards, order in orders]
