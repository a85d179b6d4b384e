"""Measures packing CIFAR-10's 60,000 JPEGs and large photographs, compared with copying the files; threads
compared with processes.

    python benchmarks/packing.py --tar cifar10-jpeg.tar.xz --scratch DIR

The archive is unpacked to DIR once. All variants alternate, three runs each, from a warm page cache and with
`sync` in the time; `packing.md` has medians, spread, and ratios within a round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import tarfile
import tempfile
import time
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import PIL
import simplejpeg
from PIL import Image

from chipwise.data.pack.examples import Held, piece
from chipwise.data.pack.packing import Packing, pack
from chipwise.machine.limits import usable_cores

RUNS = 3
_loads: list[float] = []  # before each round, for other work on the machine
FORMS = {
    "CIFAR-10, as it is": {"store": "raw"},
    "photographs, to 224×224 raw": {"store": "raw", "size": 224},
    "photographs, to 224×224 JPEG": {"store": "jpeg", "size": 224},
}


def copies(loose: Path, archive: Path) -> dict:
    """Name to a function that fills a new folder."""
    return {
        "`cp -r` of the loose files": lambda out: _shell("cp", "-r", loose, out),
        "`tar -cf` of the loose files": lambda out: (out.mkdir(), _shell("tar", "-cf", out / "x.tar", loose)),
        "pack, loose files, raw": lambda out: pack(loose, out),
        "pack, loose files, jpeg": lambda out: pack(loose, out, store="jpeg"),
        "pack, .tar.xz, raw": lambda out: pack(archive, out),
        "pack, .tar.xz, jpeg": lambda out: pack(archive, out, store="jpeg"),
    }


def measure(ways: dict, scratch: Path) -> dict[str, list[tuple[float, int, int]]]:
    """Seconds, bytes and files of each variant, by round."""
    found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in ways}
    for _ in range(RUNS):
        _loads.append(os.getloadavg()[0])
        for name, fill in ways.items():
            out = scratch / "out"
            os.sync()
            before = time.perf_counter()
            fill(out)
            os.sync()
            seconds = time.perf_counter() - before
            files = [p for p in out.rglob("*") if p.is_file()]
            found[name].append((seconds, sum(p.stat().st_size for p in files), len(files)))
            print(f"{name}: {seconds:.2f} s", flush=True)
            shutil.rmtree(out)
    return found


# ---- threads and processes: decoding alone, results brought back in order

_job: Packing | None = None


def _begin(src: Path, options: dict) -> None:
    global _job
    _job = Packing(src, Path(tempfile.gettempdir()) / "never-written", **options)


def _piece(start: int, stop: int) -> tuple[list[str], object]:
    assert _job is not None
    records = piece(_job.listing.splits["train"], range(start, stop), None, _job.form, Held(), True)
    images = [record.columns["image"] for record in records]
    return [record.name for record in records], np.stack(images) if _job.form.store == "raw" else images


def rates(src: Path, options: dict, limit: int, images_a_piece: int) -> dict[str, list[float]]:
    """Images/s of the first `limit` images by kind and number of workers, by round."""
    _begin(src, options)
    pieces = [(i, min(i + images_a_piece, limit)) for i in range(0, limit, images_a_piece)]
    spawn = multiprocessing.get_context("spawn")
    kinds: dict[str, Executor] = {"1 thread": ThreadPoolExecutor(1)}
    workers = usable_cores()
    kinds[f"{workers} threads"] = ThreadPoolExecutor(workers)
    kinds[f"{workers} processes"] = ProcessPoolExecutor(workers, spawn, _begin, (src, options))
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    try:
        for executor in kinds.values():
            list(
                executor.map(_piece, *zip(*pieces[: 4 * workers], strict=True))
            )  # starts workers and warms caches
        for _ in range(RUNS):
            _loads.append(os.getloadavg()[0])
            for kind, executor in kinds.items():
                before = time.perf_counter()
                for _ in executor.map(_piece, *zip(*pieces, strict=True)):
                    pass
                found[kind].append(limit / (time.perf_counter() - before))
            print(options, {kind: round(rate[-1]) for kind, rate in found.items()}, flush=True)
    finally:
        for executor in kinds.values():
            executor.shutdown()
    return found


def photographs(folder: Path, count: int = 100) -> Path:
    """Photographs of 2560×1707 pixels, cut from scikit-learn's two, enlarged."""
    from sklearn.datasets import load_sample_images

    for number, pixels in enumerate(load_sample_images().images):
        (folder / f"photo{number}").mkdir(parents=True)
        large = Image.fromarray(pixels).resize((2800, 1867), Image.Resampling.BICUBIC)
        for i in range(count // 2):
            cut = large.crop((i, i, i + 2560, i + 1707))
            cut.save(folder / f"photo{number}" / f"{i:04}.jpg", quality=88)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tar", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        scratch = Path(folder)
        with tarfile.open(arguments.tar) as archive:
            archive.extractall(scratch / "loose", filter="data")
        found = measure(copies(scratch / "loose", arguments.tar), scratch)
        large = photographs(scratch / "photos")
        by_kind = {
            name: rates(scratch / "loose", options, 20_000, 64)
            if name.startswith("CIFAR")
            else rates(large, options, 100, 1)
            for name, options in FORMS.items()
        }
    count = 60_000
    base = [seconds for seconds, _, _ in next(iter(found.values()))]
    lines = [
        "# Packing",
        "",
        f"`python benchmarks/packing.py`; {_model()}, {usable_cores()} cores (shared), Python "
        f"{platform.python_version()}, simplejpeg {simplejpeg.__version__}, Pillow {PIL.__version__}; {RUNS} "
        f"rounds, median (min to max); warm page cache, `sync` included; load average "
        f"{min(_loads):.0f} to {max(_loads):.0f}.",
        "",
        "CIFAR-10 as 60,000 JPEGs of 32×32 pixels:",
        "",
        "| way | seconds | images/s | MB | files | seconds / `cp -r` |",
        "|---|---|---|---|---|---|",
    ]
    for name, rounds in found.items():
        seconds = [r[0] for r in rounds]
        ratio = statistics.median(a / b for a, b in zip(seconds, base, strict=True))
        lines.append(
            f"| {name} | {_spread(seconds, 1)} | {count / statistics.median(seconds):,.0f} | "
            f"{rounds[0][1] / 1e6:.1f} | {rounds[0][2]:,} | {ratio:.2f} |"
        )
    lines += ["", "Reading, decoding and resizing alone, images/s:", ""]
    kinds = list(next(iter(by_kind.values())))
    lines += [f"| images | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name, speeds in by_kind.items():
        lines.append(f"| {name} | {' | '.join(_spread(speeds[kind], 0) for kind in kinds)} |")
    lines += ["", "The photographs have 2560×1707 pixels. Workers of `chipwise pack` are threads."]
    (Path(__file__).parent / "packing.md").write_text("\n".join(lines) + "\n")


def _shell(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, stderr=subprocess.DEVNULL)


def _model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


if __name__ == "__main__":
    main()
