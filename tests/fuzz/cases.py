"""Bad input for every command that reads what others wrote: seeded, so that a failure can be made again.

Each function writes the files of its cases under a folder, and names the commands that read them.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import struct
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from chipwise.data.manifest import render

DEEP = "[" * 100_000
BENCH = ("bench", "--steps", "1", "--warmup", "1", "--devices", "1")
JUNK = [
    "",
    " ",
    "0",
    "-1",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "1e-999",
    "9" * 400,
    "-" * 50_000,
    "+" * 50_000,
    "[" * 5_000,
    "(" * 5_000,
    "{}",
    "[]",
    "None",
    "True",
    "'",
    '"',
    "\\",
    "\x00",
    "a\x00b",
    "\n",
    "\x1b[2J",
    "é" * 200,
    "🙂",
    "1_0",
    "0x10",
    "1e12",
    "1+1j",
    "__import__('os')",
    "x" * 250,
    "1,2",
    "=",
    "==",
    "%s",
    "{0}",
    "[bold]x[/bold]",
    "1e400ep",
    "0ep",
    "-1ep",
    "1e18ex",
    "9" * 18 + "st",
    "1e-18ep",
    "1.5st",
    "101%",
]
SETTINGS = (
    "batch",
    "replicas",
    "duration",
    "lr",
    "seed",
    "precision",
    "ema",
    "momentum",
    "nesterov",
    "frozen",
)


@dataclass(frozen=True)
class Case:
    """A command line; `about` names what is wrong with its input."""

    about: str
    arguments: tuple[str, ...]
    may_succeed: bool = False  # some mutations do no harm
    environment: Mapping[str, str] = field(default_factory=dict)  # then in a process of its own


def settings(root: Path, draw: random.Random) -> Iterator[Case]:
    for text in JUNK:
        name = draw.choice(SETTINGS)
        yield Case(f"{name}={text[:40]!r}", ("check", "digits", "--set", f"{name}={text}"), True)
        yield Case(f"--set {text[:40]!r}", ("check", "digits", "--set", text))
    for option in ("--eval-every", "--log-every", "--checkpoint-every", "--stop-after"):
        for text in ("", "1e400ep", "-1ep", "9" * 400, "ep", "1 000st", "\x00", "often", "-" * 50_000):
            run = str(root / "never")
            yield Case(f"{option} {text[:40]!r}", ("train", "digits", "--run", run, option, text, "--quiet"))
    for text in JUNK:
        yield Case(f"--on {text[:40]!r}", ("plan", "digits", "--on", text))


RECIPES = {
    "exits": "import sys\nsys.exit(0)",
    "exits with text": "import sys\nsys.exit('no')",
    "raises": "1 / 0",
    "raises a base exception": "class Odd(BaseException): pass\nraise Odd('x')",
    "recurses": "def f(): return f()\nrecipe = f()",
    "is no Python": "def (:",
    "has a NUL": "x = 1\x00",
    "nests": "x = " + "(" * 300 + ")" * 300,
    "has no recipe": "x = 1",
    "recipe is a number": "recipe = 3",
    "returns None": "def recipe(): return None",
    "needs an argument": "def recipe(a): return a",
    "long message": "raise ValueError('y' * 100_000)",
    "message of many lines": "raise ValueError('y\\n' * 1000)",
    "imports what is not there": "import chipwise_no_such_module",
    "its function exits": "import sys\ndef recipe(): sys.exit(3)",
}


def recipe_files(root: Path, draw: random.Random) -> Iterator[Case]:
    folder = root / "recipes"
    folder.mkdir()
    for number, (about, text) in enumerate(RECIPES.items()):
        file = folder / f"r{number}.py"
        file.write_bytes(text.encode())
        yield Case(f"recipe file {about}", ("check", f"{file}:recipe"))
    (folder / "binary.py").write_bytes(bytes(draw.randrange(256) for _ in range(500)))
    (folder / "folder.py").mkdir()
    for spec in (
        f"{folder}/binary.py:recipe",
        f"{folder}/folder.py:recipe",
        f"{folder}/none.py:recipe",
        "x" * 250,
        f"{folder}/{'n' * 250}.py:r",
        f"{folder}/r0.py:",
        f"{folder}/r9.py:a.b.c",
        f"{folder}/r9.py:__import__",
        "digits:x",
        ":",
        "a\x00b.py:r",
        "",
        "../../etc/passwd",
        "digits.py",
    ):
        yield Case(f"recipe {spec[-40:]!r}", ("check", spec))


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx(root: Path, draw: random.Random) -> Iterator[Case]:
    """MNIST's four files, of which one is wrong."""
    images, labels = (
        idx_bytes(np.zeros((40, 28, 28), np.uint8)),
        idx_bytes(np.arange(40, dtype=np.uint8) % 10),
    )
    wide = struct.pack(">HBBI", 0, 0x0C, 1, 40) + np.full(40, 2**31 - 1, ">i4").tobytes()
    bomb = gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 2**31, 28, 28) + bytes(64 << 20))
    wrong = {
        "no dimensions": b"\0\0\x08\0",
        "255 dimensions": b"\0\0\x08\xff" + b"\0\0\0\1" * 255 + b"\0",
        "70 dimensions of 0": b"\0\0\x08\x46" + b"\0\0\0\0" * 70,
        "empty": b"",
        "labels of 2**31": wide,
        "promises 2**60": struct.pack(">HBB3I", 0, 8, 3, 2**31 - 1, 2**31 - 1, 4),
        "bomb": bomb,
        "float64": struct.pack(">HBBI", 0, 0x0E, 1, 40) + bytes(320),
        "negative": struct.pack(">HBBI", 0, 9, 1, 40) + b"\xff" * 40,
        "a flat image file": idx_bytes(np.zeros(40, np.uint8)),
        "two-dimensional labels": idx_bytes(np.zeros((40, 2), np.uint8)),
    }
    for _ in range(25):
        data = bytearray(images)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(20)] = draw.randrange(256)
        wrong[f"mutated {draw.random():.6f}"] = bytes(data)
    for number, (about, bad) in enumerate(wrong.items()):
        for part in ("images-idx3", "labels-idx1"):
            folder = root / f"idx-{number}-{part}"
            folder.mkdir()
            for split in ("train", "t10k"):
                (folder / f"{split}-images-idx3-ubyte").write_bytes(images)
                (folder / f"{split}-labels-idx1-ubyte").write_bytes(labels)
            (folder / f"train-{part}-ubyte").write_bytes(bad)
            yield Case(
                f"idx {about} as {part}",
                (*BENCH, "mnist", "--data", str(folder)),
                True,
            )


def batch_pickle(shape: object = (4, 3072), protocol: int = 2) -> bytes:
    return pickle.dumps({"data": np.zeros((4, 3072), np.uint8), "labels": [0, 1, 2, 3]}, protocol)


def cifar(root: Path, draw: random.Random) -> Iterator[Case]:
    good = batch_pickle()
    wrong = {
        "of many steps": b"\x80\x02]" + b"(]e" * 1_500_000 + b".",
        "of repeated REDUCEs": b"\x80\x02" + b"cnumpy\ndtype\n(U\x02u1tR0" * 300_000 + b".",
        "a shape of 400,000 numbers": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n"
        + b"(cnumpy\nndarray\nK\x00\x85U\x01btR(K\x01("
        + b"K\x01" * 400_000
        + b"tcnumpy\ndtype\n(U\x02u1K\x00K\x01tRU\x01|\x89U\x01atb.",
        "of code": b"cos\nsystem\n(S'true'\ntR.",
        "a list": pickle.dumps([1]),
        "of other keys": pickle.dumps({"a": 1}, 2),
        "empty": b"",
        "nested lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        "tuples that share": b"\x80\x02K\x01" + b"2\x86" * 200 + b".",
    }
    for _ in range(35):
        data = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            data[draw.choice([draw.randrange(len(data)), draw.randrange(160)])] = draw.randrange(256)
        wrong[f"mutated {draw.random():.6f}"] = bytes(data)
    for number, (about, bad) in enumerate(wrong.items()):
        folder = root / f"cifar-{number}" / "cifar-10-batches-py"
        folder.mkdir(parents=True)
        for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
            (folder / name).write_bytes(bad if name == "data_batch_1" else good)
        yield Case(
            f"pickle {about}",
            (*BENCH, "cifar10-davidnet", "--data", str(folder.parent)),
            True,
        )


def tar_bytes(members: dict[str, bytes], **info: object) -> bytearray:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for key, value in info.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(content))
    return bytearray(stream.getvalue())


def header(name: bytes, size: int, kind: bytes) -> bytes:
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108], block[108:116], block[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    block[124:136], block[136:148] = b"%011o\0" % size, b"00000000000\0"
    block[156:157], block[257:265] = kind, b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def png() -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def tars(root: Path, draw: random.Random) -> Iterator[Case]:
    picture = png()
    good = tar_bytes({f"{c}/{i}.png": picture for c in "ab" for i in range(3)})
    pax = b"%d comment=%s\n"
    wrong: dict[str, bytes] = {
        "empty": b"",
        "a header that says 2**33 bytes": header(b"x", 8**11 - 1, b"x") + bytes(1024),
        "a long name of 2**33 bytes": header(b"x", 8**11 - 1, b"L") + bytes(1024),
        "chained headers": header(b"x", 0, b"x") * 5_000,
        "chained long names": header(b"x", 0, b"L") * 5_000,
        "chained global headers": header(b"x", 0, b"g") * 5_000,
        "outside": bytes(tar_bytes({"../../a/1.png": picture})),
        "absolute": bytes(tar_bytes({"/a/1.png": picture})),
        "links": bytes(tar_bytes({"a/1.png": b""}, type=tarfile.SYMTYPE, linkname="/etc/passwd")),
        "long names": bytes(tar_bytes({f"{'n' * 250}/{'m' * 250}.png": picture})),
        "twice": bytes(tar_bytes({"a/1.png": picture})[: -10240 + 0] + tar_bytes({"a/1.png": picture})),
        "no pictures": bytes(tar_bytes({"a/1.txt": b"x"})),
        "damaged pictures": bytes(tar_bytes({"a/1.png": b"x" * 50, "b/2.png": b""})),
        "a pax header of 200 MB": header(b"x", 200 << 20, b"x") + pax % (200 << 20, b"y") + bytes(1 << 20),
        "a bomb": gzip.compress(header(b"a/1.png", 600 << 20, b"0") + bytes(600 << 20), 9),
    }
    for _ in range(30):
        data = bytearray(good)
        for _ in range(draw.randint(1, 5)):
            data[draw.randrange(min(len(data), 3000))] = draw.randrange(256)
        wrong[f"mutated {draw.random():.6f}"] = bytes(data)
    for number, (about, bad) in enumerate(wrong.items()):
        file = root / (f"t{number}.tar.gz" if about == "a bomb" else f"t{number}.tar")
        file.write_bytes(bad)
        yield Case(f"tar {about}", ("pack", str(file), str(root / f"t{number}-packed"), "--size", "8"), True)


def tables(root: Path, draw: random.Random) -> Iterator[Case]:
    wrong = {
        "empty": b"",
        "only a header": b"file,label\n",
        "NULs": b"file,label\na\0,1\n",
        "a field of 2 MB": b"file,label\n" + b"x" * (2 << 20) + b",1\n",
        "an open quote": b'file,label\n"a,1\n' * 1000,
        "not UTF-8": b"file,label\n\xff\xfe,1\n",
        "no label": b"file\na.png\n",
        "missing files": b"file,label\nnone.png,1\n",
        "a name of 250": b"file,label\n" + b"n" * 250 + b".png,1\n",
        "paths outside": b"file,label\n../../etc/passwd,1\n",
        "two-dimensional": b'file,label\na.png,"1,2"\n',
        "binary": bytes(draw.randrange(256) for _ in range(2000)),
        "many columns": b"file,label" + b",x" * 50_000 + b"\n",
    }
    for number, (about, bad) in enumerate(wrong.items()):
        file = root / f"c{number}.csv"
        file.write_bytes(bad)
        yield Case(f"csv {about}", ("pack", str(file), str(root / f"c{number}-packed"), "--size", "8"))
        yield Case(f"prices {about}", ("plan", "digits", "--on", "t4", "--prices", str(file)))


VALUES = [
    None,
    True,
    -1,
    0,
    1e308,
    10**400,
    "x",
    "",
    [],
    {},
    [[]],
    {"a": {}},
    "\x00",
    "n" * 250,
    -(2**63),
    0.5,
]


def mutated(draw: random.Random, value: object) -> object:
    """A JSON value with one place changed."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        if draw.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutated(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        return [*value[:place], mutated(draw, value[place]), *value[place + 1 :]]
    return draw.choice(VALUES)


TEXTS = [
    "",
    DEEP,
    "{" * 50_000,
    '{"a":' * 50_000,
    "null",
    "[]",
    "3",
    '"x"',
    "\x00",
    '{"a": Infinity}',
    '{"a": NaN}',
    "9" * 5000,
]


def manifests(root: Path, draw: random.Random) -> Iterator[Case]:
    from chipwise.data.pack.packing import Packing

    source = root / "photos"
    for name in "ab":
        (source / name).mkdir(parents=True)
        for i in range(3):
            (source / name / f"{i}.png").write_bytes(png())
    packed = root / "packed"
    job = Packing(str(source), str(packed), size=8, workers=1)
    job.run()
    (file,) = packed.rglob("manifest.json")
    good, text = json.loads(file.read_text()), file.read_text()
    wrong = list(TEXTS) + [text.replace("1", "Infinity", 1), text[:-40]]
    wrong += [
        render(changed) if isinstance(changed := mutated(draw, good), dict) else "[]" for _ in range(45)
    ]
    for number, bad in enumerate(wrong):
        folder = root / f"packed-{number}"
        folder.mkdir()
        for other in file.parent.iterdir():
            if other != file:
                os.link(other, folder / other.name)
        (folder / "manifest.json").write_text(bad)
        yield Case(f"manifest {bad[:60]!r}", ("pack", str(folder), "--verify"), True)


def runs(root: Path, draw: random.Random) -> Iterator[Case]:
    """Run folders of which one file is wrong."""
    recipe = {
        "name": "digits",
        "batch": 64,
        "replicas": 8,
        "duration": "1ep",
        "seed": 0,
        "source": {"recipe": "digits", "set": [], "data": None, "synthetic": False},
    }
    row = {"step": 1, "train/loss": 1.0, "seconds": 1.0}
    result = {"metrics": {"eval/accuracy": 0.5}, "fingerprint": "a", "seconds": {"train": 1.0}}
    whole = {
        "recipe.json": json.dumps(recipe),
        "metrics.jsonl": json.dumps(row) + "\n",
        "result.json": json.dumps(result),
    }
    wrong: list[tuple[str, str]] = [(name, text) for name in whole for text in TEXTS]
    for name, value in (("recipe.json", recipe), ("metrics.jsonl", row), ("result.json", result)):
        wrong += [(name, json.dumps(mutated(draw, value)) + "\n") for _ in range(12)]
    for source in (
        "x",
        3,
        {"recipe": 3},
        {"recipe": "digits", "set": "abc", "data": 3},
        {"recipe": "/etc/passwd", "set": []},
        {"recipe": "digits", "set": [3], "data": None},
        {"recipe": "digits\x00", "set": [], "data": None},
    ):
        wrong.append(("recipe.json", json.dumps({**recipe, "source": source})))
    for number, (name, bad) in enumerate(wrong):
        folder = root / f"run-{number}"
        folder.mkdir()
        for file, text in {**whole, name: bad}.items():
            (folder / file).write_text(text)
        command = draw.choice([("report",), ("compare",), ("eval",)])
        yield Case(f"run {name} {bad[:60]!r}", (*command, str(folder)), True)


def documents(root: Path, draw: random.Random) -> Iterator[Case]:
    for number, bad in enumerate([*TEXTS, '{"schema": "chipwise.bench/1"}', '{"schema": 3}']):
        file = root / f"d{number}.json"
        file.write_text(bad)
        yield Case(f"record {bad[:60]!r}", ("compare", str(file), str(file)))


def addresses(root: Path, draw: random.Random) -> Iterator[Case]:
    for url in (
        "http://[::1",
        "http://]",
        "http://",
        "ftp://127.0.0.1:1/x",
        "gopher://x/y",
        "http://127.0.0.1:1/x.tar",
        "https://127.0.0.1:99999/x",
        "http://a b/c",
        "http://\x00/x",
        "file://",
        "file:///etc",
        "s3://",
        "javascript:1",
        "http://127.0.0.1:1/" + "a" * 5000,
        "://x",
        "http:/127.0.0.1/x",
        "memory://x",
        "local:///etc/passwd",
        "simplecache::http://127.0.0.1:1/x",
        "zip://*::http://127.0.0.1:1/x",
        "http://user:secret@127.0.0.1:1/x",
    ):
        yield Case(f"url {url[:60]!r}", ("pack", url))


def pipes(root: Path, draw: random.Random) -> Iterator[Case]:
    """What never ends when it is opened."""
    pipe = root / "pipe"
    os.mkfifo(pipe)
    folder = root / "with-pipe"
    (folder / "a").mkdir(parents=True)
    os.mkfifo(folder / "a" / "1.png")
    mnist = root / "mnist-pipe"
    mnist.mkdir()
    for split in ("train", "t10k"):
        for part in ("images-idx3", "labels-idx1"):
            os.mkfifo(mnist / f"{split}-{part}-ubyte")
    run = root / "run-pipe"
    run.mkdir()
    os.mkfifo(run / "recipe.json")
    (root / "pipe.csv").symlink_to(pipe)
    (root / "pipe.tar").symlink_to(pipe)
    for arguments in (
        ("pack", str(pipe)),
        ("pack", str(root / "pipe.tar"), str(root / "p1")),
        ("pack", str(folder), str(root / "p2")),
        ("pack", str(root / "pipe.csv"), str(root / "p3")),
        (*BENCH, "mnist", "--data", str(mnist)),
        ("report", str(run)),
        ("eval", str(run)),
        ("compare", str(pipe), str(pipe)),
        ("check", f"{pipe}.py:recipe"),
        ("plan", "digits", "--on", "t4", "--prices", str(pipe)),
    ):
        yield Case(f"pipe {' '.join(arguments)[:60]}", arguments)


PARTS = {
    settings: 170, recipe_files: 30, idx: 70, cifar: 44, tars: 45, tables: 26, manifests: 59, runs: 79,
    documents: 14, addresses: 20, pipes: 10,
}  # fmt: skip
"""How many cases each has at least."""
