"""Compares what recipes compute with what is stored: programs, cache keys, bits of trainings.

    python tools/golden.py                              # everything: some minutes
    python tools/golden.py --part programs              # traces alone: half a minute
    python tools/golden.py --only small-sgd --only digits
    python tools/golden.py --write                      # after a change of bits that is meant

It prints each case with what moved: a program, a chip's key, or the first step whose row of the
ledger is another, and which of gradient, parameters, state and optimizer differ there. It exits
with 1 if anything moved. `tests/golden_values.py` explains what the values are and when they may
move; the cases are in `tests/golden_cases.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("programs", "keys", "trainings")

WRITE = """Replace the stored values with those computed here. Make it a commit of its own, whose
message says why bits changed."""
PART = "Compare only this part; may be repeated."
ONLY = "Compare only this case; may be repeated."


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help=PART)
    parser.add_argument("--only", action="append", metavar="NAME", help=ONLY)
    parser.add_argument("--write", action="store_true", help=WRITE)
    return parser.parse_args()


def prepare() -> None:
    """Sets what JAX reads when it is imported: eight CPU devices, the passes of users, no folders."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)  # of the test suite
    # A kernel written for TPUs holds the files of its source: without the folders where JAX is installed
    os.environ["JAX_HLO_SOURCE_FILE_CANONICALIZATION_REGEX"] = ".*/"
    sys.path.insert(0, str(ROOT / "tests"))


def compare(part: str, name: str, *, write: bool) -> list[str]:
    """What moved in a part of a case; with `write`, what is stored becomes what is computed.

    Trainings on further devices are compared with those on the first count, whatever is stored.
    """
    import golden_values as golden
    from golden_cases import CASES

    case, moved = CASES[name], list[str]()
    if part == "trainings":
        recipe, (fewest, *others) = case.to_train(), case.device_counts
        values = golden.training(recipe, fewest)
        for devices in others:
            unlike = golden.moved(values, golden.training(recipe, devices))
            moved += [f"on {devices} devices, from {fewest}: {difference}" for difference in unlike]
    else:
        values = getattr(golden, part)(case.recipe())
    if write and not moved:
        golden.store(part, name, values)
    elif not write and golden.why_not_compared(part) is None:
        moved += golden.moved(golden.stored(part, name), values)
    return moved


def compare_all(parts: Sequence[str], names: Sequence[str], *, write: bool) -> bool:
    """Compares or writes, prints a line for each case, and returns whether anything moved."""
    import golden_values as golden
    from golden_cases import CASES

    any_moved = False
    for part in parts:
        if not write and (reason := golden.why_not_compared(part)):
            print(f"{part}: {reason}")
            if part != "trainings":
                continue
            print("trainings: only device counts are compared with each other")
        for name in names:
            if part == "trainings" and not CASES[name].trained:
                print(f"{part:9} {name:22} only traced")
                continue
            moved = compare(part, name, write=write)
            any_moved |= bool(moved)
            outcome = "moved" if moved else "stored" if write else "same"
            print(f"{part:9} {name:22} {outcome}", *moved, sep="\n    ", flush=True)
    return any_moved


def main() -> int:
    given = arguments()
    prepare()
    from chipwise.machine.compilation_cache import compiled_once

    # Once for all device counts
    with compiled_once():
        from golden_cases import CASES

        names = given.only or [*CASES]
        if unknown := sorted({*names} - {*CASES}):
            print(f"No case {', '.join(unknown)}: expected {', '.join(CASES)}.", file=sys.stderr)
            return 2
        return int(compare_all(given.part or PARTS, names, write=given.write))


if __name__ == "__main__":
    sys.exit(main())
