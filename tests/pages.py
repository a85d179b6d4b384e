"""Reading pages as a test, and as a browser."""

import html
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

HOSTILE = "<script>alert('x')</script>\"><img src=https://example.com/x onerror=alert(1)>"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--force-device-scale-factor=1", "--force-prefers-reduced-motion",
)  # fmt: skip
_VOID = {"meta", "link", "br", "img", "input", "hr"}
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")


class Reader(HTMLParser):
    """Elements with their attributes and the visible text; every element must be closed."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += data


def browse(folder, text: str, *flags: str) -> str:
    """Chromium's standard output for a page, from an empty profile."""
    source = folder / "opened.html"
    source.write_text(text, encoding="utf-8")
    command = [BROWSER, *_FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, source.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def framed(text: str, width: int, height: int) -> str:
    """A page in a frame: a browser's own window is never as narrow as a telephone."""
    style = f"border:0;width:{width}px;height:{height}px;display:block"
    return f'<iframe srcdoc="{html.escape(text)}" style="{style}"></iframe>'
