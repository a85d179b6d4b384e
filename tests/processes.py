"""Several processes on this machine, each a host of one run, for tests."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from namespaces import ADDRESS

HERE = Path(__file__).parent
SHARING = (
    "from chipwise.machine.compilation_cache import portable_entries\n"
    "cache = portable_entries()\ncache.__enter__()\n"
)  # with the tests


def free_port():
    """The first of some ports in a row that nobody has."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(program, processes, devices=1, *arguments, namespaces=None, **more):
    """The Python program in so many processes of so many CPU devices each (or a list of these numbers), as
    `Popen`s with pipes; each in a network namespace of `namespaces`, if there are any."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = []
    for index, seat in enumerate(seats(processes, devices, namespaces)):
        command = [*within(namespaces and namespaces[index]), sys.executable, "-c", SHARING + program]
        command += map(str, arguments)
        started.append(subprocess.Popen(command, env=environment(**{**seat, **more}), **pipes))
    return started


def seats(processes, devices, namespaces=None):
    """What the environment tells each host."""
    where = f"{ADDRESS if namespaces else '127.0.0.1'}:{free_port()}"
    told = {"CHIPWISE_HOSTS": str(processes), "CHIPWISE_COORDINATOR": where, "CHIPWISE_WAIT": "120"}
    told |= {"JAX_PLATFORMS": "cpu"}
    each = [devices] * processes if isinstance(devices, int) else devices
    own = [{"CHIPWISE_HOST": str(i), "JAX_NUM_CPU_DEVICES": str(n)} for i, n in enumerate(each)]
    return [{**told, **one} for one in own]


def environment(**more):
    """This process's, without what it says of its own devices."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    return {**kept, "PYTHONPATH": search(), **more}


def within(namespace):
    """How a command begins that is to run in a network namespace, or in none."""
    return ["ip", "netns", "exec", namespace] if namespace else []


def search():
    return os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])


def ends(started, limit=240):
    """Exit code, output and error of each, once all have ended; none is left behind."""
    try:
        said = [one.communicate(timeout=limit) for one in started]
    finally:
        for one in started:
            one.kill()
    return [(one.returncode, out, err) for one, (out, err) in zip(started, said, strict=True)]


def answer(started, limit=240):
    """The JSON on the last line of host 0, when all have ended well."""
    found = ends(started, limit)
    assert [code for code, _, _ in found] == [0] * len(found), found
    return json.loads(found[0][1].splitlines()[-1])
