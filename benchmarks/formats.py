"""Compares formats for packed examples: records a second at random, in batches, from disk, writing, and size.

    pip install array-record bagz webdataset
    python benchmarks/formats.py FOLDER [WORK]

FOLDER has images in folders (for `formats.md`: CIFAR-10's 50,000 training images as JPEGs). They are stored
as they are and as pixels, in each format whose library is installed; only chipwise stores labels. WORK, which
needs 2 GB, is on the disk to be measured. One core is used. "Disk": all records once in random batches, after
the page cache was dropped for the files (names and folders stay cached). Times are for bytes in memory,
without decoding.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from chipwise.data import PackedFolder
from chipwise.data.images import decode
from chipwise.data.pack import Writer
from chipwise.data.sources import empty

RUNS, BATCH, SINGLE = 3, 512, 10_000


class Chipwise:
    name = "this format"

    def write(self, root: Path, records: list[bytes], shape, pixels) -> None:
        store = "raw" if shape else "jpeg"
        writer = Writer(
            root / "train",
            store=store,
            names=["one"],
            below={"label": 1},
            identity=hashlib.sha256(store.encode()).hexdigest(),
            name_bytes=6,
        )
        for start in range(0, len(records), BATCH):
            rows = slice(start, start + BATCH)
            names = [str(number) for number in range(len(records))[rows]]
            columns = {"image": pixels[rows] if shape else records[rows], "label": [0] * len(names)}
            writer.add(names, columns, None if shape else pixels[rows])
        writer.finish({"fingerprint": "", "examples": len(records)})

    def open(self, root: Path, shape) -> None:
        self.source, self.shape = PackedFolder(root), shape
        self.room = empty(self.source.spec, BATCH)

    def one(self, index: int):
        return self.source[index] if self.shape else self.source.encoded(index)

    def batch(self, indices: np.ndarray) -> None:
        if self.shape:
            self.source.fill(indices, {name: column[: len(indices)] for name, column in self.room.items()})
        else:
            for index in indices.tolist():
                self.source.encoded(index)


class Records:
    """A format that returns bytes; pixels are then copied to the rows of a buffer."""

    def open(self, root: Path, shape) -> None:
        self.reader = self.reading(root)
        self.room = np.empty((BATCH, *shape), np.uint8) if shape else None

    def one(self, index: int):
        data = self.get([index])[0]
        return np.frombuffer(data, np.uint8).reshape(self.room.shape[1:]) if self.room is not None else data

    def batch(self, indices: np.ndarray) -> None:
        for row, data in enumerate(self.get(indices.tolist())):
            if self.room is not None:
                self.room[row] = np.frombuffer(data, np.uint8).reshape(self.room.shape[1:])


class ArrayRecord(Records):
    name, package = "array-record, `group_size:1`", "array-record"

    def write(self, root: Path, records: list[bytes], shape, pixels) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(root / "x.array_record"), "group_size:1,uncompressed")
        for data in records:
            writer.write(data)
        writer.close()

    def reading(self, root: Path):
        from array_record.python.array_record_module import ArrayRecordReader

        # Its documentation recommends this for random access
        return ArrayRecordReader(str(root / "x.array_record"), "readahead_buffer_size:0,max_parallelism:0")

    def get(self, indices: list[int]) -> list[bytes]:
        if len(indices) > 1:
            return self.reader.read(indices)
        self.reader.seek(indices[0])  # for one record 50 times faster than a list
        return [self.reader.read()]


class Bagz(Records):
    name, package = "bagz", "bagz"

    def write(self, root: Path, records: list[bytes], shape, pixels) -> None:
        import bagz

        with bagz.Writer(str(root / "x.bag")) as writer:  # .bag: not compressed
            for data in records:
                writer.write(data)

    def reading(self, root: Path):
        import bagz

        return bagz.Reader(str(root / "x.bag"))

    def get(self, indices: list[int]) -> list[bytes]:
        return [self.reader[indices[0]]] if len(indices) == 1 else self.reader.read_indices(indices)


class Loose(Records):
    name = "loose files"

    def write(self, root: Path, records: list[bytes], shape, pixels) -> None:
        for number, data in enumerate(records):
            if number % 1000 == 0:
                (root / f"{number // 1000}").mkdir()
            with open(root / f"{number // 1000}" / f"{number}.x", "wb", buffering=0) as file:
                file.write(data)

    def reading(self, root: Path):
        return str(root)

    def get(self, indices: list[int]) -> list[bytes]:
        found = []
        for number in indices:
            with open(f"{self.reader}/{number // 1000}/{number}.x", "rb", buffering=0) as file:
                found.append(file.readall())
        return found


class WebDataset(Records):
    name, package = "WebDataset tar, in order only", "webdataset"

    def write(self, root: Path, records: list[bytes], shape, pixels) -> None:
        import webdataset

        with webdataset.TarWriter(str(root / "x.tar")) as writer:
            for number, data in enumerate(records):
                writer.write({"__key__": f"{number:06}", "bin": data})

    def reading(self, root: Path):
        import webdataset

        return webdataset.WebDataset(str(root / "x.tar"), shardshuffle=False)

    def in_order(self) -> None:
        for record in self.reader:
            if self.room is not None:
                self.room[0] = np.frombuffer(record["bin"], np.uint8).reshape(self.room.shape[1:])


def drop(root: Path) -> None:
    """Drops the files from the page cache, after writing them to disk."""
    for path in root.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def rate(n: int, work) -> float:
    before = time.perf_counter()
    work()
    return n / (time.perf_counter() - before)


def measure(store, work: Path, records: list[bytes], shape, pixels, run: int) -> dict[str, float]:
    root = work / "store"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    n, found = len(records), {}
    found["write"] = rate(n, lambda: (store.write(root, records, shape, pixels), os.sync()))
    found["MB"] = sum(p.stat().st_size for p in root.rglob("*") if p.is_file()) / 1e6
    drop(root)
    order = np.random.default_rng(run).permutation(n)
    store.open(root, shape)
    if hasattr(store, "in_order"):
        for name in ("disk", "batch"):
            found[name] = rate(n, store.in_order)
        return found

    def all_batches() -> None:
        for start in range(0, n, BATCH):
            store.batch(order[start : start + BATCH])

    found["disk"] = rate(n, all_batches)
    all_batches()
    found["batch"] = rate(3 * n, lambda: [all_batches() for _ in range(3)])
    some = order[:SINGLE].tolist()
    found["one"] = rate(len(some), lambda: [store.one(i) for i in some])
    return found


def installed(store) -> bool:
    try:
        importlib.metadata.version(getattr(store, "package", "numpy"))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def table(stores, work: Path, records: list[bytes], shape, pixels) -> list[str]:
    columns = ("one", "batch", "disk", "write", "MB")
    lines = [
        "| format | one at a time | batch of 512 | disk | write | MB |",
        "|---|---|---|---|---|---|",
    ]
    for store in stores:
        if not installed(store):
            lines.append(f"| {store.name} | not measured: {store.package} is not installed | | | | |")
            continue
        made = [measure(store, work, records, shape, pixels, run) for run in range(RUNS)]
        cells = []
        for column in columns:
            values = [found[column] for found in made if column in found]
            if not values:
                cells.append("")
            elif column == "MB":
                cells.append(f"{values[0]:.1f}")
            else:
                cells.append(f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})")
        lines.append(f"| {store.name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def against_memory(work: Path, side: int, n: int) -> str:
    """Random batches: `fill`, a copy of as many bytes, and `fill` from disk, without and with `prefetch`."""
    root = work / "square"
    shutil.rmtree(root, ignore_errors=True)
    rng = np.random.default_rng(0)
    writer = Writer(root / "train", store="raw", identity=f"{side}", name_bytes=1)
    for _ in range(n // 500):
        image = rng.integers(0, 256, (500, side, side, 3), dtype=np.uint8)
        writer.add([""] * 500, {"image": image})
    writer.finish({"fingerprint": "", "examples": n})
    memory = np.concatenate([image] * (n // 500))
    batch = 256
    results: dict[str, list[float]] = {name: [] for name in ("fill", "copy", "disk", "ahead")}
    for run in range(RUNS):
        order = np.random.default_rng(run).permutation(n)
        starts = range(0, n - batch + 1, batch)
        for name in ("disk", "ahead", "fill"):
            if name != "fill":
                drop(root)
            source = PackedFolder(root)
            room = empty(source.spec, batch)
            room["image"][:] = 1

            def once(name=name, source=source, room=room) -> None:
                for start in starts:
                    if name == "ahead":
                        source.prefetch(order[start : start + batch])
                    source.fill(order[start : start + batch], room)

            if name == "fill":
                once()
            results[name].append(rate(len(starts) * batch, once))
            if name != "fill":
                del source  # a mapped page stays in the cache
        copy = lambda room=room: [np.copyto(room["image"], memory[s : s + batch]) for s in starts]  # noqa: E731
        copy()
        results["copy"].append(rate(len(starts) * batch, copy))
    cells = [f"{statistics.median(v):,.0f} ({min(v):,.0f} to {max(v):,.0f})" for v in results.values()]
    share = statistics.median(results["fill"]) / statistics.median(results["copy"])
    return f"| {side}×{side}×3 | {cells[0]} | {cells[1]} | {share:.0%} | {cells[2]} | {cells[3]} |"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    work = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    stores = [Chipwise(), ArrayRecord(), Bagz(), WebDataset(), Loose()]
    records = [p.read_bytes() for p in sorted(Path(sys.argv[1]).rglob("*.jpg"))]
    pixels = np.stack([decode(data) for data in records])
    about = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(": ")[1].strip() for line in about if line.startswith("model name")), "")
    versions = ", ".join(
        f"{s.package} {importlib.metadata.version(s.package)}"
        for s in stores
        if hasattr(s, "package") and installed(s)
    )
    lines = [
        "# Formats for packed examples",
        "",
        f"`python benchmarks/formats.py FOLDER`; one of {os.cpu_count()} cores, {cpu}; "
        f"Python {platform.python_version()}, NumPy {np.__version__}, {versions}; {RUNS} runs, records a "
        f"second: median (min to max). The program's docstring says what is measured.",
        "",
        f"## {len(records):,} JPEGs as they are, {sum(map(len, records)) / 1e6:.1f} MB",
        "",
        *table(stores, work, records, None, pixels),
        "",
        f"## The same as pixels {'×'.join(map(str, pixels.shape[1:]))}, {pixels.nbytes / 1e6:.1f} MB",
        "",
        *table(stores, work, [p.tobytes() for p in pixels], pixels.shape[1:], pixels),
        "",
        "## Batches of 256, compared with a copy of memory",
        "",
        "The target memory is already in use. The last two columns begin with an empty page cache.",
        "",
        "| pixels | `fill` | copy | share | disk | disk, with `prefetch` before each batch |",
        "|---|---|---|---|---|---|",
        against_memory(work, 32, 50_000),
        against_memory(work, 224, 2_000),
    ]
    shutil.rmtree(work, ignore_errors=True)
    (Path(__file__).parent / "formats.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
