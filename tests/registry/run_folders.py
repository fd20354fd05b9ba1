"""Folders of runs with files of known sizes."""

from __future__ import annotations

from pathlib import Path

from mgpu_slurm.run_folder.layout import RunFolder


def make_run(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.create()
    sizes = {
        folder.checkpoint(1) / "model.pt": 5000,
        folder.checkpoint(2) / "deep" / "model.pt": 6000,
        folder.rank_log(1, 0): 70,
        folder.tensorboard / "events": 300,
        folder.code / "logs" / "train.py": 40,
        folder.spec: 9,
        folder.path / "trials" / "0" / "notes": 1,
    }
    for file, size in sizes.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * size)
    return folder
