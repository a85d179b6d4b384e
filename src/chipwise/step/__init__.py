"""One step of training as pure functions of arrays and shapes, in which the order of every sum is
fixed.

`layout.py` fixes which replicas a device computes and in which order their sums are added.
`reduce.py` adds over devices in that order. `step.py` and `group_step.py` have the programs, and
`blueprint.py` lists them as values: shapes, calls, exchanges and bytes. A run compiles a program,
and a plan exports it, as in `program.py`. Nothing here uses a host, a disk, a thread or a clock.
"""
