"""Writes the benchmark's record as a page with tables and a plot."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from pathlib import Path

from chipwise.explain.charts import Axis
from chipwise.machine.record import Record, Series

from .contenders import CASES, WORKERS, Case
from .data import LARGE, SMALL

_BYTES = {"small": SMALL * SMALL * 3 + 4, "large": LARGE * LARGE * 3 + 4}
_NOTES = {
    "FFCV": "does not install from PyPI: its build asks for the development files of OpenCV and libturbojpeg",
}
CHIPWISE = f"chipwise, {WORKERS} threads"
COPY = f"plain copy, {WORKERS} threads"


def tables(record: Record) -> list[str]:
    """Lines of Markdown: for each case a row for each contender, fastest first."""
    lines: list[str] = []
    for case in CASES:
        if f"{case.name}/{COPY}" not in record.figures:
            continue
        copy = record.figures[f"{case.name}/{COPY}"].median
        lines += [
            "",
            f"### {case.title}",
            "",
            "| | images/s | quartiles | GB/s | of a plain copy | MB | |",
            "|---|---:|---:|---:|---:|---:|---|",
        ]
        ran = [c for c in case.contenders if f"{case.name}/{c.name}" in record.figures]
        for contender in sorted(ran, key=lambda c: -record.figures[f"{case.name}/{c.name}"].median):
            name = f"{case.name}/{contender.name}"
            series = record.figures[name]
            low, high = series.quartiles
            shown = f"**{contender.name}**" if contender.name == CHIPWISE else contender.name
            lines.append(
                f"| {shown} | {_digits(series.median)} | {_digits(low)} to {_digits(high)} "
                f"| {_digits(series.median * _BYTES[case.images] / 1e9)} | {_percent(series.median / copy)} "
                f"| {record.measured['memory'][name] / 1e6:,.0f} | {contender.note} |"
            )
        for contender in case.contenders:
            why = record.measured["absent"].get(f"{case.name}/{contender.name}")
            if why:
                lines.append(f"| {contender.name} | - | - | - | - | - | {why} |")
        lines += [f"| {name} | - | - | - | - | - | {why} |" for name, why in _NOTES.items()]
    return lines


def targets(record: Record) -> list[str]:
    """Lines of Markdown: aims and results of the cases that were run."""

    def of(case: str, *starts: str) -> tuple[str, float] | None:
        """The fastest contender whose name begins with one of `starts`."""
        found = {
            name.partition("/")[2]: series.median
            for name, series in record.figures.items()
            if name.startswith(f"{case}/") and name.partition("/")[2].startswith(starts)
        }
        return max(found.items(), key=lambda item: item[1]) if found else None

    others = ("Grain", "array-record", "bagz", "PyTorch", "WebDataset")
    pixels, ours = "packed pixels at", of("raw32", CHIPWISE)
    wanted = [
        (f"{pixels} 224, of a plain copy", 0.7, of("raw224", CHIPWISE), of("raw224", COPY)),
        (f"{pixels} 32 against Grain on array-record", 20, ours, of("raw32", "Grain, array")),
        ("... against array-record's own batched reader", 20, ours, of("raw32", "array-record")),
        (
            f"{pixels} 32 against PyTorch on loose files",
            50,
            ours,
            of("loose", "PyTorch, loose files, Pillow"),
        ),
        ("... with the fastest decoder", 50, ours, of("loose", "PyTorch, loose files")),
        ("packed JPEGs at 224 against the fastest other", 1, of("jpeg", CHIPWISE), of("jpeg", *others)),
    ]
    lines = ["| | at least | found | |", "|---|---:|---:|---|"]
    for what, least, found, against in wanted:
        if found is None or against is None:
            continue
        ratio = found[1] / against[1]
        number = f"{ratio:.0%}" if least < 1 else f"{_digits(ratio)} ×"
        aim = f"{least:.0%}" if least < 1 else f"{least:g} ×"
        lines.append(
            f"| {what} ({against[0]}) | {aim} | {number} | {'met' if ratio >= least else '**missed**'} |"
        )
    return lines


def write(record: Record, page: Path, plot: Path) -> None:
    """Writes both files."""
    measured, machine = record.measured, record.machine
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items() if version)
    lines = [
        "# From disk to host memory",
        "",
        f"`python -m benchmarks.feed`, {record.created[:10]}; {machine.title}, {machine.os}, Python "
        f"{machine.python}; {versions}. One run of {measured['rounds']} rounds; in a round each contender "
        f"reads for {measured['seconds']:g} s, alone and in its own process, after a warm-up. Images/s "
        "are medians; all files are in the page cache. Batches are uint8 arrays in host memory, shuffled "
        "over all images unless the table says otherwise. Small images are CIFAR-10's JPEGs; large ones are "
        f"{measured['photographs']:,} random crops of scikit-learn's two photographs, JPEG quality 90.",
        "",
        "A plain copy is `np.copyto` of whole batches into memory already in use, from memory as large as "
        "the data. MB: anonymous and shared memory of all processes of a contender, including libraries, "
        "without mapped files, which the system may drop. chipwise's batches may take "
        f"{measured['limit_bytes'] / 2**20:.0f} MiB, and the run fails if reading takes more than that and "
        f"{measured['slack_bytes'] / 2**20:.0f} MiB (found: {_grown(record)}).",
        "",
        f"![images a second](../../docs/{plot.name})",
        "",
        "## Aims",
        "",
        *targets(record),
        "",
        "## Figures",
        *tables(record),
        "",
    ]
    page.write_text("\n".join(lines), encoding="utf-8")
    plot.write_text(drawn(record), encoding="utf-8")


def _grown(record: Record) -> str:
    most = max(grown for name, grown in record.measured["grown"].items() if "/chipwise" in name)
    return f"at most {most / 2**20:.0f} MiB"


WIDTH, ROW, NAMES = 520, 18, 190  # pixels: of a case, of a contender, of the contenders' names


def drawn(record: Record) -> str:
    """The picture, a case each: bars of the medians on a logarithmic axis, with the quartiles."""
    cells, row_of_two = [], 34 + ROW * max(len(_rows(record, case)) for case in CASES)
    for k, case in enumerate(CASES):
        x, y = WIDTH * (k % 2), row_of_two * (k // 2)
        cells.append(
            f'<g transform="translate({x} {y})">{"".join(_bars(case.title, _rows(record, case)))}</g>'
        )
    size = f'width="{2 * WIDTH}" height="{2 * row_of_two}" viewBox="0 0 {2 * WIDTH} {2 * row_of_two}"'
    style = 'font-family="system-ui,sans-serif" font-size="11" fill="#808a94"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{chr(10).join(cells)}\n</svg>\n'


def _bars(title: str, rows: list[tuple[str, Series]]) -> Iterator[str]:
    lowest = 10 ** math.floor(math.log10(rows[0][1].median))
    axis = Axis(lowest, 1.1 * max(series.quartiles[1] for _, series in rows), NAMES, WIDTH - 20, log=True)
    bottom = 18 + ROW * len(rows)
    yield f'<text x="10" y="12" font-weight="600">{html.escape(title)}, images/s</text>'
    for tick in axis.ticks(4):
        yield f'<path stroke="#808a94" stroke-opacity=".3" d="M{tick.at:.1f} 16V{bottom}"/>'
        yield f'<text x="{tick.at:.1f}" y="{bottom + 12}" text-anchor="middle">{tick.label}</text>'
    for k, (name, series) in enumerate(reversed(rows)):
        y, (low, high) = 18 + ROW * k, map(axis, series.quartiles)
        yield f'<text x="{NAMES - 6}" y="{y + 12}" text-anchor="end">{html.escape(name)}</text>'
        wide = axis(series.median) - NAMES
        yield f'<rect x="{NAMES}" y="{y + 2}" width="{wide:.1f}" height="{ROW - 5}" fill="{_colour(name)}"/>'
        yield f'<path stroke="#404850" d="M{low:.1f} {y + 8.5}H{high:.1f}"/>'


def _colour(name: str) -> str:
    if name.startswith("plain"):
        return "#c8c8c8"
    if name.startswith("chipwise"):
        return "#1b6ca8" if name == CHIPWISE else "#8fbcdb"
    return "#e0a458"


def _rows(record: Record, case: Case) -> list[tuple[str, Series]]:
    """Contenders with figures, slowest first, since bars are drawn from below."""
    found = [
        (c.name, record.figures[f"{case.name}/{c.name}"])
        for c in case.contenders
        if f"{case.name}/{c.name}" in record.figures
    ]
    return sorted(found, key=lambda row: row[1].median)


def _digits(value: float) -> str:
    """Three significant digits, or integers with commas."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g} %".replace(" ", "")
