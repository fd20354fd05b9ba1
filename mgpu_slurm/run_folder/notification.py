"""Tell a web hook how a run has ended: `--notify`. Whatever goes wrong there, the run has ended as it has."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress

from mgpu_slurm.core import log_lines
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.files import read_json, without_nan
from mgpu_slurm.core.formatting import duration, short_value, time_of
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.run_folder.states import CANCELLED, TERMINAL

SECONDS = 5.0
"""How long an answer may take: the nodes of the run are waiting."""


def check_address(address: str) -> None:
    """Check the address of a web hook as given; `$NAME` in it is a variable of the job's environment.

    Raises:
        UserError: it is none.
    """
    if not address.startswith(("http://", "https://", "$")):
        raise UserError(f"--notify {address!r}: expected the address of a web hook, such as https://example.org/hook")


def send(folder: RunFolder, address: str | None) -> None:
    """Post the end of a run, unless it continues or was cancelled. Returns after `SECONDS` at most."""
    if address is not None:
        # the disk may be full
        with suppress(OSError):
            _send(folder, address)


def _send(folder: RunFolder, address: str) -> None:
    state = records.read_state(folder)
    if state.state not in TERMINAL or state.state == CANCELLED:
        return
    expanded = os.path.expandvars(address)
    if not expanded.startswith(("http://", "https://")):
        name = address.partition("/")[0].strip("${}")
        log_lines.say(
            f"--notify: the end of the run was not posted: the job's environment has no web address in {name}"
        )
        return
    problems: list[str] = ["no answer"]

    def post() -> None:
        try:
            _post(expanded, json.dumps(without_nan(_facts(folder, state))).encode())
            problems.clear()
        except Exception as error:
            # not its message, which may contain the address: that of many services is a password
            problems[0] = f"{type(error).__name__} {getattr(error, 'code', '') or getattr(error, 'reason', '')}".strip()

    # the time-out of a connection covers neither the look-up of a name nor a server that sends a byte now and then
    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if problems:
        log_lines.say(f"--notify: the end of the run could not be posted: {problems[0]}")


def _post(address: str, body: bytes) -> None:
    # takes a while to import, and most runs need none
    from urllib.request import Request, urlopen

    request = Request(address, body, {"Content-Type": "application/json", "User-Agent": "mgpu-slurm"})
    with urlopen(request, timeout=SECONDS):
        pass


def _facts(folder: RunFolder, state: RunState) -> dict[str, object]:
    result = (read_json(folder.result) or {}).get("result", {})
    names = ("run", "state", "reason", "job_id", "attempts", "step", "progress", "metrics")
    times = ("submitted", "started", "ended")
    facts = {name: getattr(state, name) for name in (*names, *times)}
    return facts | {"result": result, "folder": str(folder.path), "text": _text(state)}


def _text(state: RunState) -> str:
    """Return the line that chat services show."""
    began, ended = time_of(state.started), time_of(state.ended)
    time = f"  in {duration((ended - began).total_seconds())}" if began and ended else ""
    why = f": {state.reason}" if state.reason else ""
    metrics = "".join(
        f"  {name} {short_value(value)}" for name, value in state.metrics.items() if isinstance(value, float)
    )
    return f"{state.state}  {state.run}{time}{why}{metrics}"
