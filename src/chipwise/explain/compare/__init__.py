"""Records, runs, studies, plans and published figures of one recipe, side by side.

`explain.sources` reads them as `Row`s. `agreement` refuses other recipes, lists differences, and checks
whether rows compute the same thing. `figures` computes speeds, times and costs, `conclusions` the facts.
`document` puts them together as plain JSON values, which `table` prints and `page` draws.
"""
