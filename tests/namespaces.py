"""Two network namespaces of this machine with a link between them that can be cut (needs root and `ip`)."""

import contextlib
import os
import shutil
import socket
import subprocess
from pathlib import Path

ADDRESS = "10.77.0.1"  # of the first


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def possible():
    if os.geteuid() or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0


def link(names, way):
    """Puts the link "up" or "down"."""
    ip("-n", names[0], "link", "set", f"{names[0]}-v", way)


@contextlib.contextmanager
def pair():
    """The names of two, linked, until the end."""
    names = [f"cw{os.getpid()}{end}" for end in "ab"]  # also of their cards, which have at most 15 letters
    files = [Path("/etc/netns") / name for name in names]
    try:
        for i, (name, file) in enumerate(zip(names, files, strict=True)):
            ip("netns", "add", name)
            file.mkdir(parents=True)  # `ip netns exec` shows it as /etc/hosts
            (file / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.{i + 1} {socket.gethostname()}\n")
        a, b = names
        ip("link", "add", f"{a}-v", "netns", a, "type", "veth", "peer", "name", f"{b}-v", "netns", b)
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"{name}-v")
            ip("-n", name, "link", "set", f"{name}-v", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name, file in zip(names, files, strict=True):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(file, ignore_errors=True)
