"""One step of training as pure functions of arrays and shapes. The order of sums over blocks is
fixed, unless `exact=False`.

`layout.py` fixes which replicas a device computes and in which order their sums are added.
`reduce.py` adds over devices in that order. `step.py` and `group_step.py` have the programs, and
`blueprint.py` lists them as values: shapes, calls, exchanges and bytes. `run/programs.py` compiles
the programs, and `program.py` exports them for a plan. `state.py` has what one step passes to the
next. No program uses a host, a disk, a thread or a clock.
"""
