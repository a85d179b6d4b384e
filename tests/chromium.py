"""Pages in Chromium as a reader sees them: at a width, light or dark, looked over by axe-core.

Chromium is driven by its own protocol (https://chromedevtools.github.io/devtools-protocol), over a socket of
this machine. axe-core is a file that npm brings (`npm install --no-save axe-core`); nothing is fetched here.
"""

import asyncio
import base64
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from pages import _FLAGS, BROWSER

ROOT = Path(__file__).parents[1]
LOOKS = [(width, scheme) for width in (390, 1280) for scheme in ("light", "dark")]


def axe() -> Path | None:
    """axe-core's script: `AXE_CORE`, or beside the code, or where npm keeps what is for all."""
    folders = [ROOT / "node_modules"]
    if npm := shutil.which("npm"):
        asked = subprocess.run([npm, "root", "-g"], capture_output=True, text=True)
        folders.append(Path(asked.stdout.strip()))
    files = [Path(os.environ.get("AXE_CORE", "none")), *(f / "axe-core" / "axe.min.js" for f in folders)]
    return next((file for file in files if file.is_file()), None)


class Seen(NamedTuple):
    page: str
    width: int
    scheme: str
    wider: list[str]
    """What sticks out of the page, where the page is wider than its window."""
    faults: list[str]
    """What axe-core finds against WCAG 2 A and AA: rule, and the first elements."""


OUTSIDE = """(() => {
  const wide = document.documentElement.scrollWidth > innerWidth;
  if (!wide) return [];
  return [...document.querySelectorAll("body *")]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
    .slice(0, 5).map(e => e.outerHTML.slice(0, 100));
})()"""
FAULTS = """axe.run(document, {runOnly: ["wcag2a", "wcag2aa"]}).then(found => found.violations.map(v =>
  v.id + ": " + v.nodes.slice(0, 3).map(n => n.html.slice(0, 120) + " " + (n.any[0] || {message: ""}).message)
  .join(" | ")))"""


def look(pages: dict[str, str], script: Path, folder: Path) -> list[Seen]:
    """Each page, a name and a URL, in all `LOOKS`; `folder` gets the screenshots."""
    return asyncio.run(_look(pages, script.read_text(), folder))


async def _look(pages, script, folder):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        return await _looks(pages, script, folder, Path(profile))


async def _looks(pages, script, folder, profile):
    seen = []
    async with _tab(profile) as ask:
        await ask("Page.enable")
        # Not the look that the page before chose
        await ask("Page.addScriptToEvaluateOnNewDocument", source="localStorage.clear()")
        for name, url in pages.items():
            for width, scheme in LOOKS:
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
                await ask("Emulation.setDeviceMetricsOverride", **size)
                feature = {"name": "prefers-color-scheme", "value": scheme}
                await ask("Emulation.setEmulatedMedia", features=[feature])
                await ask("Page.navigate", url=url)
                await ask("Runtime.evaluate", expression=_LOADED, awaitPromise=True)
                await ask("Runtime.evaluate", expression=script)
                wider, faults = [await _value(ask, text) for text in (OUTSIDE, FAULTS)]
                picture = await ask("Page.captureScreenshot", captureBeyondViewport=True)
                (folder / f"{name}-{width}-{scheme}.png").write_bytes(base64.b64decode(picture["data"]))
                seen.append(Seen(name, width, scheme, wider, faults))
    return seen


_LOADED = """new Promise(done => {
  const settle = () => setTimeout(done, 500);
  document.readyState == "complete" ? settle() : addEventListener("load", settle);
})"""


async def _value(ask, expression):
    answer = await ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
    assert "exceptionDetails" not in answer, answer
    return answer["result"]["value"]


@asynccontextmanager
async def _tab(profile):
    """A tab of a new browser, as a function that calls a method of the protocol."""
    import aiohttp

    flags = [*_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
    with subprocess.Popen([BROWSER, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            for _ in range(600):
                if (profile / "DevToolsActivePort").exists():
                    break
                await asyncio.sleep(0.1)
            port = (profile / "DevToolsActivePort").read_text().split()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    tabs = await answer.json()
                address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    yield _asker(socket)
        finally:
            browser.terminate()


def _asker(socket):
    count = 0

    async def ask(method, **parameters):
        nonlocal count
        count += 1
        await socket.send_json({"id": count, "method": method, "params": parameters})
        async for message in socket:
            answer = json.loads(message.data)
            if answer.get("id") == count:
                assert "error" not in answer, (method, answer)
                return answer["result"]
        raise AssertionError(f"{method}: the browser went away")

    return ask
