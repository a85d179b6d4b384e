"""Small input that would take much memory or time, or whose environment is odd."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import typer
from PIL import Image

from chipwise.cli import app
from fuzz.cases import JUNK, TEXTS, Case, mutated, png


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def zeros(nbytes: int) -> bytes:
    """So many zero bytes, compressed; memory holds a piece of them."""
    packer, left, out = zlib.compressobj(9), nbytes, []
    while left > 0:
        out.append(packer.compress(bytes(min(left, 1 << 22))))
        left -= 1 << 22
    return b"".join((*out, packer.flush()))


def wide_png(side: int, colour: int = 2) -> bytes:
    channels = {0: 1, 2: 3, 6: 4}[colour]
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, colour, 0, 0, 0))
    body = chunk(b"IDAT", zeros((side * channels + 1) * side))
    return b"\x89PNG\r\n\x1a\n" + header + body + chunk(b"IEND", b"")


def saved(side: int, kind: str, mode: str = "RGB", **options: object) -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (side, side)).save(stream, kind, **options)
    return stream.getvalue()


def folder_of(root: Path, name: str, files: list[tuple[str, bytes]]) -> Path:
    """A folder of one class beside a good picture."""
    folder = root / name
    for one in "ab":
        (folder / one).mkdir(parents=True)
        (folder / one / "good.png").write_bytes(png())
    for number, (ending, content) in enumerate(files):
        (folder / "a" / f"{number}.{ending}").write_bytes(content)
    return folder


def pictures(root: Path, draw: random.Random) -> Iterator[Case]:
    small = {
        "webp": "WEBP",
        "png": "PNG",
        "gif": "GIF",
        "tif": "TIFF",
        "bmp": "BMP",
        "jpg": "JPEG",
        "ppm": "PPM",
    }
    scans = saved(4000, "JPEG", progressive=True)
    last = scans[scans.rindex(b"\xff\xda") : -2]
    bombs = {
        "PNGs of 16 million pixels": [("png", wide_png(4000))] * 3,
        "PNGs of 36 million pixels": [("png", wide_png(6000))] * 6,
        "a transparent PNG": [("png", wide_png(4000, 6))],
        "a PNG of 400 million pixels": [("png", wide_png(20_000, 0))],
        "a WebP of 25 million pixels": [("webp", saved(5000, "WEBP", lossless=True, method=0))] * 2,
        "a WebP of 144 million pixels": [("webp", saved(12_000, "WEBP", quality=0, method=0))],
        "a JPEG 2000": [("jpg", saved(4000, "JPEG2000"))],
        "a JPEG of 5,000 scans": [("jpg", scans[:-2] + last * 5000 + scans[-2:])],
        "a progressive JPEG": [("jpg", saved(8000, "JPEG", progressive=True))] * 3,
    }
    for of, (about, files) in enumerate(bombs.items()):
        folder = folder_of(root, f"bomb-{of}", files)
        for number, options in enumerate((("--size", "8"), (), ("--store", "jpeg"))):
            yield Case(f"{about} {options}", ("pack", str(folder), f"{folder}-{number}", *options), True)
    for ending, kind in small.items():
        good = saved(16, kind)
        for number in range(24):
            data = bytearray(good)
            for _ in range(draw.randint(1, 6)):
                data[draw.randrange(min(len(data), draw.choice((30, 200, 10_000))))] = draw.randrange(256)
            folder = folder_of(root, f"{ending}-{number}", [(ending, bytes(data))])
            yield Case(
                f"mutated {kind} {number}", ("pack", str(folder), f"{folder}-out", "--size", "8"), True
            )


def archives(root: Path, draw: random.Random) -> Iterator[Case]:
    """Arrays to predict."""
    run = trained(root)
    for shape, about in (((1 << 24, 8, 8), "4 GB"), ((1 << 40, 8, 8), "70 TB"), ((3, 1 << 60), "no shape")):
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
        file = root / f"bomb-{about[0]}.npz"
        with (
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("x.npy", "w", force_zip64=True) as member,
        ):
            member.write(header.getvalue())
            for _ in range(1024 if about == "4 GB" else 1):
                member.write(bytes(1 << 22))
        yield Case(f"npz of {about}", ("predict", str(run), "--data", str(file), "--out", f"{file}.jsonl"))
    stream = io.BytesIO()
    np.savez_compressed(stream, x=np.zeros((4, 64), np.float32))
    good = stream.getvalue()
    for number in range(40):
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        (root / f"m{number}.npz").write_bytes(bytes(data))
        out = str(root / f"m{number}.jsonl")
        yield Case(
            f"npz {number}", ("predict", str(run), "--data", str(root / f"m{number}.npz"), "--out", out), True
        )


def trained(root: Path) -> Path:
    """A run of `digits` of one step, with a checkpoint."""
    from chipwise import cli

    run = root / "trained"
    with contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(["train", "digits", "--run", str(run), "--stop-after", "1st", "--quiet"])
    assert code == 0
    return run


def speaking(root: Path) -> Path:
    """A run of a small language model of one step."""
    from chipwise import cli

    (root / "book.txt").write_text("One morning it was two. " * 100)
    tokens, run = str(root / "book-tokens"), root / "speaking"
    settings = ["depth=1", "width=16", "heads=2", "context=64", "vocabulary=257", "batch=8", "replicas=2"]
    settings += ["duration=1st", "precision=f32"]
    given = [word for one in settings for word in ("--set", one)]
    with contextlib.redirect_stdout(io.StringIO()):
        assert not cli.main(["pack", str(root / "book.txt"), tokens, "--tokens", "65", "--split", "0.2"])
        assert not cli.main(["train", "gpt2-124m", "--data", tokens, "--run", str(run), "--quiet", *given])
    return run


def checkpoints(root: Path, draw: random.Random) -> Iterator[Case]:
    """Copies of a run in which one file of the checkpoint is wrong."""
    run = trained(root)
    files = sorted(p.relative_to(run) for p in (run / "checkpoints").rglob("*") if p.is_file())
    small = [file for file in files if (run / file).stat().st_size < 100_000]
    number = 0

    def copy(wrong: Path, make: Callable[[Path], object]) -> Path:
        nonlocal number
        number += 1
        there = root / f"run-{number}-checkpoint"
        for file in (p.relative_to(run) for p in run.rglob("*") if p.is_file()):
            (there / file).parent.mkdir(parents=True, exist_ok=True)
            if file == wrong:
                make(there / file)
            else:
                os.link(run / file, there / file)
        return there

    def sparse(path: Path) -> None:
        with open(path, "wb") as file:
            file.truncate(20 << 30)

    for file in files:
        for about, make in (
            ("a pipe", os.mkfifo),
            ("a link to a device", lambda path: path.symlink_to("/dev/zero")),
            ("20 GB of nothing", sparse),
            ("empty", lambda path: path.write_bytes(b"")),
            ("a folder", os.mkdir),
        ):
            yield Case(f"{file.name}: {about}", ("eval", str(copy(file, make))), True)
    for _ in range(90):
        file = draw.choice(small)
        data, text = bytearray((run / file).read_bytes()), None
        with contextlib.suppress(ValueError):
            text = json.dumps(mutated(draw, json.loads(bytes(data)))).encode()
        if text is None or draw.random() < 0.2:
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            text = bytes(data)
        bad = copy(file, lambda path, text=text: path.write_bytes(text))
        yield Case(f"{file.name} {text[:50]!r}", (draw.choice(("eval", "report")), str(bad)), True)


class Code:
    """A pickle that would run a command in the current folder, which must stay empty."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def disguised(root: Path, draw: random.Random) -> Iterator[Case]:
    """Files whose content, or whose name, would choose a reader that executes or opens something else."""
    code = pickle.dumps(Code(), 2)
    stream = io.BytesIO()
    np.save(stream, np.array([Code()], object), allow_pickle=True)
    contents = {
        "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(ran) (w) file closefile\nshowpage\n",
        "PDF": b"%PDF-1.4\n1 0 obj <</OpenAction <</S/Launch/F(touch ran)>>>> endobj\n",
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "FITS": b"SIMPLE  =                    T".ljust(2880),
        "PSD": b"8BPS\0\1" + bytes(100),
        "XBM": b"#define x_width 8\n#define x_height 8\nstatic char x_bits[] = {\n0 };\n",
        "a pickle": code,
        "an array of objects": stream.getvalue(),
        "a script": b"#!/bin/sh\ntouch ran\n",
        "a GIF": saved(16, "GIF"),
    }
    for number, (about, content) in enumerate(contents.items()):
        for ending in ("jpg", "png", "webp", "csv", "jsonl", "parquet", "tar", "npz", "pth", "safetensors"):
            folder = root / f"disguised-{number}-{ending}"
            folder.mkdir()
            file = folder / f"x.{ending}"
            file.write_bytes(content)
            yield Case(f"{about} as .{ending}", ("pack", str(folder), f"{folder}-out", "--size", "8"), True)
            if ending in ("csv", "jsonl", "parquet", "tar", "npz"):
                yield Case(f"{about} alone as .{ending}", ("pack", str(file), f"{folder}-alone"))


def planted(root: Path, draw: random.Random) -> Iterator[Case]:
    """Runs of which one file is a link, a pipe, a device or a folder."""
    run = trained(root)
    outside = root / "outside"
    outside.mkdir()
    (outside / "file").write_text("{}\n")
    kinds = {
        "a pipe": os.mkfifo,
        "a link to a device": lambda path: path.symlink_to("/dev/zero"),
        "a link to a file": lambda path: path.symlink_to(outside / "file"),
        "a link to itself": lambda path: path.symlink_to(path),
        "a folder": os.mkdir,
    }
    for name in ("lock", "recipe.json", "metrics.jsonl", "processes.jsonl", "ledger.jsonl", "checkpoints"):
        for number, (about, make) in enumerate(kinds.items()):
            there = root / f"planted-{name}-{number}"
            shutil.copytree(run, there, ignore=lambda at, names, name=name: {name} & {*names})
            make(there / name)
            goes_on = ("train", "digits", "--run", str(there), "--stop-after", "1st", "--quiet")
            for command in (("report", str(there)), ("eval", str(there)), ("audit", str(there)), goes_on):
                yield Case(f"{name} is {about}: {command[0]}", command, True)


def parquet(root: Path, draw: random.Random) -> Iterator[Case]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def written(name: str, table: pa.Table) -> Path:
        pq.write_table(table, root / name, compression="zstd", use_dictionary=True)
        return root / name

    def repeated(size: int, rows: int) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(
            pa.array([0] * rows, pa.int32()), pa.array([b"x" * size], pa.binary())
        )

    label = pa.array([0, 1] * 600)
    bomb = written("bomb.parquet", pa.table({"image": repeated(10 << 20, 1200), "label": label}))
    strings = pa.DictionaryArray.from_arrays(pa.array([0] * 1200, pa.int32()), pa.array(["x" * (10 << 20)]))
    text = written("text.parquet", pa.table({"text": strings}))
    for name, file in (("image", bomb), ("text", text)):
        yield Case(f"parquet {name}", ("pack", str(file), f"{file}-out"))
        yield Case(f"parquet {name} as text", ("pack", str(file), f"{file}-text", "--tokens", "8"))
    good = written("good.parquet", pa.table({"image": [png()] * 8, "label": [0, 1] * 4})).read_bytes()
    for number in range(40):
        data = bytearray(good)
        for _ in range(draw.randint(1, 5)):
            place = draw.choice([draw.randrange(len(data)), len(data) - 1 - draw.randrange(600)])
            data[place] = draw.randrange(256)
        file = root / f"p{number}.parquet"
        file.write_bytes(bytes(data))
        yield Case(f"parquet {number}", ("pack", str(file), f"{file}-out", "--size", "8"), True)


def texts(root: Path, draw: random.Random) -> Iterator[Case]:
    for ending in ("jsonl", "csv", "parquet", "tar", "json", "npy", "npz", "tfrecord", "tar.gz"):
        file = root / f"endless.{ending}"
        with open(file, "wb") as stream:
            stream.truncate(8 << 30)
        yield Case(f"8 GB of NULs .{ending}", ("pack", str(file), f"{file}-out"))
        if ending in ("jsonl", "csv", "parquet", "tar", "tar.gz"):  # others are texts of that size
            yield Case(f"text .{ending}", ("pack", str(file), f"{file}-text", "--tokens", "8"))
    line = root / "line.jsonl"
    line.write_bytes(b'{"text": "' + b"x" * (150 << 20))
    yield Case("a line of 150 MB", ("pack", str(line), f"{line}-out"))
    many = root / "many.csv"
    names = "|".join(f"{i:x}" for i in range(2000))
    with open(many, "w") as stream:
        stream.write("file,label\n")
        stream.writelines(f"{i}.jpg,{i:x}|{2 * i:x}\n" for i in range(120_000))
    yield Case("120,000 rows of 240,000 classes", ("pack", str(many), f"{many}-out"))
    columns = root / "columns.csv"
    columns.write_text(
        "file," + ",".join(f"c{i}" for i in range(20_000)) + "\n" + ("a.jpg" + ",1" * 20_000 + "\n") * 900
    )
    yield Case("18 million cells", ("pack", str(columns), f"{columns}-out"))
    (root / "ids.csv").write_text("file,label\n" + "".join(f"{i}.jpg,{names}\n" for i in range(3000)))
    yield Case("long lists of classes", ("pack", str(root / "ids.csv"), str(root / "ids-out")))
    for number, bad in enumerate([*TEXTS, '{"text": 3}', '{"text": "\\ud800"}', '{"x": 1}']):
        for ending in ("jsonl", "csv", "txt"):
            file = root / f"text-{number}.{ending}"
            file.write_bytes(bad.encode() + b"\n")
            yield Case(f"{ending} {bad[:40]!r}", ("pack", str(file), f"{file}-out", "--tokens", "4"), True)
    good = root / "good.txt"
    good.write_text("one two three " * 100)
    for tokens in ("99999999999", "0", "-1", "1", "9" * 400, "1e9", "x"):
        yield Case(
            f"--tokens {tokens[:20]}", ("pack", str(good), str(root / "tokens-out"), "--tokens", tokens)
        )


WORDS = {"<eos>": 0, "x": 1, "one": 2, "two": 3, "three": 4}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "x"},
}


def tokenizers(root: Path, draw: random.Random) -> Iterator[Case]:
    text = root / "words.txt"
    text.write_text("one two three " * 40 + "x" * 2000 + "!\n")

    def pack(name: str, content: bytes | str) -> tuple[str, ...]:
        file = root / f"tokenizer-{name}.json"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return ("pack", str(text), f"{file}-out", "--tokens", "4", "--tokenizer", str(file))

    yield Case("a good tokenizer", pack("good", json.dumps(TOKENIZER)), True)
    for number, pattern in enumerate(
        (
            "(x+x+)+y",
            "(x|xx)+y",
            "(.*)*=",
            "x*" * 20 + "y",
            "(?=(x+)+y)",
            "((((x*)*)*)*)*y",
            "[",
            "(?<n>",
            "\\\\",
        )
    ):
        for part in ("pre_tokenizer", "normalizer"):
            split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            replace = {"type": "Replace", "pattern": {"Regex": pattern}, "content": "a"}
            wrong = {**TOKENIZER, part: split if part == "pre_tokenizer" else replace}
            yield Case(f"{part} {pattern[:20]}", pack(f"{part}-{number}", json.dumps(wrong)), True)
    for number, bad in enumerate(TEXTS):
        yield Case(f"tokenizer {bad[:30]!r}", pack(f"text-{number}", bad))
    for number in range(60):
        yield Case(f"tokenizer {number}", pack(f"m{number}", json.dumps(mutated(draw, TOKENIZER))), True)
    with open(root / "tokenizer-big.json", "wb") as stream:
        stream.truncate(8 << 30)
    yield Case(
        "a tokenizer of 8 GB",
        ("pack", str(text), str(root / "big-out"), "--tokenizer", str(root / "tokenizer-big.json")),
    )


def trees(root: Path, draw: random.Random) -> Iterator[Case]:
    fan = root / "fan"
    for level in range(12):
        (fan / f"level{level}").mkdir(parents=True)
    for level in range(11):
        for way in range(10):
            (fan / f"level{level}" / f"way{way}").symlink_to(fan / f"level{level + 1}")
    (fan / "level11" / "x.png").write_bytes(png())
    deep = root / "deep"
    deep.mkdir()
    here = os.getcwd()
    os.chdir(deep)
    try:
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        Path("x.png").write_bytes(png())
        Path("x.txt").write_bytes(b"text")
    finally:
        os.chdir(here)
    for about, folder in (("fan", fan / "level0"), ("deep", deep)):
        yield Case(about, ("pack", str(folder), f"{root}/{about}-out", "--size", "8"))
        yield Case(f"{about} as text", ("pack", str(folder), f"{root}/{about}-text", "--tokens", "4"))
        for command in ("report", "eval", "compare"):
            yield Case(f"{command} {about}", (command, str(folder)))
        yield Case(
            f"run in {about}",
            ("train", "digits", "--data", str(folder), "--run", f"{root}/never2", "--quiet"),
        )
    # Deeper than Python's own removal can go, which pytest uses for what tests leave
    subprocess.run(["rm", "-rf", deep], check=True)


class Slow(http.server.BaseHTTPRequestHandler):
    """Answers that drip or never end, by the first part of the path."""

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        kind, wait = self.path.split("/")[1], threading.Event().wait
        with contextlib.suppress(OSError):
            if kind == "header":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
                while not wait(1):
                    self.wfile.write(b"x")
            if kind == "silent":
                wait(300)
            if kind == "loop":
                self.send_response(302)
                self.send_header("Location", self.path + "x")
                return self.end_headers()
            self.send_response(200)
            page = kind in ("listing", "endless-listing", "deep")
            self.send_header("Content-Type", "text/html" if page else "application/octet-stream")
            if kind == "body":
                self.send_header("Content-Length", "1000000")
            self.end_headers()
            if self.command == "HEAD":
                return None
            number = 0
            while kind != "deep":
                number += 1
                self.wfile.write(
                    b"x" if kind in ("body", "listing") else b'<a href="%d.jpg">x</a>' % number * 100
                )
                if kind in ("body", "listing", "manifest"):
                    wait(1)
            self.wfile.write(b'<a href="deeper/">x</a>')


def servers(root: Path, draw: random.Random) -> Iterator[Case]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for kind in (
            "header",
            "body",
            "silent",
            "loop",
            "listing",
            "endless-listing",
            "deep",
            "manifest",
            "endless",
        ):
            for end in ("x.tar", "folder/", "folder"):
                url = f"http://127.0.0.1:{server.server_port}/{kind}/{end}"
                yield Case(f"server {kind} {end}", ("pack", url, f"{root}/url-out"))
        server.shutdown()


def schemes(root: Path, draw: random.Random) -> Iterator[Case]:
    for scheme in (
        "jupyter", "jlab", "dbfs", "hdfs", "webhdfs", "smb", "sftp", "ssh", "ftp", "git", "github", "gs",
        "gcs", "s3", "s3a", "abfs", "az", "adl", "oci", "oss", "dropbox", "gdrive", "wandb", "box", "dask",
        "arrow_hdfs", "root", "webdav", "dav", "async_wrapper", "blockcache", "cached", "dir", "generic",
        "libarchive", "lakefs", "pyscript", "reference", "tosfs", "asynclocal", "dvc", "hf", "x", "",
    ):  # fmt: skip
        for rest in ("127.0.0.1:1/a", "a", ""):
            yield Case(f"{scheme}://{rest}", ("pack", f"{scheme}://{rest}", f"{root}/scheme-out"))


def options(root: Path, draw: random.Random) -> Iterator[Case]:
    long, deep = "n" * 300, "/".join(["n" * 100] * 50)
    run = str(trained(root))
    text = root / "good.txt"
    text.write_text("one two three " * 100)
    for name in (long, deep, "a\x00b", "/dev/full", "/proc/x", "/dev/null/x", str(root), "\n", "", " "):
        for command in (
            ("report", run, "--html", name),
            ("predict", run, "--out", name),
            ("export", run, "--to", "safetensors", "--out", name),
            ("launch", "digits", "--on", "t4", "--to", "colab", "--out", name),
            ("sweep", "digits", "--run", name, "--seeds", "1", "--set", "duration=1st", "--quiet"),
            ("train", "digits", "--run", name, "--stop-after", "1st", "--quiet"),
            ("pack", str(text), name),
        ):
            yield Case(f"{command[0]} {name[:20]!r}", command, True)


def values(root: Path, draw: random.Random) -> Iterator[Case]:
    """Every option and argument of every command that takes a value, with values of all kinds."""
    run, out = str(trained(root)), str(root / "values-out")
    text = root / "few.txt"
    text.write_text("one two three " * 100)
    few = ("--run", out, "--set", "duration=1st", "--quiet")
    commands: dict[str, tuple[str, ...]] = {
        "train": ("digits", *few, "--fresh"),
        "sweep": ("digits", *few, "--seeds", "1"),
        "referee": ("digits", *few[2:4], "--set", "lr=0.1", "--run", f"{out}-tries", "--spend", "1s"),
        "find-lr": ("digits", "--steps", "3"),
        "bench": ("digits", "--steps", "1", "--warmup", "1", "--out", f"{out}.json"),
        "plan": ("digits", "--on", "t4"),
        "launch": ("digits", "--on", "t4", "--to", "slurm", "--out", f"{out}-launch"),
        "transfer": ("digits", "--batch", "128"),
        "check": ("digits",),
        "predict": (run, "--out", f"{out}.csv", "--fresh"),
        "export": (run, "--to", "safetensors", "--out", f"{out}.safetensors", "--fresh"),
        "pack": (str(text), f"{out}-pack"),
        "compare": (run, run),
        **dict.fromkeys(("eval", "report", "audit"), (run,)),
        "generate": (str(speaking(root)), "--tokens", "4"),
        "track": (run, "--to", "none:x"),
        **dict.fromkeys(("devices", "chips", "skill"), ()),
    }
    known = typer.main.get_command(app()).commands
    assert known.keys() == commands.keys()
    for name, words in commands.items():
        for one in known[name].params:
            option = one.opts[0] if one.opts[0].startswith("-") else None
            if option in ("--run", "--out", "--html", "--help") or getattr(one, "is_flag", False):
                continue
            if option in ("--hosts", "--host", "--coordinator"):  # read once in a process
                continue
            for junk in draw.sample(JUNK, 8):
                given = (*words, f"{option}={junk}") if option else (junk, *words[1:])
                yield Case(f"{name} {option or one.name} {junk[:30]!r}", (name, *given), True)


def environments(root: Path, draw: random.Random) -> Iterator[Case]:
    train = (
        "train",
        "digits",
        "--run",
        str(root / "environment"),
        "--stop-after",
        "1st",
        "--quiet",
        "--fresh",
    )
    plan, run = ("plan", "digits", "--on", "t4"), str(trained(root))
    values = ("", "x", "-1", "999999", "1e9", "0x10", "\n", "é", "9" * 400)
    for name in (
        "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri",
        "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS", "JAX_PLATFORMS", "JAX_ENABLE_X64",
        "JAX_DEFAULT_MATMUL_PRECISION", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "NPROC", "COLUMNS",
        "CHIPWISE_CACHE_BYTES", "TPU_WORKER_HOSTNAMES", "LANG", "TMPDIR",
        "XLA_PYTHON_CLIENT_MEM_FRACTION", "CUDA_VISIBLE_DEVICES",
    ):  # fmt: skip
        for value in draw.sample(values, 3):
            command = draw.choice((train, ("devices",), ("chips",), ("check", "digits")))
            yield Case(f"{name}={value[:20]!r} {command[0]}", command, True, {name: value})
    for name in ("HOME", "CHIPWISE_CACHE", "XDG_CACHE_HOME", "TMPDIR"):
        for value in ("/nonexistent/x", "/proc/self/x", "/dev/null", "", "relative", "n" * 300):
            for command in (train, plan, ("report", run)):
                yield Case(f"{name}={value[:20]!r} {command[0]}", command, True, {name: value})
    for command in (train, plan, ("report", run), ("chips",), ("devices",)):
        for limit in ("1000000000", "2000000000"):
            yield Case(f"{limit} bytes of addresses: {command[0]}", command, True, {"LIMIT_ADDRESSES": limit})


PARTS = {
    disguised: 150, planted: 120, pictures: 190, archives: 43, checkpoints: 140, parquet: 44, texts: 70,
    tokenizers: 92, trees: 12, servers: 27, schemes: 130, options: 70, environments: 150,
    values: 900,
}  # fmt: skip
"""As those of `cases`."""
