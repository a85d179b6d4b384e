"""Draws the house: packages, what they import, their files and lines, read from the code.

    python tools/draw_layout.py          # writes docs/design.svg

An arrow points at what a package imports. Arrows that others imply are left out: explain imports recipe too,
by way of study and data. All import what lies below all. `docs/design.md` shows the picture, and
`tests/test_layout.py` holds it to the code.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "chipwise"
COLUMNS = [
    ["recipe", "models"],
    ["data", "interop", "hlo"],
    ["engine", "recipes"],
    ["planner", "study", "measure", "proof", "deploy"],
    ["explain", "launch", "referee"],
    ["track", "cli"],
]
"""From the left, which imports nothing of the others, to the right, which nothing imports."""
BELOW = ["words", "errors", "atomic", "chips", "machine"]

IDEAS = {
    "words": "sentences of facts",
    "errors": "one tree, one code each",
    "atomic": "files whole or not at all",
    "chips": "catalogue, targets, prices",
    "machine": "devices found, simulated",
    "recipe": "all that changes a result",
    "models": "one idea a file",
    "data": "sources, order, feeding",
    "interop": "other frameworks",
    "hlo": "reads compiled programs",
    "engine": "the one driver of the step",
    "recipes": "built-in recipes",
    "deploy": "predictions, exports",
    "proof": "computed again, compared",
    "planner": "the step on absent chips",
    "study": "sweeps, finders, moves",
    "referee": "verdicts on changes",
    "measure": "benchmarks as records",
    "launch": "jobs for rented chips",
    "explain": "compare, report, pages",
    "track": "rows to other services",
    "cli": "parse, call, print",
}
WIDTH, HEIGHT, ACROSS, DOWN, EDGE = 178, 62, 44, 22, 12


def size(name: str) -> tuple[int, int]:
    """Python files and their lines."""
    folder = PACKAGE / name
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]
    return len(files), sum(len(file.read_text().splitlines()) for file in files)


def imports() -> set[tuple[str, str]]:
    """Who imports whom, also inside functions, from right to left: `("engine", "data")`."""
    order = [name for column in COLUMNS for name in column]
    arrows = set()
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE)
        user = path.parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == len(path.parts) and user in order:
                for used in [node.module.split(".")[0]] if node.module else [a.name for a in node.names]:
                    if used in order[: order.index(user)]:
                        arrows.add((user, used))
    return arrows


def reduced(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Without the arrows that a way over others replaces."""

    def reach(name: str, but: tuple[str, str]) -> set[str]:
        steps = {used for user, used in arrows if user == name and (user, used) != but}
        return steps.union(*(reach(step, but) for step in steps))

    return {arrow for arrow in arrows if arrow[1] not in reach(arrow[0], arrow)}


def places() -> dict[str, tuple[int, int]]:
    """The upper left corner of each package's box."""
    most = max(len(column) for column in COLUMNS)
    corners = {}
    for x, column in enumerate(COLUMNS):
        above = (most - len(column)) * (HEIGHT + DOWN) // 2
        for y, name in enumerate(column):
            corners[name] = (EDGE + x * (WIDTH + ACROSS), EDGE + above + y * (HEIGHT + DOWN))
    gap = (len(COLUMNS) * (WIDTH + ACROSS) - ACROSS - len(BELOW) * WIDTH) // (len(BELOW) - 1)
    for x, name in enumerate(BELOW):
        corners[name] = (EDGE + x * (WIDTH + gap), EDGE + most * (HEIGHT + DOWN) + DOWN)
    return corners


def arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    (x1, y1), (x2, y2) = start, end
    if x1 == x2:  # in one column
        y1, y2 = (y1, y2 + HEIGHT) if y1 > y2 else (y1 + HEIGHT, y2)
        path = f"M{x1 + WIDTH // 2} {y1}L{x2 + WIDTH // 2} {y2}"
    else:
        x2, y1, y2 = x2 + WIDTH, y1 + HEIGHT // 2, y2 + HEIGHT // 2
        bend = (x1 - x2) // 2
        path = f"M{x1} {y1}C{x1 - bend} {y1} {x2 + bend} {y2} {x2} {y2}"
    return f'<path d="{path}" fill="none" stroke="#8aa0b8" marker-end="url(#to)"/>'


def box(name: str, x: int, y: int) -> list[str]:
    files, lines = size(name)
    count = f"{files} files, {lines:,} lines" if files > 1 else f"{lines:,} lines"
    fill = "#f3f0e6" if name in BELOW else "#eaf1f8"
    return [
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="#345"/>',
        f'<text x="{x + 10}" y="{y + 21}" font-size="15" font-weight="bold">{name}</text>',
        f'<text x="{x + 10}" y="{y + 38}" font-size="12">{escape(IDEAS[name])}</text>',
        f'<text x="{x + 10}" y="{y + 53}" font-size="11" fill="#567">{count}</text>',
    ]


def draw() -> str:
    """The picture as SVG, the same for the same code."""
    corners = places()
    width, height = (max(corner[i] for corner in corners.values()) for i in (0, 1))
    size = f"0 0 {width + WIDTH + EDGE} {height + HEIGHT + EDGE}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="#8aa0b8"/></marker></defs>',
        *(arrow(corners[user], corners[used]) for user, used in sorted(reduced(imports()))),
    ]
    for name, corner in corners.items():
        parts += box(name, *corner)
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    (ROOT / "docs" / "design.svg").write_text(draw())
