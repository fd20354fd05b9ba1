"""Read back what a tracker has of a run, with the tracker's own library, in a process of its own.

`python -m tests.trackers.reading FOLDER TRACKER` prints JSON. W&B has no reader: its files are read with LevelDB's
format, apart from the package's reader.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from mgpu_slurm.core.files import read_json
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import REPOSITORY, Project

Points = dict[str, list[tuple[int, float]]]
"""The steps and values of each metric, in the order in which the tracker has them, repeated ones included."""


def points(project: Project, folder: Path, tracker: str) -> Points:
    command = [sys.executable, "-m", "tests.trackers.reading", str(folder), tracker]
    environ = os.environ | project.environ
    done = subprocess.run(command, env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: [(step, value) for step, value in each] for name, each in found.items()}


def read(folder: RunFolder, tracker: str) -> Points:
    (sent,) = [
        each for each in read_json(folder.sinks).values() if each["destination"].startswith(tracker) and each["id"]
    ]
    _, _, place = sent["destination"].partition("=")
    return read_wandb(folder) if tracker == "wandb" else read_mlflow(place, sent["id"])


def read_mlflow(place: str, run_id: str) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(place.partition("#")[0])
    names = client.get_run(run_id).data.metrics
    return {name: [(each.step, each.value) for each in client.get_metric_history(run_id, name)] for name in names}


def read_wandb(folder: RunFolder) -> Points:
    found: Points = {}
    for path in sorted(folder.path.glob("wandb/offline-run-*/*.wandb")):
        for row in rows(path.read_bytes()):
            for name, value in row.items():
                if name[:1] != "_":
                    found.setdefault(name, []).append((int(row["_step"]), value))
    return found


def rows(data: bytes) -> list[dict[str, float]]:
    """Return the rows in W&B's file: records in blocks of 32 KiB, each in pieces with 7 bytes before them."""
    from wandb.proto import wandb_internal_pb2

    records, place = [b""], 7
    while place < len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        records[-1] += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            records.append(b"")
    found = []
    for content in records[:-1]:
        record = wandb_internal_pb2.Record.FromString(content)  # type: ignore[attr-defined]
        if record.HasField("history"):
            found.append(
                {
                    item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    return found


if __name__ == "__main__":
    print(json.dumps(read(RunFolder(Path(sys.argv[1])), sys.argv[2])))
