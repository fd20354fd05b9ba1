"""The means to test HTML pages in a real Chromium: it finds each kind of fault, and none in a clean page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests import browser as chromium
from tests.browser import opened, overflow, pdf_pages, violations
from tests.support import REPOSITORY, processes_of, require, wait_until

_HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>A page</title>
<style>
:root { color-scheme: light dark; font: 16px sans-serif; }
@media print { button { display: none; } section { break-before: page; } }
</style>
"""
_CLOSED = """<meta http-equiv="Content-Security-Policy" content="default-src 'none';
    script-src 'unsafe-inline'; style-src 'unsafe-inline'">
"""
_BODY = """<main><h1>A page</h1><p id="state">static</p><button>Sort</button><section>More</section></main>
<script>
state.textContent = "live";
document.querySelector("button").onclick = () => state.textContent = "sorted";
</script>
"""


def write(folder: Path, *more: str, head: str = _HEAD + _CLOSED) -> Path:
    """Write a clean page with something more in it."""
    page = folder / "a page.html"
    page.write_text("".join([head, _BODY, *more]))
    return page


@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_clean_page_has_no_fault(browser: Browser, tmp_path: Path, dark: bool, width: int, script: bool) -> None:
    with opened(browser, write(tmp_path), dark, width, script) as view:
        assert view.page.inner_text("#state") == ("live" if script else "static")
        assert view.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") is dark
        assert view.page.evaluate("innerWidth") == width
        assert violations(view.page) == []
        assert overflow(view.page) == []
        assert view.errors == view.requests == []


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("console.error('oh')", "oh"),
        ("throw new Error('oh')", "oh"),
        ("Promise.reject(new Error('oh'))", "oh"),
        ("new Image().src = 'http://another.test/'", "violates the following Content Security Policy"),
    ],
)
def test_error_is_recorded(browser: Browser, tmp_path: Path, code: str, error: str) -> None:
    with opened(browser, write(tmp_path, f"<script>{code}</script>")) as view:
        assert len(view.errors) == 1
        assert error in view.errors[0]


def test_error_of_a_click_is_recorded_at_once(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, write(tmp_path, "<script>onclick = () => console.error('oh')</script>")) as view:
        assert view.errors == []
        view.page.click("button")
        assert view.errors == ["oh"]


@pytest.mark.parametrize(
    ("more", "address"),
    [
        ("<img alt='' src='http://another.test/'>", "http://another.test/"),
        ("<img alt='' src='image.png'>", "{folder}/image.png"),
        ("<link rel=stylesheet href='style.css'>", "{folder}/style.css"),
        ("<iframe title=frame src='frame.html'></iframe>", "{folder}/frame.html"),
        ("<script>fetch('http://another.test/').catch(() => 0)</script>", "http://another.test/"),
        ("<script>navigator.sendBeacon('http://another.test/')</script>", "http://another.test/"),
        ("<script>new WebSocket('ws://another.test/')</script>", "ws://another.test/"),
    ],
)
def test_request_is_recorded(browser: Browser, tmp_path: Path, more: str, address: str) -> None:
    with opened(browser, write(tmp_path, more, head=_HEAD)) as view:
        assert view.requests == [address.format(folder=tmp_path.as_uri())]


@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ("<main><input></main>", "label: "),
        ("<p style='color: #777; background: #888'>Faint</p>", "color-contrast: "),
        ("<p>Outside of main</p>", "region: "),
        (
            "<button style='all: unset; display: block; width: 9px; height: 9px' aria-label=a></button>" * 4,
            "target-size: ",
        ),
    ],
)
def test_violation_is_found(browser: Browser, tmp_path: Path, more: str, rule: str, script: bool) -> None:
    with opened(browser, write(tmp_path, more), script=script) as view:
        assert any(found.startswith(rule) for found in violations(view.page)), violations(view.page)


def test_overflow_names_what_sticks_out(browser: Browser, tmp_path: Path) -> None:
    wide = write(tmp_path, "<div id=wide style='width: 500px; margin: 0'>Wide</div>")
    with opened(browser, wide) as view:
        assert overflow(view.page) == []
    with opened(browser, wide, width=390) as view:
        page, *elements = overflow(view.page)
        assert page.startswith("page: 50")
        assert elements == ['<div id="wide" style="width: 500px; margin: 0"></div>: 508 px']


def test_page_without_a_viewport_overflows_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    page = write(tmp_path, head=_HEAD.replace('<meta name="viewport" content="width=device-width">', ""))
    with opened(browser, page, width=390) as view:
        assert overflow(view.page)[0] == "page: 980 px"


@pytest.mark.parametrize(("font", "width"), [("sans-serif", 18), ("serif", 21), ("monospace", 20)])
def test_text_is_as_wide_on_every_machine(browser: Browser, tmp_path: Path, font: str, width: int) -> None:
    with opened(browser, write(tmp_path, f"<span style='font: 16px {font}'>iM</span>")) as view:
        assert view.page.evaluate("document.querySelector('span').offsetWidth") == width


def test_print_and_keyboard(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, write(tmp_path)) as view:
        view.page.keyboard.press("Tab")
        view.page.keyboard.press("Enter")
        assert view.page.inner_text("#state") == "sorted"
        assert pdf_pages(view.page) == 2
        view.page.emulate_media(media="print")
        assert not view.page.is_visible("button")


def test_killed_test_leaves_no_browser(tmp_path: Path) -> None:
    require(None if chromium.is_there() else chromium.MISSING)
    code = "import sys, pathlib, tests.browser\nwith tests.browser.started(pathlib.Path(sys.argv[1])): print(), input()"
    environ = os.environ | {"MGPU_RUN_FOLDER": str(tmp_path)}
    words = [sys.executable, "-uc", code, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=REPOSITORY, env=environ, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        # this one, that of Playwright, and those of the browser
        wait_until(lambda: len(processes_of(tmp_path)) > 2)
        process.kill()
    wait_until(lambda: processes_of(tmp_path) == [])
