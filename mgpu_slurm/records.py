"""A run's live state and its history on disk: `state.json` and `attempts.jsonl`.

`state.json` has one writer at a time: the submission, then the batch step or local supervisor, then rank 0 while the
ranks live, then the batch step or supervisor again.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from mgpu_slurm.paths import RunFolder, append_jsonl, read_json, read_jsonl, write_json

FIRST_STATE: dict[str, Any] = {
    "run": "",
    "kind": "run",
    "state": "PENDING",
    "job_id": None,
    "attempts": 0,
    "nodes": 1,
    "ranks": 1,
    "step": 0,
    "progress": 0,
    "metrics": {},
    "submitted": None,
    "started": None,
    "ended": None,
    "reason": "",
    "executor": "",
}
"""Every name of a state, as it stands before anything has happened."""


def now() -> str:
    """Local time with its zone, to the millisecond, in ISO 8601."""
    return datetime.now(timezone.utc).astimezone().isoformat(timespec="milliseconds")


def read_state(folder: RunFolder) -> dict[str, Any]:
    """The state, whole; one that cannot be read is UNKNOWN, which counts as alive."""
    try:
        state = read_json(folder.state) or {}
    except ValueError:
        state = {"state": "UNKNOWN", "reason": f"{folder.state.name} cannot be read"}
    return FIRST_STATE | {"run": folder.run} | state


def update_state(folder: RunFolder, *, sync: bool = True, **changes: Any) -> dict[str, Any]:
    """Writes the state with these names changed and returns it."""
    state = read_state(folder) | changes
    write_json(folder.state, state, sync)
    return state


def record_event(folder: RunFolder, event: str, **facts: Any) -> None:
    """Appends `submitted`, `unconfirmed`, `started`, `ended` or `requeued` to the run's history."""
    append_jsonl(folder.attempts, {"event": event, "time": now(), **facts})


def events(folder: RunFolder) -> list[dict[str, Any]]:
    return list(read_jsonl(folder.attempts))


def submitted_job(folder: RunFolder) -> str | None:
    """The job id that sbatch gave at the newest submission, which is known before the job itself can write it down."""
    return next((event["job_id"] for event in reversed(events(folder)) if event["event"] == "submitted"), None)


def unconfirmed_token(folder: RunFolder) -> str | None:
    """The token of the newest submission, where nobody could tell whether SLURM took it; None once that is known."""
    newest = next(reversed(events(folder)), None)
    return newest["token"] if newest is not None and newest["event"] == "unconfirmed" else None


def attempts_started(folder: RunFolder) -> int:
    return sum(event["event"] == "started" for event in events(folder))


def failure_line(folder: RunFolder) -> str:
    """The first cause of a failed run in one line, for `status`."""
    failure = read_json(folder.failure) or {}
    message = (str(failure.get("message", "")).splitlines() or [""])[0]
    if "error" not in failure:
        return message or "failed before a rank could say why; look at the launch log"
    return f"rank {failure['rank']} on {failure['node']}: {failure['error']}: {message}"
