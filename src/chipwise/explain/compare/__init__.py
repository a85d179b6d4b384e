"""Runs, studies and records side by side: their results, speeds and costs.

`explain.row_sources` reads them as `Row`s. `agreement` lists differences, and checks whether rows compute the
same thing. `row_figures` computes speeds, times and costs, `conclusions` the facts. `comparison` puts them
together as plain JSON values, which `compare_table` prints and `compare_page` draws.
"""
