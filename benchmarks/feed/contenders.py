"""The loaders: each function yields batches endlessly, `(images (n, side, side, 3) uint8, labels (n,))`.

Each is configured as its documentation recommends for speed, and shuffles over all images if it can. Imports
are inside the functions, since each runs in its own process with only what it needs.
"""

from __future__ import annotations

import importlib.util
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .data import Images, decode_pillow

WORKERS = 2
LIMIT_BYTES = 256 << 20  # bytes of chipwise's batches in memory
Batches = Iterator[tuple[Any, Any]]


@dataclass(frozen=True)
class Contender:
    """A loader. `read(images, store, **options)` yields batches, or returns examples a second over so many
    seconds; `needs`: modules it imports; `note`: a caution about its figure."""

    name: str
    read: Callable[..., Batches | Callable[[float], float]]
    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    note: str = ""

    def missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def permutations(examples: int, batch: int) -> Iterator[np.ndarray]:
    """Yields indices `(batch,)` of consecutive random permutations."""
    rng, rest = np.random.default_rng(0), np.zeros(0, np.int64)
    while True:
        while len(rest) < batch:
            rest = np.concatenate([rest, rng.permutation(examples)])
        yield rest[:batch]
        rest = rest[batch:]


# ---- chipwise: the loader of training, without the transfer to the device


def chipwise(images: Images, store: str, workers: int | str | None = WORKERS) -> Batches:
    from chipwise.data import ImageFolder, order
    from chipwise.data.packed import PackedFolder
    from chipwise.data.stream import Stream

    source = ImageFolder(images.loose) if store == "loose" else PackedFolder(images.pack(store))
    wanted = (
        order.indices(0, start, start + images.batch, len(source))
        for start in itertools.count(0, images.batch)
    )
    stream = Stream(source, wanted, images.batch, lambda columns, indices: columns, workers, LIMIT_BYTES)
    try:
        while True:
            columns = stream.next()
            yield columns["image"], columns["label"]
    finally:
        stream.close()


# ---- PyTorch's DataLoader, over loose files and over a memory-mapped array


class _Files:
    """A map-style dataset like torchvision's ImageFolder: a file, a decoder, a label."""

    def __init__(self, images: Images, decoder: str):
        self.files, self.decoder = images.files(), decoder

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int):
        import torch

        path, label = self.files[index]
        if self.decoder == "torchvision":
            return _torchvision(path), label
        with open(path, "rb", buffering=0) as file:
            data = file.readall()
        return torch.from_numpy(DECODERS[self.decoder](data)), label


class _Rows:
    """A map-style dataset over a `.npy` file. A list of indices gives a batch."""

    def __init__(self, images: Images):
        folder = images.pack("raw") / "train"
        self.images = [np.load(p, mmap_mode="r") for p in sorted(folder.glob("image-*.npy"))]
        self.labels = np.concatenate([np.load(p) for p in sorted(folder.glob("label-*.npy"))])
        assert len(self.images) == 1, "this reader knows of one shard"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        import torch

        image = np.asarray(self.images[0])[index]
        if isinstance(index, list):
            return torch.from_numpy(image), torch.from_numpy(self.labels[index])
        return torch.from_numpy(image.copy()), int(self.labels[index])


def _decode_simplejpeg(data: bytes) -> np.ndarray:
    import simplejpeg

    return simplejpeg.decode_jpeg(data, "RGB")


def _pillow_writable(data: bytes) -> np.ndarray:
    return decode_pillow(data).copy()  # PyTorch warns about read-only arrays


DECODERS = {"Pillow": _pillow_writable, "simplejpeg": _decode_simplejpeg}


def torchvision_library() -> Path | None:
    """torchvision's compiled image library."""
    found = importlib.util.find_spec("torchvision")
    places = list(found.submodule_search_locations or ()) if found else []
    return next((p for place in places for p in Path(place).glob("image*.so")), None)


def _torchvision(path: str):
    """`torchvision.io.decode_jpeg(read_file(path))` with only its compiled library, since the rest of
    torchvision may be built for another PyTorch."""
    import torch

    if not hasattr(torch.ops.image, "decode_jpeg"):
        torch.ops.load_library(str(torchvision_library()))
    rgb = 3
    return torch.ops.image.decode_jpeg(torch.ops.image.read_file(path), rgb, False).permute(1, 2, 0)


def torch_loader(images: Images, store: str, decoder: str = "", whole: bool = False) -> Batches:
    import torch

    dataset: Any = _Files(images, decoder) if store != "raw" else _Rows(images)
    wanted = (rows.tolist() for rows in permutations(len(dataset), images.batch))
    order: dict[str, Any] = {"sampler": wanted, "batch_size": None} if whole else {"batch_sampler": wanted}
    for image, label in torch.utils.data.DataLoader(dataset, num_workers=WORKERS, **order):
        yield image.numpy(), label.numpy()


# ---- record formats: with their own readers, and with Grain


def _parse(record: bytes, store: str, side: int) -> tuple[np.ndarray, np.int32]:
    label = np.frombuffer(record, np.int32, 1)[0]
    if store == "raw":
        return np.frombuffer(record, np.uint8, offset=4).reshape(side, side, 3), label
    return _decode_simplejpeg(record[4:]), label


class _Bagz:
    """A Grain source over a bagz file."""

    def __init__(self, path: Path):
        self.path = str(path)
        self._open()

    def _open(self) -> None:
        import bagz

        self.reader = bagz.Reader(self.path)

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> bytes:
        return self.reader[index]

    def __getstate__(self):
        return {"path": self.path}

    def __setstate__(self, state):
        self.path = state["path"]
        self._open()


class _LooseFiles:
    """A Grain source of `label + JPEG` over loose files."""

    def __init__(self, images: Images):
        self.files = images.files()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> bytes:
        path, label = self.files[index]
        with open(path, "rb", buffering=0) as file:
            return np.int32(label).tobytes() + file.readall()


class _Parse:
    """Bytes to a dict of arrays; a class, so that it can be pickled."""

    def __init__(self, store: str, side: int):
        self.store, self.side = store, side

    def __call__(self, record: bytes):
        return _parse(record, self.store, self.side)


def grain(images: Images, store: str, form: str, threads: int = 0, processes: int = 0) -> Batches:
    import grain as library
    from absl import flags

    flags.FLAGS.is_parsed() or flags.FLAGS(["feed"])  # array-record calls it
    if form == "loose":
        source: Any = _LooseFiles(images)
    elif form == "bagz":
        source = _Bagz(images.bagz(store))
    else:
        source = library.sources.ArrayRecordDataSource(str(images.records(store)))
    data = library.MapDataset.source(source).shuffle(seed=0).repeat()
    data = data.map(_Parse("jpeg" if store == "loose" else store, images.side)).batch(images.batch)
    # Elements are whole batches here: the default buffer of 500 would be 19 GB
    rows = data.to_iter_dataset(
        library.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * max(1, threads))
    )
    if processes:
        rows = rows.mp_prefetch(
            library.MultiprocessingOptions(num_workers=processes, per_worker_buffer_size=2)
        )
    # Processes return batches in shared memory, which must be copied before it is reused
    for image, label in rows:
        yield np.asarray(image), np.asarray(label)


def record_reader(images: Images, store: str, form: str) -> Batches:
    """The format's own batch reader, in two threads that alternate."""
    if form == "array-record":
        from array_record.python.array_record_module import ArrayRecordReader

        options = "readahead_buffer_size:0,index_storage_option:in_memory"
        readers = [ArrayRecordReader(str(images.records(store)), options) for _ in range(WORKERS)]
        many = [reader.read for reader in readers]
        examples = readers[0].num_records()
    else:
        import bagz

        reader = bagz.Reader(str(images.bagz(store)))
        many, examples = [lambda rows: list(reader.read_indices(rows))] * WORKERS, len(reader)

    def make(read, rows: np.ndarray):
        image = np.empty((len(rows), images.side, images.side, 3), np.uint8)
        label = np.empty(len(rows), np.int32)
        for row, record in enumerate(read(rows.tolist())):
            image[row], label[row] = _parse(record, store, images.side)
        return image, label

    yield from _in_threads(make, many, permutations(examples, images.batch))


def _in_threads(make, readers: list, wanted: Iterator[np.ndarray]) -> Batches:
    """`make(reader, rows)` for each of `wanted`, in order, with a thread for each reader, one batch ahead."""
    from concurrent.futures import ThreadPoolExecutor

    pools = [ThreadPoolExecutor(1) for _ in readers]
    flying = [pool.submit(make, reader, next(wanted)) for pool, reader in zip(pools, readers, strict=True)]
    for turn in itertools.cycle(range(len(readers))):
        batch = flying[turn].result()
        flying[turn] = pools[turn].submit(make, readers[turn], next(wanted))
        yield batch


# ---- WebDataset: in sequence, shuffled within a buffer


def webdataset(images: Images, store: str, decoder: str = "simplejpeg") -> Batches:
    import webdataset as library

    key = "jpg" if store == "jpeg" else "bin"
    shards = [str(path) for path in images.tars(store)]
    side = images.side

    def parse(sample):
        data = sample[key]
        image = (
            DECODERS[decoder](data)
            if store == "jpeg"
            else np.frombuffer(data, np.uint8).reshape(side, side, 3)
        )
        return image, int(sample["cls"])

    def stack(samples):
        return np.stack([image for image, _ in samples]), np.array([label for _, label in samples], np.int32)

    data = (
        library.WebDataset(shards, shardshuffle=len(shards), seed=0)
        .repeat()
        .shuffle(1000)
        .map(parse)
        .batched(images.batch, collation_fn=stack)
    )
    for image, label in library.WebLoader(data, batch_size=None, num_workers=WORKERS):
        yield image.numpy(), label.numpy()


# ---- the upper bound


class Copy:
    """Plain copies of batches of `rows` examples of `spec`: an upper bound for any reader.

    They read from memory as large as the source, up to 512 MiB and an eighth of the free memory, and write
    into memory already in use.
    """

    def __init__(self, spec: Mapping[str, Any], rows: int, examples: int):
        from chipwise.data.sources import example_bytes
        from chipwise.machine.limits import memory

        each = example_bytes(dict(spec))
        size = min(examples * each, 512 << 20, memory().available_bytes // 8)
        batch = max(1, rows * each)
        # Ones, since untouched zeros would all share one page
        self._from = np.ones((max(2, size // batch), batch), np.uint8)

    def rate(self, threads: int, seconds: float) -> float:
        """Bytes a second copied by `threads` threads together, each for `seconds`."""
        source, length = self._from, len(self._from)
        targets = np.ones((threads, 2, source.shape[1]), np.uint8)  # two each in turn, as for batches
        ready = threading.Barrier(threads)

        def copy(thread: int) -> float:
            out, copied, start = targets[thread], 0, thread * length // threads
            ready.wait()
            began = time.perf_counter()
            while (taken := time.perf_counter() - began) < seconds or not copied:
                np.copyto(out[copied % 2], source[(start + copied) % length])
                copied += 1
            return copied * source.shape[1] / taken

        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(copy, range(threads)))


def plain_copy(images: Images, store: str, threads: int) -> Callable[[float], float]:
    """Copies whole batches from memory as large as the data into memory already in use."""
    from chipwise.data.packed import PackedFolder
    from chipwise.data.sources import example_bytes

    source = PackedFolder(images.pack("raw"))
    copy, size = Copy(source.spec, images.batch, len(source)), example_bytes(source.spec)
    return lambda seconds: copy.rate(threads, seconds) / size


# ---- cases

COPY = [
    Contender("plain copy, 1 thread", plain_copy, {"threads": 1}, ("chipwise",)),
    Contender(f"plain copy, {WORKERS} threads", plain_copy, {"threads": WORKERS}, ("chipwise",)),
]
CHIPWISE = [
    Contender("chipwise, 1 thread", chipwise, {"workers": 1}, ("chipwise",)),
    Contender(f"chipwise, {WORKERS} threads", chipwise, {"workers": WORKERS}, ("chipwise",)),
]
BY_ITSELF = Contender("chipwise, as it chooses", chipwise, {"workers": None}, ("chipwise",))
PROCESSES = Contender(
    f"chipwise, {WORKERS} processes", chipwise, {"workers": f"processes:{WORKERS}"}, ("chipwise",)
)
WEBDATASET = Contender(
    "WebDataset, 2 processes", webdataset, needs=("webdataset", "torch"),
    note="sequential: shards in random order, shuffled within 1,000 images",
)  # fmt: skip


def _grain(form: str, *needs: str) -> list[Contender]:
    """Grain with threads and with processes; 0, 1, 2 and 8 threads were tried."""
    label = {"loose": "loose files", "array-record": "array-record", "bagz": "bagz"}[form]
    return [
        Contender(f"Grain, {label}, {n} {kind}", grain, {"form": form, kind: n}, ("grain", *needs))
        for kind, n in (("threads", WORKERS), ("processes", WORKERS))
    ]


def _torch_files() -> list[Contender]:
    alone = "its compiled image library alone"
    return [
        Contender(f"PyTorch, loose files, {d}", torch_loader, {"decoder": d}, ("torch", *needs), note)
        for d, needs, note in (
            ("Pillow", (), ""),
            ("simplejpeg", (), ""),
            ("torchvision", ("torchvision",), alone),
        )
    ]


def _readers() -> list[Contender]:
    return [
        Contender(
            "array-record's reader, 2 threads", record_reader, {"form": "array-record"}, ("array_record",)
        ),
        Contender("bagz's reader, 2 threads", record_reader, {"form": "bagz"}, ("bagz",)),
    ]


_RECORDS = [*_grain("array-record", "array_record"), *_readers()]
_TORCH_ROWS = [
    Contender("PyTorch, .npy, image by image", torch_loader, {}, ("torch",)),
    Contender("PyTorch, .npy, batch by batch", torch_loader, {"whole": True}, ("torch",)),
]


@dataclass(frozen=True)
class Case:
    """The data of a case: `store` of the images called `images`."""

    name: str
    title: str
    images: str
    store: str
    contenders: tuple[Contender, ...]


CASES = (
    Case(
        "loose", "(a) Loose JPEGs, 32 × 32, 60,000 files, batches of 512", "small", "loose",
        (*COPY, *CHIPWISE, BY_ITSELF, PROCESSES, *_torch_files(), *_grain("loose")),
    ),
    Case(
        "jpeg", "(b) Packed JPEGs, 224 × 224, batches of 256", "large", "jpeg",
        (*COPY, *CHIPWISE, *_RECORDS, *_torch_files(), WEBDATASET),
    ),
    Case(
        "raw32", "(c) Packed pixels, 32 × 32, batches of 512", "small", "raw",
        (*COPY, *CHIPWISE, *_RECORDS, *_TORCH_ROWS, WEBDATASET),
    ),
    Case(
        "raw224", "(c) Packed pixels, 224 × 224, batches of 256", "large", "raw",
        (*COPY, *CHIPWISE, *_RECORDS, *_TORCH_ROWS, WEBDATASET),
    ),
)  # fmt: skip
