"""A headless Chromium that tests and pictures drive over a pipe, by its DevTools protocol: no port, no driver."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
# No host name resolves: a page gets nothing from outside.
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", "about:blank",
)  # fmt: skip
MIDDLE = """(() => {
  const found = document.querySelector(%s);
  found.scrollIntoView({ block: "center" });
  const box = found.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
})()"""
LIMIT_S = 60.0
MESSAGE_MAX = 64 << 20
SAID_MAX = 200


def browser() -> str | None:
    """Return Chromium, or the browser named by KVFORGE_BROWSER."""
    named = os.environ.get("KVFORGE_BROWSER")
    if named:
        return None if "firefox" in named else shutil.which(named)
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """`async with Browser() as browser:` — one window. said: errors and the log of the page's scripts; asked: fetched
    addresses."""

    def __init__(self) -> None:
        self._rid = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.said: deque[str] = deque(maxlen=SAID_MAX)
        self.asked: deque[str] = deque(maxlen=10 * SAID_MAX)

    async def __aenter__(self) -> Self:
        self._home = Path(tempfile.mkdtemp(prefix="kvf-browser-"))
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        path = browser()
        assert path is not None, "asked without a browser"
        # The browser reads from 3 and writes to 4; a shell puts the pipes there.
        shell = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        with (self._home / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", shell, path, *OPTIONS, f"--user-data-dir={self._home}"],
                pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | {"HOME": str(self._home)}, start_new_session=True,
            )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader(limit=MESSAGE_MAX)
        reading = os.fdopen(ours_in, "rb", 0)
        self._read_side, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self._reader), reading)
        self._write_side, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(ours_out, "wb", 0))
        self._listening = asyncio.create_task(self._listen())
        self._session = ""
        targets = (await self.send("Target.getTargets"))["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = (await self.send("Target.attachToTarget", targetId=page, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._listening.cancel()
        self._write_side.close()  # the browser exits on this
        self._read_side.close()
        try:
            await asyncio.to_thread(self._process.wait, LIMIT_S)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            shutil.rmtree(self._home, ignore_errors=True)

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result. Raises AssertionError with the browser's message."""
        self._rid += 1
        message = {"id": self._rid, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        answer = self._answers[self._rid] = asyncio.get_running_loop().create_future()
        self._write_side.write(json.dumps(message).encode() + b"\0")
        found = await asyncio.wait_for(answer, LIMIT_S)
        assert "error" not in found, (method, found)
        result: dict[str, Any] = found["result"]
        return result

    async def look(
        self, width: int = 1280, height: int = 900, *, dark: bool = False, ratio: float = 1.0, forced: bool = False
    ) -> None:
        """Set the window's size, dark mode, and forced colours of a contrast theme."""
        size = {"width": width, "height": height, "deviceScaleFactor": ratio, "mobile": width < 500}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        media += [{"name": "forced-colors", "value": "active" if forced else "none"}]
        await self.send("Emulation.setEmulatedMedia", features=media)

    async def go(self, url: str) -> None:
        """Load a page."""
        await self.send("Page.navigate", url=url)

    async def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; promises are awaited. Raises AssertionError with a thrown
        error."""
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str, limit_s: float = LIMIT_S) -> Any:
        """Wait until an expression is true, evaluated with each frame; return it."""
        asked = (
            "new Promise((found) => { const look = () => { let value; try { value = (%s); } catch { value = null; } "
            "if (value) found(value); else setTimeout(look, 20); }; look(); })"
        )
        deadline = asyncio.get_running_loop().time() + limit_s
        while True:
            left_s = deadline - asyncio.get_running_loop().time()
            try:
                return await asyncio.wait_for(self.run(asked % expression), max(left_s, 0.01))
            except TimeoutError:
                shown = await self.run("document.body.innerText")
                raise AssertionError(f"not within {limit_s:g} s: {expression}\n{shown}\n{list(self.said)}") from None
            except AssertionError as error:  # another page loaded meanwhile
                if "context" not in str(error) and "navigated" not in str(error):
                    raise

    async def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        x, y = await self.run(MIDDLE % json.dumps(selector))
        await self.point(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def point(self, x: float, y: float) -> None:
        """Move the pointer to an element."""
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def press(self, key: str) -> None:
        """Press a key by its name, such as Tab, Enter or ArrowDown."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    async def write(self, text: str) -> None:
        """Type into the focused element."""
        await self.send("Input.insertText", text=text)

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        """Return a PNG of the window, or of the whole page."""
        found = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    async def _listen(self) -> None:
        while True:
            try:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            except asyncio.IncompleteReadError:
                for answer in self._answers.values():
                    if not answer.done():
                        answer.set_exception(AssertionError("the browser has ended"))
                return
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if not answer.done():
                    answer.set_result(message)
                continue
            parameters = message.get("params", {})
            match message["method"]:
                case "Runtime.exceptionThrown":
                    self.said.append(str(parameters["exceptionDetails"]))
                case "Runtime.consoleAPICalled":
                    self.said.append(" ".join(str(one.get("value")) for one in parameters["args"]))
                case "Log.entryAdded":
                    self.said.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
                case "Network.requestWillBeSent":
                    self.asked.append(parameters["request"]["url"])
