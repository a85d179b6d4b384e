"""Records, runs, studies, plans and published figures of one recipe, side by side.

`explain.sources` reads them into one kind of `Row`; `agreement` refuses other recipes, lists what is not
the same, and asks whether they compute the same thing; `figures` does the arithmetic; `conclusions`
says what follows; `document` puts it together as plain JSON values, which `table` prints and `page` draws.
"""
