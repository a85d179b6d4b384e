"""Draws the house: packages and what they import, read from the code.

    python tools/draw_layout.py          # writes docs/design.svg

It shows no sizes, which change with every commit: `tests/test_layout.py -s` prints them.

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
    ["models", "augment", "compile"],
    ["recipe", "data", "interop", "recipes"],
    ["step", "run"],
    ["deploy", "proof", "study", "planner"],
    ["launch", "explain", "cli"],
]
"""From the left, which imports nothing of the others, to the right, which nothing imports."""
BELOW = ["base", "chips", "machine"]

IDEAS = {
    "base": "errors, facts, files",
    "chips": "catalogue, targets, prices",
    "machine": "devices found, simulated",
    "models": "one idea a file",
    "augment": "examples changed on chips",
    "recipe": "all that changes a result",
    "data": "sources, order, reading",
    "interop": "other frameworks",
    "recipes": "built-in recipes",
    "step": "one step, as pure functions",
    "compile": "programs on absent chips",
    "run": "drives a step, keeps runs",
    "deploy": "predictions, exports",
    "proof": "computed again, compared",
    "study": "sweeps, finders, a referee",
    "planner": "memory, seconds, dollars",
    "launch": "jobs for rented chips",
    "explain": "compare, report, track",
    "cli": "parse, call, print",
}
WIDTH, HEIGHT, ACROSS, DOWN, EDGE = 178, 50, 44, 22, 12


def imports() -> set[tuple[str, str]]:
    """Who imports whom, also inside functions, from right to left: `("run", "data")`."""
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
    fill = "#f3f0e6" if name in BELOW else "#eaf1f8"
    return [
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="#345"/>',
        f'<text x="{x + 10}" y="{y + 21}" font-size="15" font-weight="bold">{name}</text>',
        f'<text x="{x + 10}" y="{y + 39}" font-size="12">{escape(IDEAS[name])}</text>',
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
