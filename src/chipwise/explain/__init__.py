"""Answers for people: tables, charts and pages.

An answer is a list of parts: titles, lines, tables and pictures. `report/` makes those of one run,
`compare/` those of several, the `plan_*.py` files those of plans. `terminal.py` prints parts,
`page.py` makes HTML of them, for pages and for the notebooks of `display.py`. `charts.py` draws.
`track/` sends rows to other services.
"""
