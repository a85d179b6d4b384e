"""Runs, studies and records side by side: their results, speeds and costs.

`explain.row_sources` reads them as `Row`s. `differing` lists their differences. `row_figures`
computes speeds, times and costs, `conclusions` the facts. `comparison` puts them together as plain
JSON values. `compare_parts` and `compare_pictures` show them.
"""
