"""Downloads, from a server of this test's own."""

import gc
import hashlib
import http.server
import socket
import threading
import warnings

import pytest

from chipwise.base.errors import DataError
from chipwise.data.datasets import published as fetch
from refusals import refused

CONTENT = bytes(range(256)) * 9000  # some chunks
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The URL of a folder with the file `data.gz`, and the list of requests made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "data.gz").write_bytes(CONTENT)
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tmp_path / "www"))

        def log_message(self, *arguments):
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/", asked
        running.shutdown()
        thread.join()
    with warnings.catch_warnings():  # pooch leaves the connection of a refused download to the collector
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_a_file_is_fetched_once_and_checked(server, capfd):
    url, asked = server
    (path,) = fetch("Data", url, {"data.gz": SHA256})
    assert path.read_bytes() == CONTENT and asked == ["/data.gz"]
    assert fetch("Data", url, {"data.gz": SHA256}) == [path] and asked == ["/data.gz"]
    out, err = capfd.readouterr()
    assert out == "" and "data.gz" in err


def test_a_damaged_file_in_the_cache_is_fetched_again(server):
    url, asked = server
    (path,) = fetch("Data", url, {"data.gz": SHA256})
    path.write_bytes(b"?")
    assert fetch("Data", url, {"data.gz": SHA256})[0].read_bytes() == CONTENT and len(asked) == 2


@pytest.mark.parametrize(
    ("file", "sha256", "word"), [("data.gz", "0" * 64, "0000"), ("missing.gz", SHA256, "404")]
)
def test_what_the_server_may_do_wrong(server, tmp_path, file, sha256, word):
    url, _ = server
    with refused(DataError, "download-failed", data="Data", url=url + file, files=[file]) as caught:
        fetch("Data", url, {file: sha256})
    assert word in caught.value.facts["reason"]
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def test_without_network_the_message_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        facts = {"url": url + "a.gz", "reason": "no connection", "files": ["a.gz", "b.gz"]}
        with refused(DataError, "download-failed", **facts):
            fetch("Data", url, {"a.gz": SHA256, "b.gz": SHA256})
    assert DataError.exit_code == 3


def test_a_cache_that_cannot_be_written(server, tmp_path):
    url, _ = server
    (tmp_path / "cache").write_bytes(b"a file where a folder should be")
    with refused(DataError, "download-failed"):
        fetch("Data", url, {"data.gz": SHA256})
