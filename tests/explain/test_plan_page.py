"""The page: what it says, that nothing in a document runs or is fetched, what a browser makes of it."""

import dataclasses
import html
import itertools
import json
import math
import re

import numpy as np
import pytest
from PIL import Image

from chipwise.explain import plan_page as page
from chipwise.hlo.kernel import Kernel
from chipwise.words.facts import fact
from pages import HOSTILE, Reader, browse, framed, needs_browser
from planner import documents


def read(document) -> Reader:
    reader = Reader(page.render(document))
    return reader


def hostile(value, key=""):
    """Every text of a document replaced, but those that the page compares."""
    if isinstance(value, dict):
        return {k: hostile(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(v, key) for v in value]
    return HOSTILE if isinstance(value, str) else value


def texts(facts):
    return [told["text"] for told in facts]


# ---- what it says


def test_the_answer_comes_first():
    document = documents.document()
    text = read(document).text
    at = [
        text.index(s)
        for s in ("gpt2-124m", *texts(document["verdict"]["fastest"]), "Cheapest", "Each target")
    ]
    assert at == sorted(at)
    for plan in document["plans"]:
        assert plan["target"] in text
        if plan["problem"]:
            assert plan["problem"]["text"] in text
        for advice in [*plan["advice"], *plan["notes"]]:
            assert advice["text"] in text
        for cost in plan["costs"]:
            assert cost["source"] in text and cost["date"] in text and cost["instance"] in text
    for setting, value in document["recipe"]["rows"]:
        assert setting.strip() in text and value in text
    for told in texts(document["verdict"]["cheapest"]):
        assert told in text


def test_rows_are_ranked_by_time_and_what_cannot_run_is_last():
    rows = [
        a["data-name"] for tag, a in read(documents.document()).elements if tag == "tr" and "data-name" in a
    ]
    assert rows == ["h100:8", "v6e-8", "v5e-8", "v100:8", "v3-8", "t4", "v2-8"]


def test_a_price_without_its_host_says_so():
    assert read(documents.document()).text.count("without its host") >= 2


def test_that_all_prices_are_old_is_said_once_and_what_decides_stands_above_the_table():
    told = fact("bf16-emulated", chip="T4")
    old = [
        dataclasses.replace(
            p, costs=tuple(dataclasses.replace(c, old=True) for c in p.costs), decisive=(told,)
        )
        for p in documents.plans()
    ]
    document = documents.wrap(old)
    text = read(document).text
    cards = text[: text.index("Each target")]
    (head, *_) = document["verdict"]["cheapest"]
    aged = fact("plan-price-old", days=90)
    assert head["code"] == "plan-cheapest" and head["text"] in cards and cards.count(str(aged)) == 1
    assert cards.count(str(told)) == len(old)


def test_the_chip_s_own_view_has_a_row_a_kernel_with_its_line():
    kernels = (
        Kernel(
            "dot.1", "matmul", 24, 0.02, 1e6, 1e11, "compute", "replica", "bf16", (), "a/dot", "net.py:38"
        ),
        Kernel("copy.2", "copy", 1, 0.005, 1e9, 0.0, "memory", "replica", "f32", (), "a/transpose", ""),
    )
    plan = dataclasses.replace(documents.plans()[0], kernels=kernels)
    text = read(documents.wrap([plan])).text
    for said in ("1. dot.1", "net.py:38", "2. copy.2", "transpose", str(fact("kernel-copy"))):
        assert said in text
    assert "What the chip does" not in read(documents.document()).text


# ---- safety


def test_nothing_is_fetched():
    for tag, attributes in read(documents.document()).elements:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form"), tag
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#") or attributes["href"] == "data:,"
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes)
    style = re.search(r"<style>(.*?)</style>", page.render(documents.document()), re.S)
    assert style is not None and not re.search(r"url\(|@import", style[1])


def test_text_of_a_document_is_never_markup():
    made = page.render(hostile(documents.document()))
    assert "<img" not in made and "<script>alert" not in made
    reader = Reader(made)
    assert [tag for tag, _ in reader.elements].count("script") == 1
    assert HOSTILE in reader.text
    usual = {a for _, attributes in read(documents.document()).elements for a in attributes}
    assert {a for _, attributes in reader.elements for a in attributes} <= usual


# ---- documents of all kinds


def test_memory_and_prices_may_be_unknown():
    plans = [
        dataclasses.replace(plan, memory=None, costs=(), share_of_peak=None) for plan in documents.plans()
    ]
    made = page.render(documents.wrap(plans))
    assert "</html>" in made and not re.search(r">\s*(None|nan)\b", made)
    assert "Unknown for v5e-8, v6e-8" in made and "Nothing to draw" in made


@pytest.mark.parametrize("count", [1, 2, 7])
def test_any_number_of_plans(count):
    read(documents.wrap(documents.plans()[:count]))


def test_all_plans_with_problems():
    text = read(documents.wrap(documents.plans()[-2:])).text
    assert str(fact("plan-none-runs", targets=["t4", "v2-8"])) in text and "Nothing to draw" in text


def test_no_prices():
    plans = [dataclasses.replace(plan, costs=()) for plan in documents.plans()]
    assert str(fact("plan-no-price")) in read(documents.wrap(plans)).text


def test_the_cloud_stands_beside_each_price():
    """A spot price of one cloud may be above another's on demand."""
    document = documents.document()
    document["plans"][0]["cheapest_spot"]["cloud"] = "another"
    cells = re.findall(r'data-label="\$ spot".*?</td>', page.render(document), re.S)
    assert ">another<" in cells[2] and ">gcp<" in cells[0]


def test_a_run_too_short_to_rank_by_its_wall_time():
    plans = [dataclasses.replace(plan, ranked_by="step") for plan in documents.plans()]
    document = documents.wrap(plans)
    assert document["verdict"]["ranked_by"] == "step"
    reader = read(document)
    (head,) = [a["data-key"] for tag, a in reader.elements if tag == "th" and "aria-sort" in a]
    assert head == "step" and texts(document["verdict"]["fastest"])[1] in reader.text


def test_a_document_from_a_file_is_the_same():
    document = documents.document()
    assert page.render(json.loads(json.dumps(document))) == page.render(document)


# ---- the figures


def test_labels_overlap_neither_each_other_nor_points():
    document = documents.document()
    for _, s in page.scatters(document["plans"], document["verdict"]["pareto"]):
        boxes = [(lab.x, lab.y - 12, lab.x + 7.8 * len(lab.text), lab.y + 3) for lab in s.labels]
        assert len(boxes) == 5 and s.front
        for box in boxes:
            assert box[0] >= 0 and box[2] <= s.width
            for p in s.spots:
                assert not (box[0] < p.x < box[2] and box[1] < p.y < box[3])
        for a, b in itertools.combinations(boxes, 2):
            assert not (a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3])


def test_a_dot_a_price_and_the_best_stand_out():
    document = documents.document()
    ((_, wide), _) = page.scatters(document["plans"], document["verdict"]["pareto"])
    assert [(p.of.name, p.of.style) for p in wide.spots] == [
        ("v5e-8", ""), ("v5e-8", " hollow"), ("v6e-8", "best"), ("v6e-8", "best hollow"), ("v3-8", ""),
        ("v3-8", " hollow"), ("v100:8", ""), ("v100:8", " hollow"), ("h100:8", "best"),
        ("h100:8", "best hollow"),
    ]  # fmt: skip
    assert "gcp v5litepod-8 us-central1" in wide.spots[0].of.title


def _dots():
    made = []
    for k, name in enumerate(["a", "bb", "a name beyond twenty-two letters", "d"]):
        made += [page.Dot(name, (60.0 * 3**k, 50.0 * 3**k, 70.0 * 3**k), (9.0 / 2**k,) * 3, "best")]
        made += [page.Dot(name, (60.0 * 3**k, 50.0 * 3**k, 70.0 * 3**k), (4.0 / 2**k,) * 3, "hollow")]
    return made


@pytest.mark.parametrize("size", [(660, 430), (328, 360)])
def test_long_names_overlap_neither_each_other_nor_points(size):
    dots = _dots()
    s = page.scatter(dots, size)
    boxes = [(lab.x, lab.y - 12, lab.x + 7.8 * len(lab.text), lab.y + 3) for lab in s.labels]
    assert len(boxes) == len(s.links) == 4 and s.front.count("H") == 3
    for box in boxes:
        assert box[0] >= 0 and box[2] <= s.width
        for p in s.spots:
            assert s.left <= p.x1 <= p.x <= p.x2 <= s.right and s.top <= p.y <= s.bottom
            assert not (box[0] < p.x < box[2] and box[1] < p.y < box[3])
    for a, b in itertools.combinations(boxes, 2):
        assert not (a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3])


def test_a_scatter_is_logarithmic_at_any_scale():
    for seconds in (1e-3, 7.0, 90.0, 4e4, 3e7, 1e10):
        s = page.scatter([page.Dot("a", (seconds,) * 3, (seconds / 100,) * 3)], (328, 360))
        assert s.x_ticks and s.y_ticks and all(math.isfinite(t.at) for t in s.x_ticks + s.y_ticks)


def test_bars_add_up_and_stop_at_the_edge():
    plans = documents.document()["plans"]
    for bar in page.bars(plans):
        assert sum(p.width for p in bar.parts) == pytest.approx(
            min(100, bar.limit * bar.plan["memory"]["needed"] / bar.plan["memory"]["available"])
        )
    huge = {**plans[0], "memory": {**plans[0]["memory"], "activations": 10**12, "needed": 10**12}}
    bar = page.bars([huge, *plans[1:]])[0]
    assert sum(p.width for p in bar.parts) == pytest.approx(100)
    assert bar.limit == pytest.approx(100 / page.LONGEST)


# ---- in a browser


MEASURE = """
<script>
addEventListener("load", function () {
  var found = {};
  document.querySelectorAll("iframe").forEach(function (frame) {
    var inner = frame.contentDocument, root = inner.documentElement;
    var names = function () {
      return Array.from(inner.querySelectorAll("tbody tr")).map(function (row) { return row.dataset.name; });
    };
    var one = {width: frame.clientWidth, needs: root.scrollWidth, first: names()};
    inner.querySelector('th[data-key="usd"] button').click();
    one.usd = names();
    inner.querySelector('th[data-key="usd"] button').click();
    one.down = names();
    inner.querySelector('td a[href="#about-2"]').click();
    one.open = inner.getElementById("about-2").open;
    inner.querySelectorAll("details").forEach(function (d) { d.open = true; });
    one.opened = root.scrollWidth;
    found[frame.clientWidth] = one;
  });
  document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
});
</script>
"""


@needs_browser
def test_fits_its_width_and_sorts(tmp_path):
    text = page.render(documents.document())
    long = page.render(hostile(documents.document()))
    frames = "".join(framed(text, width, 800) for width in (1280, 768, 360, 320)) + framed(long, 359, 800)
    said = browse(tmp_path, f"<!DOCTYPE html><body>{frames}{MEASURE}", "--window-size=1300,900", "--dump-dom")
    found = json.loads(html.unescape(re.search("FOUND(.*)END", said)[1]))
    assert sorted(map(int, found)) == [320, 359, 360, 768, 1280]
    for one in found.values():
        assert one["needs"] <= one["width"] and one["opened"] <= one["width"]
    for width in ("1280", "360"):
        one = found[width]
        assert one["first"][0] == "h100:8"
        assert one["usd"][:5] == ["v6e-8", "v5e-8", "h100:8", "v3-8", "v100:8"]
        assert one["down"][:5] == one["usd"][:5][::-1]
        assert set(one["usd"][5:]) == set(one["down"][5:]) == {"t4", "v2-8"}
        assert one["open"]


@needs_browser
@pytest.mark.parametrize("width", [1280, 360])
def test_pictures(tmp_path, width):
    picture = tmp_path / "page.png"
    text = f'<!DOCTYPE html><body style="margin:0">{framed(page.render(documents.document()), width, 1600)}'
    browse(tmp_path, text, f"--window-size={width},1600", f"--screenshot={picture}")
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (1600, width, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    paper = pixels[0, 0]
    assert (pixels[:, -4:] == paper).all() and (pixels[:, :4] == paper).all()  # nothing reaches the edges
    inked = np.flatnonzero((pixels != paper).any(axis=2).any(axis=1))
    assert np.diff(inked).max() < 100 and inked[-1] > 1200  # and there is no blank stretch
