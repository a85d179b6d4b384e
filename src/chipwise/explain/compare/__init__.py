"""Records, runs, studies, plans and published figures of one recipe, side by side.

`sources` reads them into one kind of `Row`; `differences` refuses other recipes and lists what differs;
`agreement` asks whether they compute the same thing; `speed`, `target` and `money` do the arithmetic;
`document` puts it together as plain JSON values, which `table` prints and `page` draws.
"""
