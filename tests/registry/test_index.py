"""The folders that runs are in."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.registry import index


def test_a_runs_folder_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*set MGPU_RUNS"):
        index.make_writable(tmp_path / "file" / "runs")
