"""A run's live state and its history on disk: `state.json` and `attempts.jsonl`.

`state.json` has one writer at a time: the submission, then the batch step or local supervisor, then rank 0 while the
ranks live, then the batch step or supervisor again.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
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


SUBMISSION_TAKES = timedelta(minutes=2)
"""How long sbatch may take to answer before somebody else looks whether the job is there."""


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
    """Appends `submitting`, `submitted`, `started`, `ended` or `requeued` to the run's history."""
    append_jsonl(folder.attempts, {"event": event, "time": now(), **facts})


def events(folder: RunFolder) -> list[dict[str, Any]]:
    return list(read_jsonl(folder.attempts))


def submitted_job(folder: RunFolder) -> str | None:
    """The job id that sbatch gave at the newest submission, which is known before the job itself can write it down."""
    newest = _newest_submission(folder)
    return newest["job_id"] if newest is not None and newest["event"] == "submitted" else None


def unconfirmed_token(folder: RunFolder) -> str | None:
    """The token of the newest submission, where it was begun a while ago and no answer of SLURM was written down."""
    newest = _newest_submission(folder)
    if newest is None or newest["event"] == "submitted":
        return None
    age = datetime.now(timezone.utc) - datetime.fromisoformat(newest["time"])
    token: str = newest["token"]
    return token if age > SUBMISSION_TAKES else None


def _newest_submission(folder: RunFolder) -> dict[str, Any] | None:
    ours = [event for event in events(folder) if event["event"] in ("submitting", "submitted")]
    return ours[-1] if ours else None


def attempts_started(folder: RunFolder) -> int:
    return sum(event["event"] == "started" for event in events(folder))


def failure_line(folder: RunFolder) -> str:
    """The first cause of a failed run in one line, for `status`."""
    failure = read_json(folder.failure) or {}
    message = (str(failure.get("message", "")).splitlines() or [""])[0]
    if "error" not in failure:
        return message or "failed before a rank could say why; look at the launch log"
    return f"rank {failure['rank']} on {failure['node']}: {failure['error']}: {message}"
