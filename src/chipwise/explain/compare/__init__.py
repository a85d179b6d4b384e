"""Records, runs, studies, plans and published figures of one recipe, side by side.

`explain.row_sources` reads them as `Row`s. `agreement` refuses other recipes, lists differences, and checks
whether rows compute the same thing. `row_figures` computes speeds and times, `conclusions` the facts.
`comparison` puts them together as plain JSON values, which `compare_table` prints and `compare_page` draws.
"""
