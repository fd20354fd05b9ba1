"""`make pictures`: the pictures of README and documentation, from real runs on this machine."""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page

from tests import browser
from tests.support import wait_until

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COLUMNS = 100

SWEEP = ["sweep", "sweeps/digits_hyperband.yaml", "study=digits", "trials=40", "workers=2"]
SEEDS = ["submit", "jobs.digits", "--seeds", "3", "epochs=10"]

_TERMINAL = """<!doctype html><style>
body {{ margin: 14px; width: max-content; background: white }}
div {{ background: #1d1f27; border-radius: 8px; box-shadow: 0 1px 4px #0006; overflow: hidden }}
p {{ margin: 0; padding: 7px 12px; background: #2b2e3a; color: #b9bcc8; font: 13px sans-serif }}
pre {{ margin: 0; padding: 12px 16px; color: #eceef4; font: 14px/1.35 monospace }}
</style><div><p>{title}</p><pre>{text}</pre></div>"""


def main() -> None:
    if not browser.is_there():
        sys.exit(browser.MISSING)
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as fonts:
        environ = os.environ | {"MGPU_RUNS": f"{base}/runs", "XDG_STATE_HOME": f"{base}/state", "COLUMNS": str(COLUMNS)}
        with browser.started(Path(fonts)) as started:
            _call(environ, *SWEEP, "--executor", "local", "--no-follow")
            _terminal(started, "status-watch", "mgpu-slurm status digits --watch", _half_way(environ))
            _call(environ, "wait", "digits")
            for width in ("32", "8"):
                _call(environ, *SEEDS, f"width={width}", "--name", f"width-{width}", "--executor", "local", "--follow")
            page = Path(base, "report.html")
            _call(environ, "report", "width-32", "width-8", "digits", "-o", str(page), "--title", "Handwritten digits")
            _report(started, page)
            _hparams(started, environ)


def _call(environ: dict[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "mgpu_slurm", *words]
    return subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout


def _half_way(environ: dict[str, str]) -> str:
    """Return what `status` shows of the sweep when some of its trials have ended."""

    def ended() -> bool:
        counts = json.loads(_call(environ, "status", "digits", "--json"))[0]["trials"]
        return bool(counts["COMPLETE"] + counts["PRUNED"] >= 10)

    wait_until(ended, 300)
    return _call(environ, "status", "digits")


def _terminal(started: Browser, name: str, title: str, text: str) -> None:
    page = started.new_page(viewport={"width": 1200, "height": 600})
    page.set_content(_TERMINAL.format(title=html.escape(title), text=html.escape(text.rstrip())))
    page.locator("body").screenshot(path=DOCS / f"{name}.png")
    page.close()


def _report(started: Browser, file: Path) -> None:
    """Make the pictures of a report: its beginning, and its section on the sweep."""
    page = started.new_page(viewport={"width": 1200, "height": 1000})
    page.goto(file.as_uri())
    page.wait_for_timeout(500)
    page.screenshot(path=DOCS / "report.png")
    page.locator("#sweep-0").screenshot(path=DOCS / "report-sweep.png")
    page.close()


@contextmanager
def _tensorboard(environ: dict[str, str]) -> Iterator[str]:
    command = [sys.executable, "-m", "mgpu_slurm", "tensorboard", "digits", "--json"]
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = ""
        while not said.rstrip().endswith("}"):
            said += server.stdout.readline()
        yield json.loads(said)["address"]
        server.terminate()


def _hparams(started: Browser, environ: dict[str, str]) -> None:
    with _tensorboard(environ) as address:
        page = started.new_page(viewport={"width": 1400, "height": 640})
        page.goto(f"{address}#hparams")
        _wait_for_rows(page)
        page.screenshot(path=DOCS / "hparams.png")
        page.close()


def _wait_for_rows(page: Page) -> None:
    page.get_by_text("digits/trials/0").first.wait_for(timeout=60_000)
    page.wait_for_timeout(1000)


if __name__ == "__main__":
    main()
