"""A real headless Chromium for tests of HTML pages: the one that `make cluster-deps` unpacks, driven by Playwright."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from tests.on_slurm.cluster import PREPARED

MISSING = "a real Chromium needs make cluster-deps"

_USR = PREPARED / "packages/usr"
_PROGRAM = _USR / "lib/chromium/chromium-headless-shell"

_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>
  <dir>{fonts}</dir>
  <cachedir>{cache}</cachedir>
  <alias><family>sans-serif</family><prefer><family>DejaVu Sans</family></prefer></alias>
  <alias><family>serif</family><prefer><family>DejaVu Serif</family></prefer></alias>
  <alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
"""

_RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")

# without it axe waits forever: timers of a page whose scripts are disabled never fire
_TIMERS = """() => {
    window.setTimeout = (call, delay, ...values) => { Promise.resolve().then(() => call(...values)); return 1; };
}"""

_STICKING_OUT = """width => {
    if (document.documentElement.scrollWidth <= width) return [];
    const ends = element => Math.round(element.getBoundingClientRect().right + window.scrollX);
    const found = [...document.body.querySelectorAll("*")].filter(element => ends(element) > width);
    return [`page: ${document.documentElement.scrollWidth} px`,
            ...found.map(element => `${element.cloneNode().outerHTML}: ${ends(element)} px`)];
}"""


def is_there() -> bool:
    with contextlib.suppress(PermissionError):
        return (PREPARED / "ready").exists() and _PROGRAM.exists()
    return False


@contextmanager
def started(folder: Path) -> Iterator[Browser]:
    """Start a Chromium, and stop it at the end. It also ends if this process does, however that happens.

    Args:
        folder: an empty one, for the settings and the cache of its fonts.
    """
    fonts = folder / "fonts.conf"
    fonts.write_text(_FONTS.format(fonts=_USR / "share/fonts", cache=folder))
    libraries = [*_USR.glob("lib/*-linux-gnu*"), *_USR.glob("lib/*-linux-gnu*/pulseaudio")]
    environ = os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, libraries)), "FONTCONFIG_FILE": str(fonts)}
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=_PROGRAM, env={**environ}) as browser,
    ):
        yield browser


class View:
    """An open page, and what it has done so far."""

    def __init__(self, page: Page, file: str) -> None:
        """
        Args:
            file: the address of the file that the page is to show.
        """
        self.page = page
        self._file = file
        self._errors: list[str] = []
        self._requests: list[str] = []
        page.context.on("console", self._on_message)
        page.context.on("weberror", lambda error: self._errors.append(str(error.error)))
        page.context.on("request", self._on_request)
        page.on("websocket", lambda socket: self._requests.append(socket.url))

    def _on_message(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._errors.append(message.text)

    def _on_request(self, request: Request) -> None:
        if request.url != self._file:
            self._requests.append(request.url)

    @property
    def errors(self) -> list[str]:
        """The errors on the console, which include what the page's security policy refused, and uncaught exceptions."""
        self._catch_up()
        return self._errors

    @property
    def requests(self) -> list[str]:
        """The address of each request but those for the file itself."""
        self._catch_up()
        return self._requests

    def _catch_up(self) -> None:
        # when the page answers, all that it did before has been recorded
        self.page.evaluate("0")


@contextmanager
def opened(browser: Browser, file: Path, dark: bool = False, width: int = 1280, script: bool = True) -> Iterator[View]:
    """Open a file in a window of its own. No request leaves the browser.

    Args:
        width: of the window in pixels; below 600 the browser behaves as a phone's.
        script: False disables the page's scripts, as a user can; the functions of this module still work.
    """
    with browser.new_context(
        color_scheme="dark" if dark else "light",
        viewport={"width": width, "height": 800},
        is_mobile=width < 600,
        java_script_enabled=script,
        offline=True,
    ) as context:
        view = View(context.new_page(), file.absolute().as_uri())
        view.page.goto(file.absolute().as_uri())
        if not script:
            view.page.evaluate(_TIMERS)
        yield view


def violations(page: Page) -> list[str]:
    """Return what axe-core finds against WCAG 2.2 AA and best practice: the rule, the help and the element."""
    found = Axe().run(page, options={"runOnly": _RULES, "resultTypes": ["violations"]}).response["violations"]
    return [f"{rule['id']}: {rule['help']}: {node['html']}" for rule in found for node in rule["nodes"]]


def overflow(page: Page) -> list[str]:
    """Return the elements that end to the right of the window, if the page scrolls sideways."""
    assert page.viewport_size is not None
    found: list[str] = page.evaluate(_STICKING_OUT, page.viewport_size["width"])
    return found


def pdf_pages(page: Page) -> int:
    """Return the number of sheets of A4 that the printed page has."""
    return len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4")))
