"""One look after the other, whatever becomes of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mgpu_slurm import doctor
from mgpu_slurm.core.retry import quiet
from mgpu_slurm.doctor import machine_checks
from mgpu_slurm.doctor.check_results import Finding, ok


def test_check_that_raises_is_a_finding_and_others_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd() -> Iterator[Finding]:
        yield ok("slurm", "so far so good")
        raise ValueError("an answer unlike any other")

    monkeypatch.setattr(machine_checks, "has_slurm", lambda: False)
    monkeypatch.setattr(machine_checks, "local_findings", odd)
    found = list(doctor.look_here(tmp_path, quiet))
    words = [finding.text for finding in found if finding.check == "slurm"]
    assert words == ["so far so good", "slurm: the check itself failed: ValueError: an answer unlike any other"]
    assert {"cluster file", "torch"} <= {finding.check for finding in found}
