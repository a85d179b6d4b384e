"""Data at URLs, from a server of this test's own and from fsspec's memory."""

import contextlib
import errno
import hashlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path
from urllib.parse import unquote

import fsspec
import pytest

from chipwise.base.errors import DataError
from chipwise.base.facts import fact
from chipwise.data import remote, take
from chipwise.data.datasets import mnist
from chipwise.data.remote import local
from refusals import refused

FOLDER = {f"{c}/{i} big.jpg": f"{c}{i}".encode() * (50 + i) for c in ("cat", "dog") for i in range(3)}


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`, path to bytes. What it does wrong is up to the test; `asked` counts requests."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.sizes: bool | str = True  # "only to HEAD"
        self.fails = Counter()  # path to how many answers are 500
        self.drops = Counter()  # path to how many answers break off in the middle
        self.asked: list[tuple[str, str]] = []  # (method, path)
        self.meet: threading.Barrier | None = None  # answers to GET of a file wait for each other
        self.endless = False  # answers to GET of a file do not end
        self.drip = 0.0  # seconds between them
        self.hang: str | None = None  # answers for this path never come
        self.changes: dict[str, list[bytes]] = defaultdict(list)  # what a path becomes after a GET of it
        self.with_it: dict[str, bytes] = {}  # and what else changes then

    def gets(self, path: str) -> int:
        return self.asked.count(("GET", path))


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server, path = self.server, unquote(self.path)
        server.asked.append((self.command, path))
        if server.fails[path] > 0:
            server.fails[path] -= 1
            return self.send_error(500)
        if path in server.files:
            self.send_file(path, server.files[path])
            if self.command == "GET" and server.changes[path]:
                server.files[path] = server.changes[path].pop(0)
                server.files.update(server.with_it)
            return None
        if not any(name.startswith(path.rstrip("/") + "/") for name in server.files):
            return self.send_error(404)
        if not path.endswith("/"):
            return self.send(301, b"", {"Location": f"{self.path}/"})
        self.send(200, b'<a href="x">x</a>', {"Content-Type": "text/html; charset=utf-8"})

    def send_file(self, path: str, data: bytes):
        server = self.server
        headers = {"ETag": hashlib.md5(data).hexdigest()}
        if self.command == "GET" and server.hang == path:
            threading.Event().wait(60)
        if self.command == "GET" and server.meet is not None and "manifest" not in path:
            server.meet.wait(10)
        cut = len(data)
        if self.command == "GET" and server.drops[path] > 0:
            server.drops[path] -= 1
            cut //= 2
        self.send(200, data, headers, cut)

    def send(self, status, data, headers, cut=None):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.server.sizes is True or (self.server.sizes and self.command == "HEAD"):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # a client that has given up, maybe a minute ago
            if self.command == "GET":
                self.wfile.write(data[:cut])
            while self.server.endless and self.command == "GET":
                threading.Event().wait(self.server.drip)
                self.wfile.write(data or b" ")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A cache of this test's own."""
    monkeypatch.setenv("CHIPWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("CHIPWISE_CACHE_BYTES", raising=False)
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0))
    return tmp_path / "cache" / "remote"


@pytest.fixture
def server():
    pytest.importorskip("aiohttp")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def memory():
    """fsspec's filesystem in memory, empty."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def quiet(line):
    pass


def pack(files: dict[str, bytes], **more) -> dict[str, bytes]:
    """Path to bytes of a packed folder whose `train` has `files`, and `more` in its manifest."""
    named = {
        n: {"name": n, "bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for n, b in files.items()
    }
    manifest = {
        "format": "chipwise-packed",
        "version": 2,
        "shards": [{"examples": 1, "files": named}],
        **more,
    }
    return {
        "train/manifest.json": json.dumps(manifest).encode(),
        **{f"train/{name}": data for name, data in files.items()},
    }


def serve(server, root: str, files: dict[str, bytes]) -> str:
    server.files.update({f"/{root}/{name}": data for name, data in files.items()})
    return f"{server.url}/{root}"


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def fetch(url, limit_bytes=None):
    with pytest.MonkeyPatch.context() as patched:
        if limit_bytes is not None:
            patched.setenv("CHIPWISE_CACHE_BYTES", str(limit_bytes))
        return local(url, say=quiet)


# What is a URL


def test_paths_are_returned_as_they_are(place):
    home = Path("~").expanduser()
    assert local("data/x") == Path("data/x") and local("~/x") == home / "x" == local(Path("~/x"))
    assert local("file:///data/a%20b") == Path("/data/a b")
    assert not place.exists()


def test_a_url_that_was_made_a_path():
    with refused(DataError, "url-made-a-path", path="s3:/bucket/x"):
        local(Path("s3://bucket/x"))


OTHER = "nowhere://x/y local://a zip://a.zip http://[x/y dbfs://a jupyter:// ftp:// dir://a DIR://a git://a"
MORE = "github://a/b sftp://h/a smb://h/a memory://a hdfs://h/a libarchive://a"


@pytest.mark.parametrize("url", [*OTHER.split(), *MORE.split()])
def test_a_url_that_nobody_knows(url, monkeypatch):
    monkeypatch.undo()  # of the place that tests have
    with refused(DataError, "url-unusable", url=url):
        local(url)


@pytest.mark.parametrize(("url", "library"), [("s3://b/x", "s3fs"), ("http://h/x", "aiohttp")])
def test_a_missing_library_is_named(monkeypatch, url, library):
    monkeypatch.setitem(sys.modules, library, None)
    with refused(DataError, "url-unusable") as caught:
        local(url)
    assert library in caught.value.facts["reason"]


# Folders, packed folders, files


def test_a_folder_comes_whole_and_once(memory, place, capfd, monkeypatch):
    memory.pipe({f"/bucket/pets/{n}": b for n, b in FOLDER.items()})
    path = local("memory://bucket/pets/")
    assert path.name == "pets" and path.is_relative_to(place) and content(path) == FOLDER
    out, err = capfd.readouterr()
    assert out == "" and "memory://bucket/pets" in err and "6 files" in err
    monkeypatch.setattr(remote._Url, "download", None)
    assert local("memory://bucket/pets") == path and capfd.readouterr().err == ""


def test_a_folder_of_which_a_part_cannot_be_read_is_refused(memory, monkeypatch):
    memory.pipe({f"/x/{n}": b for n, b in FOLDER.items()})
    listed = type(memory).ls

    def ls(fs, path, **options):
        if path.endswith("dog"):
            raise PermissionError(path)
        return listed(fs, path, **options)

    monkeypatch.setattr(type(memory), "ls", ls)
    with refused(DataError, "url-unreadable", url="memory://x/dog"):
        fetch("memory://x")


@pytest.mark.parametrize("end", ["", "/"])
def test_a_web_page_is_not_a_folder(server, end):
    with refused(DataError, "url-is-page", url=serve(server, "pets", FOLDER) + end):
        fetch(f"{server.url}/pets{end}")


@pytest.mark.parametrize("kind", ["memory", "http"])
def test_a_single_file_keeps_its_name(request, kind):
    data = bytes(range(256)) * 40
    if kind == "memory":
        request.getfixturevalue("memory").pipe("/a/flowers.tar.xz", data)
        path = fetch("memory://a/flowers.tar.xz")
    else:
        server = request.getfixturevalue("server")
        server.files["/a/flowers.tar.xz"] = data
        path = fetch(f"{server.url}/a/flowers.tar.xz")
    assert path.name == "flowers.tar.xz" and path.read_bytes() == data


@pytest.mark.parametrize("splits", [("train",), ("train", "eval")])
def test_a_packed_folder_needs_no_list_of_files(server, splits):
    files = pack({"image-00000.npy": b"i" * 3000, "record-00000.npy": b"r" * 10, "empty.npy": b""})
    held_out = {n.replace("train/", "eval/"): b for n, b in pack({"x.npy": b"123"}).items()}
    files |= held_out if "eval" in splits else {}
    url = serve(server, "packs/pets", files | {"train/stray.txt": b"not in the manifest"})
    path = fetch(url)
    assert content(path) == files
    assert fetch(url) == path
    assert server.gets("/packs/pets/train/image-00000.npy") == 1


@pytest.mark.parametrize("there", [0, 1, 2])
def test_a_pack_of_text_comes_with_its_tokenizer(request, there):
    files = pack({"x.npy": b"x"}, settings={"text": {"tokenizer": "a/tokenizer.json"}})
    beside = {"tokenizer.json": b'{"a": 1}', "tokenizer_config.json": b"{}"}
    files |= dict([*beside.items()][:there])  # a pack of an earlier version has fewer
    server, memory = (request.getfixturevalue(name) for name in ("server", "memory"))
    url = serve(server, "texts", files)
    memory.pipe({f"/texts/{name}": data for name, data in files.items()})
    for at in (url, "memory://texts"):
        assert content(fetch(at)) == files
    first = fetch(url)
    server.files["/texts/tokenizer.json"] = b'{"a": 2}'  # the entry of an earlier version lacks it
    assert fetch(url) == first and content(first) == files


def test_settings_of_a_manifest_that_are_none(server):
    with refused(DataError, "manifest-damaged"):
        fetch(serve(server, "texts", pack({"x.npy": b"x"}, settings=7)))


def test_a_file_called_manifest_that_is_someone_elses(memory):
    files = {"train/manifest.json": b"[1]", "train/a.jpg": b"a"}
    memory.pipe({f"/x/{n}": b for n, b in files.items()})
    assert content(fetch("memory://x")) == files


@pytest.mark.parametrize("name", ["../x.npy", "/etc/x.npy", ".."])
def test_a_manifest_that_names_a_file_outside(memory, name, place):
    memory.pipe({f"/p/{n}": b for n, b in pack({name: b"x"}).items() if "manifest" in n})
    with refused(DataError, "file-outside", name=name):
        fetch("memory://p")
    assert not [p for p in place.iterdir() if p.is_dir()]


def test_a_damaged_manifest(memory):
    memory.pipe("/p/train/manifest.json", b'{"format": "chipwise-packed", "shards": [{}]}')
    with refused(DataError, "manifest-damaged", path="memory://p/train/manifest.json"):
        fetch("memory://p")


def test_nothing_there(server, memory):
    with refused(DataError, "url-unreadable", url="memory://none", reason="not found"):
        fetch("memory://none")
    with refused(DataError, "url-unreadable", url=f"{server.url}/none", reason="the server answers 404"):
        fetch(f"{server.url}/none")


def test_a_server_that_does_not_tell_sizes(server):
    server.sizes = False
    with refused(DataError, "size-untold", file="a.tar"):
        fetch(serve(server, "d", {"a.tar": b"a"}) + "/a.tar")


def test_a_changed_folder_is_fetched_anew(server, memory):
    server.files["/x.tar"] = b"1"
    first = fetch(f"{server.url}/x.tar")
    server.files["/x.tar"] = b"2"  # of the same size
    second = fetch(f"{server.url}/x.tar")
    assert [path.read_bytes() for path in (first, second)] == [b"1", b"2"]
    memory.pipe("/m/a", b"1")
    assert (fetch("memory://m") / "a").read_bytes() == b"1"
    memory.pipe("/m/a", b"2")
    assert (fetch("memory://m") / "a").read_bytes() == b"2"


def test_a_changed_pack_is_fetched_anew(server):
    first = fetch(serve(server, "p", pack({"x.npy": b"1"})))
    second = fetch(serve(server, "p", pack({"x.npy": b"2"})))
    assert [(p / "train/x.npy").read_bytes() for p in (first, second)] == [b"1", b"2"]


def test_secrets_in_a_url_are_not_repeated(server, tmp_path):
    server.files["/a.tar?key=SECRET"] = b"a"
    told = []
    url = server.url.replace("http://", "http://me:PASSWORD@") + "/a.tar?key=SECRET"
    assert local(url, say=told.append).name == "a.tar"
    del server.files["/a.tar?key=SECRET"]
    with pytest.raises(DataError) as caught:
        fetch(url)
    told.append(str(caught.value))
    texts = [*told, *(p.read_text() for p in tmp_path.rglob("*") if p.is_file())]
    assert len(texts) > 3 and not [t for t in texts if "SECRET" in t or "PASSWORD" in t]


def test_a_data_set_at_a_url(memory):
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    memory.pipe({f"/sets/mnist/{name}-ubyte.gz": b"" for name in names})
    with pytest.raises(DataError) as caught:  # there, and damaged
        take(mnist("memory://sets").train, [0])
    assert caught.value.facts["path"].name == "train-images-idx3-ubyte.gz"
    url = "memory://sets/mnist/train-images-idx3-ubyte.gz"
    with refused(DataError, "mnist-missing", data=url):
        mnist(url)


# Errors, resuming


@pytest.mark.parametrize("size", [0, 1, 6_000_000])
def test_files_of_any_size(server, size):
    server.files["/x.tar"] = os.urandom(size)
    assert fetch(f"{server.url}/x.tar").read_bytes() == server.files["/x.tar"]


@pytest.mark.parametrize("wrong", ["fails", "drops"])
@pytest.mark.parametrize("path", ["/p/train/x.npy", "/p/train/small.npy"])
def test_a_file_that_fails_twice_is_tried_again(server, wrong, path):
    files = pack({"x.npy": os.urandom(5000), "small.npy": b"small"})
    getattr(server, wrong)[path] = 2
    assert content(fetch(serve(server, "p", files))) == files
    assert getattr(server, wrong)[path] == 0


def test_what_does_not_pass_ends_in_one_line_and_goes_on_from_there(server, place, monkeypatch):
    files = pack({f"{i}.npy": b"%d" % i * 10 for i in range(4)})
    url = serve(server, "p", files)
    server.drops["/p/train/3.npy"] = 100
    monkeypatch.setattr(remote, "WORKERS", 1)
    with refused(DataError, "fetch-failed", file="p/train/3.npy", data=url):
        fetch(url)
    assert [p.suffix for p in place.iterdir() if p.is_dir()] == [".partial"]
    server.drops.clear()
    told = []
    assert content(local(url, say=told.append)) == files
    assert told[0] == str(fact("fetching", data=url, files=1, bytes=10))
    assert [server.gets(f"/p/train/{i}.npy") for i in range(4)] == [1, 1, 1, 4]
    assert not list(place.rglob(".parts")) and not list(place.glob("*.partial"))


def test_a_file_that_is_gone_is_not_asked_for_again(server):
    files = pack({"a.npy": b"a", "b.npy": b"b"})
    url = serve(server, "p", {n: b for n, b in files.items() if not n.endswith("b.npy")})
    with refused(DataError, "fetch-failed", file="p/train/b.npy", reason="not found"):
        fetch(url)
    assert server.gets("/p/train/b.npy") == 1


@pytest.mark.parametrize(
    ("data", "code", "facts"),
    [
        (b"shor", "fetch-failed", {"reason": "EOFError 4 bytes came, expected 5"}),
        (b"other", "fetched-not-as-listed", {}),
    ],
)
def test_a_file_that_is_not_what_the_manifest_says(server, place, data, code, facts):
    url = serve(server, "p", pack({"a.npy": b"whole"}) | {"train/a.npy": data})
    with refused(DataError, code, file="p/train/a.npy", **facts):
        fetch(url)
    assert not list(place.rglob("a.npy"))


def test_a_file_without_an_end_is_left_after_the_listed_size(server):
    server.files["/x.tar"] = bytes(1 << 20)
    server.sizes, server.endless = "only to HEAD", True
    with refused(DataError, "fetch-failed", file="x.tar", reason="EOFError more than 1,048,576 bytes came"):
        fetch(f"{server.url}/x.tar")


def test_without_connection_what_was_fetched_serves(server, memory, monkeypatch):
    url = serve(server, "pets", pack({"x.npy": b"x"}))
    path = fetch(url)
    server.fails.update({"/pets/train/manifest.json": 99})
    told = []
    assert local(url, say=told.append) == path
    why = "the server answers 500"
    assert told == [str(fact("old-copy-used", url=url, reason=why))]
    shutil.rmtree(path.parent)
    with refused(DataError, "url-unreadable", reason=why):
        fetch(url)


def test_a_full_disk(memory, monkeypatch, place):
    memory.pipe("/d/a", b"a")

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(remote.os, "fsync", full)
        with refused(DataError, "cache-unwritable", data="memory://d", reason=os.strerror(errno.ENOSPC)):
            fetch("memory://d")
    assert (fetch("memory://d") / "a").read_bytes() == b"a"


def test_a_cache_that_cannot_be_written(memory, tmp_path):
    memory.pipe("/d/a", b"a")
    (tmp_path / "cache").write_bytes(b"a file where a folder should be")
    with refused(DataError, "cache-unwritable"):
        fetch("memory://d")


@pytest.mark.parametrize("kind", ["memory", "http"])
@pytest.mark.parametrize("more", [0, 1])
def test_a_manifest_that_is_too_large_is_not_read(request, kind, more, monkeypatch):
    files = pack({"x.npy": b"x"})
    monkeypatch.setattr(remote, "MOST_BYTES", len(files["train/manifest.json"]) - more)
    if kind == "http":
        url = serve(request.getfixturevalue("server"), "p", files)
    else:
        url = "memory://p"
        request.getfixturevalue("memory").pipe({f"/p/{n}": b for n, b in files.items()})
    if not more:
        assert content(fetch(url)) == files
        return
    with refused(DataError, "url-unreadable", url=f"{url}/train/manifest.json") as caught:
        fetch(url)
    assert "more than" in caught.value.facts["reason"]


@pytest.mark.parametrize("more", [0, 1])
def test_a_listing_of_too_many(memory, monkeypatch, more):
    monkeypatch.setattr(remote, "MOST_FILES", len(FOLDER) + 3 - more)  # with its folders
    memory.pipe({f"/x/{n}": b for n, b in FOLDER.items()})
    if not more:
        assert content(fetch("memory://x")) == FOLDER
        return
    with refused(DataError, "url-lists-too-many", url="memory://x", limit=remote.MOST_FILES):
        fetch("memory://x")


@pytest.mark.parametrize("wrong", ['{"bytes": -1}', '{"bytes": 1e999}', '{"bytes": 1, "name": "a\\u0000"}'])
def test_a_manifest_with_impossible_files(memory, wrong):
    manifest = json.loads(pack({"x.npy": b"x"})["train/manifest.json"])
    manifest["shards"][0]["files"]["x.npy"] |= json.loads(wrong)
    memory.pipe("/p/train/manifest.json", json.dumps(manifest).encode())
    with refused(DataError, "file-outside" if "name" in wrong else "manifest-damaged"):
        fetch("memory://p")


def test_ctrl_c_ends_a_big_file_too(server, monkeypatch):
    monkeypatch.setattr(remote, "SAY_SECONDS", 0.01)
    server.files["/x.tar"] = bytes(1 << 27)

    def say(line):
        if " of " in line and not line.startswith("0 bytes"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        local(f"{server.url}/x.tar", say=say)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["file's header", "file", "manifest"])
def test_a_server_that_drips_is_given_up(server, where, monkeypatch):
    monkeypatch.setattr(remote, "SILENCE_SECONDS", 0.3)
    server.files["/d/x.tar"] = b"x" * 100
    server.files["/p/train/manifest.json"] = b"{" + b" " * 100
    if where == "file's header":
        server.hang = "/d/x.tar"
    elif where == "file":
        server.files["/d/x.tar"] = b""
        monkeypatch.setattr(
            remote._Url, "_file", lambda url, name, info: remote.RemoteFile(name, info["name"], 99)
        )
    server.endless, server.drip = where != "file's header", 0.2
    server.sizes = "only to HEAD"
    asked = "p" if where == "manifest" else "d/x.tar"
    code = "fetch-failed" if where.startswith("file") else "url-unreadable"
    with refused(DataError, code) as caught:
        fetch(f"{server.url}/{asked}")
    assert isinstance(caught.value.__cause__, remote.TooSlow)


# Files that change meanwhile


def test_a_file_that_changes_meanwhile_is_fetched_again(server, place):
    server.files["/x.tar"] = b"a" * 4000
    server.changes["/x.tar"] = [b"b" * 4000]
    path = fetch(f"{server.url}/x.tar")
    assert path.read_bytes() == b"b" * 4000 and not server.changes["/x.tar"]
    assert not list(place.glob("*.partial"))


@pytest.mark.parametrize("size", [3999, 4001])
def test_a_file_that_changes_its_size_is_fetched_again(server, size):
    server.files["/x.tar"] = b"a" * 4000
    server.changes["/x.tar"] = [b"b" * size]
    assert fetch(f"{server.url}/x.tar").read_bytes() == b"b" * size


def test_a_file_that_changes_again_and_again_leaves_nothing(server, place):
    server.files["/x.tar"] = b"a" * 4000
    server.changes["/x.tar"] = [bytes([i]) * 4000 for i in range(99)]
    with refused(DataError, "changed-while-fetched", url=f"{server.url}/x.tar"):
        fetch(f"{server.url}/x.tar")
    assert not [p for p in place.iterdir() if p.is_dir()]


def test_a_pack_that_is_replaced_meanwhile_is_fetched_whole(server, monkeypatch):
    monkeypatch.setattr(remote, "WORKERS", 1)  # or both files might come before
    url = serve(server, "p", pack({"x.npy": b"1", "y.npy": b"1"}))
    new = {f"/p/{name}": data for name, data in pack({"x.npy": b"2", "y.npy": b"2"}).items()}
    server.changes["/p/train/x.npy"] = [b"2"]
    server.with_it = new
    assert {b for n, b in content(fetch(url)).items() if "npy" in n} == {b"2"}


# The limit


def test_all_copies_together_keep_to_the_limit(memory):
    memory.pipe({f"/{name}/x": name.encode() * 4096 for name in "abc"})
    a, b = (fetch(f"memory://{name}", limit_bytes=10_000) for name in "ab")
    with refused(DataError, "cache-full", bytes=4096, limit=10_000, used=8192):
        fetch("memory://c", limit_bytes=10_000)
    assert a.exists() and b.exists() and fetch("memory://a", limit_bytes=0) == a
    shutil.rmtree(b.parent)  # as the sentence says
    assert fetch("memory://c", limit_bytes=10_000).exists()


@pytest.mark.parametrize(("size", "fits"), [(99, True), (100, True), (101, False)])
def test_larger_than_the_limit(memory, monkeypatch, place, size, fits):
    memory.pipe("/d/a", b"a" * size)
    monkeypatch.setenv("CHIPWISE_CACHE_BYTES", "1e2")
    if fits:
        assert (fetch("memory://d") / "a").stat().st_size == size
    else:
        with refused(DataError, "cache-full", data="memory://d", bytes=101, limit=100, cache=place):
            fetch("memory://d")
        assert not [p for p in place.iterdir() if p.is_dir()]


@pytest.mark.parametrize(("free", "limit", "facts"), [(199, None, {"limit": 99.5}), (99, 1000, {"free": 99})])
def test_a_small_disk(memory, monkeypatch, free, limit, facts):
    memory.pipe("/d/a", b"a" * 100)
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 0, free))
    with refused(DataError, "cache-full", bytes=100, **facts):
        fetch("memory://d", limit_bytes=limit)


def test_a_limit_that_is_no_number(monkeypatch, memory):
    monkeypatch.setenv("CHIPWISE_CACHE_BYTES", "lots")
    with refused(DataError, "cache-limit-unknown", value="lots"):
        memory.pipe("/d/a", b"a")
        local("memory://d")


def test_what_an_interrupted_fetch_left_makes_room(server, memory, place):
    url = serve(server, "p", pack({"a.npy": b"a" * 1000}))
    server.drops["/p/train/a.npy"] = 100
    with refused(DataError, "fetch-failed"):
        fetch(url, limit_bytes=2000)
    memory.pipe("/d/a", b"a" * 1900)
    fetch("memory://d", limit_bytes=2000)
    assert not list(place.glob("*.partial"))


# Several at once


def test_two_threads_fetch_the_same_once(server):
    files = pack({f"{i}.npy": b"%d" % i for i in range(4)})
    url = serve(server, "p", files)
    told, got = [], []
    reached = threading.Event()

    def say(line):
        told.append(line)
        if line == str(fact("fetched-elsewhere", data=url)):
            reached.set()

    class Until(threading.Barrier):
        """The first fetch waits until the second has found it."""

        def wait(self, timeout=None):
            assert reached.wait(timeout)
            return 0

    server.meet = Until(1)
    threads = [threading.Thread(target=lambda: got.append(local(url, say=say))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got[0] == got[1] and content(got[0]) == files
    assert all(server.gets(f"/p/train/{i}.npy") == 1 for i in range(4))


PROGRAM = "import sys; from chipwise.data.remote import local; print(local(sys.argv[1]), flush=True); input()"


@pytest.mark.slow
def test_a_killed_process_is_taken_over(server):
    files = pack({"a.npy": b"a" * 100, "b.npy": b"b" * 100})
    url = serve(server, "p", files)
    server.hang = "/p/train/b.npy"

    def start():
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    with start() as first:
        while ("GET", "/p/train/b.npy") not in server.asked or ("GET", "/p/train/a.npy") not in server.asked:
            assert first.poll() is None
        first.send_signal(signal.SIGKILL)
    server.hang = None
    with start() as second:
        path = Path(second.stdout.readline().strip())
        assert content(path) == files
        second.communicate("\n", timeout=30)
