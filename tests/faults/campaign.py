"""Strikes commands with faults, types each again, and compares what they leave with what nobody disturbed.

    python tests/faults/campaign.py --faults 1000 --seed 0 --rows rows.jsonl

A fault is one operation on files, drawn from those that the command makes (`strike.c`). The processes are
forks of one that has imported everything, so that a fault costs two seconds. A row tells what was struck and
what came of it; `wrong` is empty, or says what was lost.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import errno
import hashlib
import importlib
import json
import os
import pkgutil
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

CAMPAIGN = str(Path(__file__))
HERE = Path(__file__).parent
OPEN, WRITE, FSYNC, RENAME, UNLINK, MKDIR, READ, TRUNCATE = (1 << i for i in range(8))
CHANGES = OPEN | WRITE | FSYNC | RENAME | UNLINK | MKDIR | TRUNCATE
LONGEST = 10.0
"""Seconds that nobody may wait for a process that was struck, times the processes that share a core."""
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.ESTALE)
IMPORTED = (
    "chipwise.cli.deploy",
    "chipwise.cli.pack",
    "chipwise.cli.referee",
    "chipwise.cli.train",
    "chipwise.data.pack.packing",
    "chipwise.deploy.export",
    "chipwise.run.fit",
    "chipwise.study.referee.ruling",
    "chipwise.study.sweep",
    "datasets",
    "jaxlib.mlir.dialects.mhlo",
    "pydantic",
    "tensorboardX",
    "xxhash",
)
LITTER = re.compile(r"\.part$|\.making$|orbax-checkpoint-tmp|^\.chipwise")

KINDS = ("kill", "fail", "short", "power", "moved", "replaced", "unreadable", "host")
"""kill: SIGKILL before or after an operation. fail: it fails, once or for good. short: half is
written. power: as kill, and what no fsync followed is lost. moved, replaced: the folder is moved
away, and another one may be at its place. unreadable: a read of the second process fails. host: one
of two hosts is killed."""

RECIPE = """
import jax
import jax.numpy as jnp
import numpy as np

import chipwise as cw


def init(key):
    a, b = jax.random.split(key)
    return {"a": 0.1 * jax.random.normal(a, (16, 32)), "b": 0.1 * jax.random.normal(b, (32, 4))}, {}


def predict(params, state, batch):
    return jax.nn.relu(batch["x"] @ params["a"]) @ params["b"]


def loss(params, state, batch, key, train):
    logits = predict(params, state, batch)
    error = cw.losses.softmax_cross_entropy(logits, batch["label"])
    return {"loss": cw.Sum.of(error), "accuracy": cw.Sum.of(cw.losses.correct(logits, batch["label"]))}, state


def recipe(seed: int = 0, lr: float = 0.01):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 16)).astype(np.float32)
    y = (np.abs(x[:, :4]).argmax(1)).astype(np.int32)
    train, ev = cw.Arrays(x=x[:192], label=y[:192]), cw.Arrays(x=x[192:], label=y[192:])
    task = cw.Task(init=init, loss=loss, predict=predict, train=train, eval=ev, classes=4)
    return cw.Recipe(task=task, batch=16, replicas=4, duration="2ep", seed=seed, optimizer=cw.adamw(lr=lr))
"""


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def rows_of(ledger: Path) -> list:
    rows = (json.loads(line) for line in ledger.read_text().splitlines())
    return sorted((row["step"], row["parameters"], row["optimizer"]) for row in rows if "step" in row)


def run_in(folder: Path) -> list:
    """What a run computed, whatever its processes were."""
    result = json.loads((folder / "result.json").read_text())
    metrics = {n: v for n, v in result["metrics"].items() if n.startswith("eval/")}
    return [result["fingerprint"], result["ledger"], metrics, rows_of(folder / "ledger.jsonl")]


def arrays_in(file: Path) -> dict[str, str]:
    from safetensors.numpy import load_file

    return {n: hashlib.sha256(a.tobytes()).hexdigest() for n, a in load_file(file).items()}


@dataclass
class Scene:
    """A command, and what of it counts."""

    name: str
    folder: str
    """What is moved, below the root."""
    argv: list[str]
    operations: int = 0
    writes: int = 0
    reads: int = 0
    locked: int = 1
    """The first operation after its folder is locked."""
    whole: object = None
    start: Path | None = None
    half: Path | None = None
    """A root whose command was ended half way."""
    codes: tuple[int, ...] = (0,)

    def answer(self, root: Path):
        place = root / self.folder
        if self.name == "train":
            return run_in(place)
        if self.name == "pack":
            return {n: hashlib.sha256(b).hexdigest() for n, b in tree(place / "pack").items()}
        if self.name == "sweep":
            study = json.loads((place / "study.json").read_text())
            runs = [run for point in study["points"] for run in point["runs"]]
            assert all(run["done"] for run in runs)
            return [run_in(place / run["run"]) for run in runs]
        if self.name == "referee":
            json.loads((place / "tries.jsonl").read_text().splitlines()[-1])
            return {
                str(f.parent.relative_to(place)): run_in(f.parent) for f in place.rglob("seed-0/result.json")
            }
        return arrays_in(place / "model.safetensors")


@dataclass
class Ended:
    code: int
    seconds: float
    said: str
    log: list[str] = field(repr=False)
    struck: list[str]
    waited: float
    """Seconds from the strike to the end."""
    dirty: dict[int, int]
    """The files with writes that no fsync followed, and how many of their bytes one had followed before."""


@dataclass
class Campaign:
    work: Path
    shim: Path
    seed: str
    scenes: dict[str, Scene] = field(default_factory=dict)

    def __post_init__(self):
        self.inputs = self.work / "inputs"
        self.inputs.mkdir(parents=True)
        (self.inputs / "tiny.py").write_text(RECIPE)
        words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
        lines = [{"text": " ".join(random.Random(i).choices(words, k=30))} for i in range(200)]
        (self.inputs / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
        self._tokenizer(words)
        self.library = ctypes.CDLL(str(self.shim))

    def _tokenizer(self, words):
        from tokenizers import Tokenizer, models, pre_tokenizers

        tokens = {w: i for i, w in enumerate(["<unk>", "<|endoftext|>", *words])}
        tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(self.inputs / "tokenizer.json"))

    def prepare(self, names):
        recipe = f"{self.inputs}/tiny.py:recipe"
        often = ["--log-every", "4st", "--eval-every", "12st", "--checkpoint-every", "6st"]
        train = [
            "train",
            recipe,
            "--run",
            "run",
            "--simulate",
            "2",
            "--ledger",
            "4st",
            "--keep",
            "2",
            "--quiet",
        ]
        pack = ["pack", f"{self.inputs}/text.jsonl", "out/pack", "--tokens", "17", "--shards", "3"]
        pack += ["--tokenizer", f"{self.inputs}/tokenizer.json", "--columns", "text=text", "--split", "0.2"]
        sweep = [
            "sweep",
            recipe,
            "--set",
            "lr=0.01,0.02",
            "--seeds",
            "1",
            "--run",
            "study",
            "--simulate",
            "1",
        ]
        referee = [
            "referee",
            recipe,
            "--set",
            "lr=0.02",
            "--spend",
            "1s",
            "--run",
            "study",
            "--simulate",
            "1",
        ]
        export = ["export", f"{self.work}/trained/run", "--recipe", recipe, "--to", "safetensors"]
        export += ["--out", "out/model.safetensors", "--fresh"]
        verdicts = (0, 10, 11, 12, 13, 14, 15)
        for scene in (
            Scene("train", "run", [*train, *often]),
            Scene("pack", "out", pack),
            Scene("sweep", "study", [*sweep, *often]),
            Scene("referee", "study", referee, codes=verdicts),
            Scene("export", "out", export),
        ):
            if scene.name not in names and scene.name != "train":
                continue
            root = self.work / f"whole-{scene.name}"
            if scene.name in ("export", "pack"):
                scene.start = self.work / f"start-{scene.name}"
                (scene.start / "out").mkdir(parents=True)
            if scene.name == "export":
                shutil.copytree(self.work / "whole-train", self.work / "trained")
                self.run(scene, self.fresh_root(scene, root.with_name("old")), arm=(CHANGES, 0, "c", 0, 1))
                shutil.copy(root.with_name("old") / "out/model.safetensors", scene.start / "out")
            ended = self.run(scene, self.fresh_root(scene, root), arm=(CHANGES, 0, "c", 0, 1))
            assert ended.code in scene.codes, (scene.name, ended)
            scene.operations, scene.whole = self.counted, scene.answer(root)
            scene.writes = sum(line.startswith("= write ") for line in ended.log)
            own = [line.endswith("lock") for line in ended.log if line[0] == "="]
            scene.locked = own.index(False, own.index(True)) + 1
            self.scenes[scene.name] = scene
            if scene.name == "train":
                scene.half = self.work / "half-train"
                ended = self.run(scene, self.fresh_root(scene, scene.half), more=["--stop-after", "15st"])
                assert ended.code == 0, ended
                copy = self.work / "half-copy"
                shutil.copytree(scene.half, copy)
                self.run(scene, copy, arm=(READ, 0, "c", 0, 1))
                scene.reads = self.counted
                foreign = self.work / "foreign-train"
                self.run(scene, self.fresh_root(scene, foreign), more=["--set", "duration=8st"])

    def fresh_root(self, scene: Scene, root: Path) -> Path:
        if root.exists():
            shutil.rmtree(root)
        if scene.start:
            shutil.copytree(scene.start, root)
        else:
            root.mkdir(parents=True)
        return root

    # ---- one process

    counted = 0

    def begin(self, scene, root, arm=None, more=(), environment=None):
        """Forks a process that types the command. *Returns* its pid."""
        log, said, count = root.with_suffix(".log"), root.with_suffix(".said"), root.with_suffix(".count")
        for file in (log, said, count):
            file.unlink(missing_ok=True)
        if pid := os.fork():
            return pid
        os.setpgid(0, 0)
        os.environ.update(environment or {})
        os.chdir(root)
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.argv = ["chipwise", *scene.argv, *more]
        if arm is not None:
            operations, nth, how, number, times, *away = arm
            place = root / scene.folder if how == "m" else root
            texts = [os.fsencode(str(text)) for text in (log, *(away or ("", "")))]
            self.library.strike(os.fsencode(str(place)), operations, nth, ord(how), number, times, *texts)
        code = 1
        try:
            from chipwise.cli import main

            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        count.write_text(str(self.library.struck()))
        raise SystemExit(code)

    def end(self, pid, root, began, limit=60.0):
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() - began > limit:
                os.killpg(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                break
            time.sleep(0.01)
        now = time.monotonic()
        log = root.with_suffix(".log")
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        struck = [line[2:] for line in lines if line[0] == "!"]
        synced, dirty = collections.Counter(), {}
        for line in lines:
            if line[0] in "+-":
                inode, size = map(int, line[2:].split())
                if line[0] == "-":
                    synced[inode] = size
                    dirty.pop(inode, None)
                else:
                    dirty[inode] = synced[inode]
        count = root.with_suffix(".count")
        self.counted = int(count.read_text()) if count.exists() else 0
        waited = now - float(struck[0].split()[0]) if struck else 0.0
        said = root.with_suffix(".said").read_text(errors="replace")
        code = os.waitstatus_to_exitcode(status)
        return Ended(code, now - began, said, lines, struck, waited, dirty)

    def run(self, scene, root, arm=None, more=(), environment=None):
        began = time.monotonic()
        return self.end(self.begin(scene, root, arm, more, environment), root, began)

    # ---- one fault

    def fault(self, name, kind, index) -> dict:
        scene, rng = self.scenes[name], random.Random(f"{self.seed} {name} {kind} {index}")
        root = self.work / f"{name}-{kind}-{index}"
        row = {"scene": name, "kind": kind, "index": index, "seed": self.seed}
        if kind == "unreadable":
            shutil.copytree(scene.half, root)
        else:
            self.fresh_root(scene, root)
        total = scene.reads if kind == "unreadable" else scene.operations
        nth = rng.randint(scene.locked if kind in ("moved", "replaced") else 1, max(1, total))
        moved, foreign, before = root / "moved", "", {}
        if kind == "replaced":
            foreign = root / "foreign"
            if name == "train":
                shutil.copytree(self.work / "foreign-train" / "run", foreign)
            else:
                foreign.mkdir()
                (foreign / "theirs").write_text("of another process")
            before = tree(foreign)
        arms = {
            "kill": (CHANGES, nth, rng.choice("ab"), 0, 1),
            "power": (CHANGES, nth, rng.choice("ab"), 0, 1),
            "fail": (CHANGES, nth, "f", rng.choice(ERRORS), rng.choice((1, 1 << 30))),
            "short": (WRITE, rng.randint(1, scene.writes), "s", 0, 1),
            "moved": (CHANGES, nth, "m", 0, 1, moved, ""),
            "replaced": (CHANGES, nth, "m", 0, 1, moved, foreign),
            "unreadable": (
                READ,
                nth,
                "f",
                rng.choice((errno.EIO, errno.ESTALE, errno.EACCES)),
                rng.choice((1, 1 << 30)),
            ),
        }
        wrong = []
        if kind == "host":
            struck = self.hosts(scene, root, rng, nth, wrong, row)
        else:
            row["nth"], row["how"] = nth, arms[kind][2] + (errno.errorcode.get(arms[kind][3], ""))
            struck = self.run(scene, root, arms[kind])
        row |= {"code": struck.code, "struck": struck.struck[:1], "seconds": round(struck.seconds, 2)}
        row["waited"] = round(struck.waited, 2)
        row["load"] = round(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), 1)
        if struck.waited > LONGEST * row["load"]:
            wrong.append(f"waited {struck.waited:.1f} s")
        if "Traceback" in struck.said:
            wrong.append("a traceback")
        allowed = {"kill": {-9, *scene.codes}, "power": {-9, *scene.codes}, "host": {-9, 0, 5, 76}}.get(
            kind, {3, 5, *scene.codes}
        )
        if struck.code not in allowed:
            wrong.append(f"exit code {struck.code}")
        if arms[kind][3] not in (errno.ENOSPC, errno.EDQUOT) if kind in ("fail", "unreadable") else False:
            wrong += [
                f"says {text!r}" for text in ("Make space", "--fresh", "damaged") if text in struck.said
            ]
        if kind == "power" and struck.struck:
            for path in (path for path in root.rglob("*") if path.is_file()):
                about = path.stat()
                if (kept := struck.dirty.get(about.st_ino)) is not None:
                    os.truncate(path, min(kept, about.st_size))
                    if rng.random() < 0.5:  # some file systems keep the size, with zeros
                        os.truncate(path, about.st_size)
        place = root / scene.folder
        if kind in ("moved", "replaced") and struck.struck:
            if kind == "replaced" and tree(place) != before:
                wrong.append("wrote into another's folder")
            if kind == "moved" and place.exists():
                wrong.append("wrote where its folder was")
            if moved.exists():
                if place.exists():
                    place.rename(root / "theirs")
                moved.rename(place)
        if kind == "unreadable" and list(place.glob("damaged-checkpoint-*")):
            wrong.append("set a sound checkpoint aside")
        newest = self.newest(place) if name == "train" else None
        newest = None if newest == 24 else newest  # the second has nothing to do
        again = self.run(scene, root)
        # A pack that is there is not made again
        there = name == "pack" and again.code == 3 and "exists already" in again.said
        if again.code not in scene.codes and not there:
            wrong.append(f"the same command again: {again.code}: {again.said[-300:]}")
        else:
            try:
                answer = scene.answer(root)
                same = answer == scene.whole
                wrong += [] if same else ["other bits"]
            except Exception as error:
                wrong.append(f"no answer: {error!r}"[:200])
            left = [str(p.relative_to(root)) for p in root.rglob("*") if LITTER.search(p.name)]
            left = [one for one in left if not one.startswith(("theirs", "foreign"))]
            wrong += [f"left {left[:3]}"] if left else []
            if "damaged" in again.said:
                wrong.append("told as damage: " + again.said[-200:])
        if newest is not None and (begun := self.begun(place)) < newest:
            wrong.append(f"began at {begun} beside a checkpoint of {newest}")
        row["wrong"] = wrong
        if wrong:
            row["said"] = struck.said[-1500:]
        else:
            for left in (root.with_suffix(s) for s in (".log", ".said", ".count")):
                left.unlink(missing_ok=True)
            shutil.rmtree(root)
        return row

    def newest(self, run: Path):
        with contextlib.suppress(OSError):
            steps = [int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdecimal()]
            return max(steps, default=None)

    def begun(self, run: Path):
        """The step at which the last process began."""
        events = [json.loads(line) for line in (run / "processes.jsonl").read_text().splitlines()]
        return [event["step"] for event in events if event["event"] == "start"][-1]

    def hosts(self, scene, root, rng, nth, wrong, row):
        """Two hosts of one run, of which one is killed at an operation of the first."""
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        told = {"CHIPWISE_HOSTS": "2", "CHIPWISE_COORDINATOR": f"127.0.0.1:{port}", "CHIPWISE_WAIT": "60"}
        at = scene.argv.index("--simulate")
        hosted = Scene(scene.name, scene.folder, [*scene.argv[:at], *scene.argv[at + 2 :]])
        other, began = root.with_name(root.name + "-other"), time.monotonic()
        other.mkdir()
        environment = {**told, "JAX_NUM_CPU_DEVICES": "1"}
        second = self.begin(hosted, other, environment={**environment, "CHIPWISE_HOST": "1"})
        whom = rng.choice("kb")
        arm = (CHANGES, nth, whom, second, 1)
        first = self.begin(hosted, root, arm, environment={**environment, "CHIPWISE_HOST": "0"})
        struck = self.end(first, root, began)
        left = time.monotonic()
        ended = self.end(second, other, began)
        row["nth"], row["how"] = nth, {"k": "second", "b": "first"}[whom]
        if ended.code not in (-9, 0, 5, 76):
            wrong.append(f"the other host: exit code {ended.code}: {ended.said[-300:]}")
        if whom == "b" and struck.struck and time.monotonic() - left > LONGEST * os.getloadavg()[0]:
            wrong.append(f"the other host waited {time.monotonic() - left:.1f} s")
        if not wrong:
            for file in (other.with_suffix(s) for s in (".log", ".said", ".count")):
                file.unlink(missing_ok=True)
            shutil.rmtree(other)
        return struck


SHARES = {"train": 3, "pack": 3, "sweep": 1, "referee": 1, "export": 3}
"""How often each is struck: a study takes as long as three of the others."""


def cases(faults, scenes, kinds):
    """Which faults: by turns over all pairs that there are, a scene as often as it has shares."""
    pairs = [(s, k) for k in kinds for s in scenes if s == "train" or k not in ("unreadable", "host")]
    counts = collections.Counter()
    for turn in range(faults):
        for scene, kind in pairs:
            if turn % 3 < SHARES[scene]:
                if counts.total() == faults:
                    return
                yield scene, kind, counts[scene, kind]
                counts[scene, kind] += 1


def compiled(to: Path) -> Path:
    """The shim, compiled."""
    made = to / "strike.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", "-o", str(made), str(HERE / "strike.c"), "-ldl"]
    subprocess.run(command, check=True)
    return made


def table(rows):
    """The rows, counted by kind and scene, as a table of a page."""
    scenes = list(dict.fromkeys(row["scene"] for row in rows))
    yield "| fault | " + " | ".join(scenes) + " | faults | longest wait | lost |"
    yield "|---|" + "---|" * (len(scenes) + 3)
    for kind in KINDS:
        own = [row for row in rows if row["kind"] == kind]
        if own:
            counts = [str(sum(row["scene"] == scene for row in own) or "") for scene in scenes]
            longest = max(row["waited"] / row["load"] for row in own)
            lost = sum(bool(row["wrong"]) for row in own)
            yield f"| {kind} | {' | '.join(counts)} | {len(own)} | {longest:.1f} s | {lost} |"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", default="0", help="any text")
    parser.add_argument("--part", default="0/1", help="which of how many processes this is, such as 0/2")
    parser.add_argument("--scenes", default="train,pack,sweep,referee,export")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rows", type=Path, default=Path("rows.jsonl"))
    parser.add_argument("--keep", action="store_true", help="keep the folders of what went wrong")
    parser.add_argument("--shim", type=Path, help="strike.c, compiled")
    given = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="faults-"))
    if "strike.so" not in os.environ.get("LD_PRELOAD", ""):
        environment = {**os.environ, "LD_PRELOAD": str(given.shim or compiled(work)), "JAX_PLATFORMS": "cpu"}
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(work / "cache"), "TMPDIR": str(work)}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
        environment |= {"CHIPWISE_CACHE": str(work / "own"), "PYTHONPATH": os.pathsep.join(sys.path)}
        code = subprocess.call([sys.executable, *sys.argv], env=environment)
        if not given.keep:
            shutil.rmtree(work)
        raise SystemExit(code)
    import chipwise.cli

    commands = [f"chipwise.cli.{one.name}" for one in pkgutil.iter_modules(chipwise.cli.__path__)]
    for name in (*IMPORTED, *commands):  # once, for all processes
        importlib.import_module(name)

    campaign = Campaign(work / "roots", Path(os.environ["LD_PRELOAD"]), given.seed)
    campaign.prepare(given.scenes.split(","))
    index, parts = map(int, given.part.split("/"))
    rows = []
    for i, case in enumerate(cases(given.faults, given.scenes.split(","), given.kinds.split(","))):
        if i % parts == index:
            rows.append(campaign.fault(*case))
            with given.rows.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            if rows[-1]["wrong"]:
                print(json.dumps(rows[-1], indent=1), flush=True)
    print("\n".join(table(rows)))
    raise SystemExit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
