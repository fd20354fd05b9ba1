"""What a checkpoint costs the training, and how long it takes, beside torch.save and torch.distributed.checkpoint."""

from __future__ import annotations

import json

from benchmarks.measure import difference, median
from benchmarks.project import JOBS, project
from benchmarks.report import Row, Section

ROUNDS = 30
TARGET_MS = 10


def run() -> Section:
    with project() as made:
        _, folder = made.submit(f"{JOBS}.saves", f"rounds={ROUNDS}")
        made.wait(folder)
        seconds = json.loads((folder / "seconds.json").read_text())
        size = json.loads((folder / "result.json").read_text())["result"]["bytes"]
    stood = {name: [pair[0] for pair in pairs] for name, pairs in seconds.items()}
    took = {name: [pair[1] for pair in pairs] for name, pairs in seconds.items()}
    cost = difference(stood["run"], stood["copy"]).scaled(1e3)
    rows = [
        Row("`run`: the training stands, over the copy alone", cost, "ms", 1, TARGET_MS),
        *(Row(f"{words}: the training stands", median(stood[name]).scaled(1e3), "ms", 1) for name, words in _WAYS),
        *(
            Row(f"{words}: until it is on the disk", median(took[name]).scaled(1e3), "ms", 0)
            for name, words in _WAYS
            if name != "copy"
        ),
    ]
    return Section("checkpoint", _ABOUT.format(size / 1e6), rows, _NOTES)


_WAYS = [
    ("copy", "a copy into memory that is used again"),
    ("run", "`run`"),
    ("torch", "`torch.save`, neither synced nor renamed"),
    ("torch, synced", "`torch.save`, fsync, rename"),
    ("dcp", "`torch.distributed.checkpoint.save`"),
    ("dcp, asynchronous", "`torch.distributed.checkpoint.async_save`"),
]

_ABOUT = (
    "The state of torchvision's ResNet-50 and of SGD with momentum, {:.0f} MB, on one CPU rank, saved in ways that take"
    " turns: `run.save()` and the next batch; a copy alone; and torch's own ways as they come. The training stands from"
    " the call until it goes on."
)
_NOTES = [
    "Those of `run` have checksums, are synced and get their name when they are whole, and the checkpoint before is"
    " deleted meanwhile. `torch.save` as it is loses the file where the node dies, and `torch.distributed.checkpoint`"
    " neither syncs the folder nor writes checksums.",
    "The training goes on while a thread writes, and shares two cores with it here.",
]
