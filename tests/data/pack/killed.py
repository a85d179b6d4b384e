"""Packs in processes that are killed at random moments, until one comes through.

    python killed.py SRC DST STORE SEED

The last line says how many were killed and how often one went on after another's shards.
"""

import os
import random
import shutil
import signal
import sys
import threading

from chipwise.data.pack import examples, packing

examples.PIECE_ENTRIES = 4


def attempt(src, dst, store, moment, going_on):
    """One try in a process of its own; whether it ended by itself."""
    child = os.fork()
    if not child:
        calls = iter(range(10**6))

        def progress(now):
            if next(calls) == 0 and now.done:
                os.write(going_on, b".")
            if moment > 0 and calls.__length_hint__() == 10**6 - moment:
                os.kill(os.getpid(), signal.SIGKILL)

        if moment < 0:  # at any moment, not only between two pieces
            threading.Timer(-moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
        packing.pack(src, dst, store=store, size=12, split=0.25, shards=6, progress=progress, workers=2)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def main(src, dst, store, seed):
    rng = random.Random(int(seed))
    read, going_on = os.pipe()
    killed = 0
    while not attempt(src, dst, store, rng.choice([rng.randint(1, 6), -rng.uniform(0.005, 0.1)]), going_on):
        killed += 1
        if os.path.exists(dst):  # killed after the whole pack had its name
            if killed > 2:
                break  # the caller compares its bytes
            shutil.rmtree(dst)
        if killed == 12:
            attempt(src, dst, store, 0, going_on)
            break
    os.close(going_on)
    print(killed, len(os.read(read, 100)))


if __name__ == "__main__":
    main(*sys.argv[1:])
