"""Makes the pictures of the documentation again.

    make pictures                                 # all: trains, plans, draws; needs Chromium
    python tools/docs_pictures.py plan report     # these
    python tools/docs_pictures.py --draw          # again from what was recorded: after a change of a page

What a picture shows is recorded: in a file of `docs/pictures/`, or in a benchmark's `results.json`, or
it is the source of the package. `tests/tools/test_docs_pictures.py` draws every committed picture again
from that. A photograph of a page (`.png`) is compared by the page's SHA-256, which stands in its
record.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "pictures"

WIDE = (560, 300)
"""Pixels of a plot."""

Record = dict[str, Any]


class Picture(NamedTuple):
    """A picture of the documentation."""

    file: str
    """Its path in the repository: `.svg` is drawn, `.png` is a photograph of a drawn page."""
    draw: Callable[[Record], str]
    """The SVG or the page, of a record; the same for the same record."""
    measure: Callable[[Path], Record] | None = None
    """Measures what it shows, in a scratch folder. `None` if another program does."""
    size: tuple[int, int] = (0, 0)
    """Of a photograph, in pixels."""

    @property
    def path(self) -> Path:
        return ROOT / self.file

    @property
    def record_path(self) -> Path:
        return RECORDS / f"{self.path.stem}.json"

    def record(self) -> Record:
        """What was recorded: `shown`, and for a photograph the digest of its `page`.

        Empty if other files decide.
        """
        return json.loads(self.record_path.read_text("utf-8")) if self.measure else {}

    def drawn(self) -> str:
        """The SVG or the page that the record gives today."""
        return self.draw(self.record().get("shown", {}))


def digest(page: str) -> str:
    return hashlib.sha256(page.encode()).hexdigest()


# ---- what they show


def chipwise(folder: Path, command: str) -> Record:
    """The answer of a command to `--json`."""
    program = [sys.executable, "-m", "chipwise", *command.split(), "--json"]
    return json.loads(subprocess.run(program, cwd=folder, check=True, stdout=subprocess.PIPE).stdout)


def trained(folder: Path, devices: int) -> str:
    """The run of `digits` on simulated devices, trained if another picture has not."""
    run = f"runs/devices{devices}"
    if not (folder / run).exists():
        chipwise(folder, f"train digits --simulate {devices} --run {run}")
    return run


def two_curves(folder: Path) -> Record:
    """The training loss of `digits` by epoch, on 1 and on 8 devices."""
    curves = {}
    for devices in (1, 8):
        metrics = folder / trained(folder, devices) / "metrics.jsonl"
        rows = map(json.loads, metrics.read_text().splitlines())
        curves[str(devices)] = [[row["epoch"], row["train/loss"]] for row in rows if "train/loss" in row]
    return curves


def draw_curves(curves: Record) -> str:
    from chipwise.explain.charts import Trace, panel
    from chipwise.explain.page import picture

    traces = [
        Trace("1 device", "s0 faint broad", curves["1"]),
        Trace("8 devices", "s1", curves["8"]),
    ]
    drawn = panel("digits: the loss on 1 and on 8 devices", traces, x="epoch", y="training loss", y_log=True)
    assert drawn is not None
    return picture(drawn, WIDE)


def rate_search(folder: Path) -> Record:
    answer = chipwise(folder, "find-lr digits")
    return {name: answer[name] for name in ("rates", "losses")}


def draw_search(curve: Record) -> str:
    import numpy as np

    import chipwise as cw
    from chipwise.explain import advice
    from chipwise.explain.page import picture
    from chipwise.study import range_test
    from chipwise.study.find_lr import LrSearch

    read = range_test.read(np.array(curve["rates"]), np.array(curve["losses"]))
    return picture(advice.curves(LrSearch(cw.load("digits"), read, stopped=None, devices={})), WIDE)


PLAN = "plan cifar10-davidnet --synthetic --set precision=bf16 --on v5e-1,a100,h100,t4"


def plan(folder: Path) -> Record:
    answer = json.dumps(chipwise(folder, PLAN))
    return json.loads(answer.replace(f"{ROOT}/src/", ""))  # the lines of kernels, as a page shows them


def draw_plan(document: Record) -> str:
    from chipwise.explain.page import render
    from chipwise.explain.plan_parts import page

    return render([*page(document)], document)


def report(folder: Path) -> Record:
    return chipwise(folder, f"report {trained(folder, 8)}")


def draw_report(document: Record) -> str:
    from chipwise.explain.page import render
    from chipwise.explain.report.report_parts import parts

    return render([*parts(document)], document)


def draw_layout(_: Record) -> str:
    return runpy.run_path(str(ROOT / "tools" / "draw_layout.py"))["draw"]()


def draw_feed(_: Record) -> str:
    sys.path.insert(0, str(ROOT))
    from benchmarks.feed import page
    from benchmarks.feed.__main__ import RESULTS

    from chipwise.machine.record import read

    return page.drawn(read(RESULTS))


def draw_accuracy(_: Record) -> str:
    sys.path.insert(0, str(ROOT))
    from benchmarks.plan_accuracy import page
    from benchmarks.plan_accuracy.__main__ import stored
    from benchmarks.plan_accuracy.rows import rows

    return page.scatter(page.predictions(rows(), stored()))


def draw_records(_: Record) -> str:
    sys.path.insert(0, str(ROOT))
    from benchmarks import records

    with contextlib.redirect_stdout(io.StringIO()):  # its tables
        _, runs = records.read()
        return records.picture(records.record_by_record(runs, records.deviations(runs)))


PICTURES = {
    "design": Picture("docs/design.svg", draw_layout),
    "curves": Picture("docs/curves.svg", draw_curves, two_curves),
    "find": Picture("docs/find.svg", draw_search, rate_search),
    "feed": Picture("docs/feed.svg", draw_feed),
    "accuracy": Picture("benchmarks/plan_accuracy/plan_accuracy.svg", draw_accuracy),
    "records": Picture("benchmarks/records.svg", draw_records),
    "plan": Picture("docs/plan.png", draw_plan, plan, size=(1280, 1010)),
    "report": Picture("docs/report.png", draw_report, report, size=(1100, 790)),
}


# ---- making them


def photograph(page: str, file: Path, size: tuple[int, int]) -> None:
    """Chromium's view of a page, from its top."""
    sys.path.insert(0, str(ROOT / "tests"))
    import pages

    if pages.BROWSER is None:
        raise SystemExit(f"{file.name} needs Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pages.browse(Path(folder), page, f"--window-size={size[0]},{size[1]}", f"--screenshot={file}")


def make(picture: Picture, folder: Path | None) -> None:
    """Writes the picture and its record; what it shows is measured again in `folder`, if there is one."""
    record = picture.record() if folder is None else {}
    if folder and picture.measure:
        record["shown"] = picture.measure(folder)
    drawn = picture.draw(record.get("shown", {}))
    if picture.path.suffix == ".png":
        record["page"] = digest(drawn)
        photograph(drawn, picture.path, picture.size)
    else:
        picture.path.write_text(drawn, "utf-8")
    if record:
        picture.record_path.write_text(lines(record), "utf-8")


def lines(record: Record) -> str:
    """JSON with a line for each field of what is shown, so that a change of it can be read."""
    shown = (f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in record["shown"].items())
    rest = "".join(f', "{name}": {json.dumps(value)}' for name, value in record.items() if name != "shown")
    return '{"shown": {\n' + ",\n".join(shown) + "\n}" + rest + "}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the pictures of the documentation again.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)} [all]")
    parser.add_argument("--draw", action="store_true", help="from the records as they are")
    options = parser.parse_args()
    if unknown := set(options.names) - set(PICTURES):
        parser.error(f"no picture {', '.join(unknown)}: there are {', '.join(PICTURES)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or PICTURES:
            make(PICTURES[name], None if options.draw else Path(folder))
            print(PICTURES[name].file, flush=True)


if __name__ == "__main__":
    main()
