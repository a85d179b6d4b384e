"""Hosts for tests that start hundreds: each is a fork of a process that has made its imports."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import processes


class Server:
    """Starts `program`, which begins where the Python text `imports` ends, again and again.

    *Arguments:* `folder` for what the processes print; `namespace` of the network to be in.
    """

    def __init__(self, imports, program, folder, namespace=None):
        self.folder, self._started, self.codes = Path(folder), [], {}
        self._heard = threading.Condition()
        text = f"import warm\n{imports}\nwarm.fork()\n{program}"
        command = [*processes.within(namespace), sys.executable, "-c", text]
        environment = processes.environment(JAX_PLATFORMS="cpu", CHIPWISE_CACHE=str(self.folder / "cache"))
        environment["OPENBLAS_NUM_THREADS"] = "1"  # NumPy would start threads when it is imported
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # as a user's, whose kept programs all share
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, environment, *arguments):
        """A process with the environment added and `sys.argv[1:]`."""
        number = len(self._started)
        files = [str(self.folder / f"{self.process.pid}-{number}.{name}") for name in ("out", "err")]
        told = {"environment": environment, "argv": ["-c", *map(str, arguments)], "files": files}
        self.process.stdin.write(json.dumps(told) + "\n")
        with self._heard:
            assert self._heard.wait_for(lambda: len(self._started) > number, 120)
        return Forked(self, self._started[number], files)

    def ended(self, pid, limit):
        """Its exit code, `None` if it has none within `limit` seconds."""
        with self._heard:
            self._heard.wait_for(lambda: pid in self.codes, limit)
            return self.codes.get(pid)

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()

    def _listen(self):
        for line in self.process.stdout:
            said = json.loads(line)
            with self._heard:
                if "started" in said:
                    self.codes.pop(said["started"], None)  # of an earlier process with this number
                    self._started.append(said["started"])
                else:
                    self.codes[said["ended"]] = said["code"]
                self._heard.notify_all()


class Forked:
    """As a `Popen` with pipes."""

    def __init__(self, server, pid, files):
        self.server, self.pid, self.files = server, pid, files

    @property
    def returncode(self):
        return self.poll()

    def poll(self):
        return self.server.ended(self.pid, 0)

    def wait(self, timeout):
        code = self.server.ended(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def communicate(self, timeout):
        self.wait(timeout)
        return tuple(Path(name).read_text() for name in self.files)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def fork():
    """In a server's process: returns in each of the processes that it is told to start."""
    import jax

    threads = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
    assert len(threads) == 1, f"missing in the forks: {threads}"
    living = set()
    while True:
        if select.select([0], [], [], 0.02)[0]:
            line = sys.stdin.readline()
            if not line:
                for pid in living:
                    os.kill(pid, signal.SIGKILL)  # not waited for, so that the number is still its own
                os._exit(0)
            told = json.loads(line)
            pid = os.fork()
            if pid == 0:
                break
            living.add(pid)
            print(json.dumps({"started": pid}), flush=True)
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            continue
        if pid:
            living.discard(pid)
            print(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)
    for number, name in enumerate([os.devnull, *told["files"]]):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
    os.environ.update(told["environment"])
    sys.argv = told["argv"]
    jax.config.update("jax_num_cpu_devices", int(os.environ["JAX_NUM_CPU_DEVICES"]))  # read at import
