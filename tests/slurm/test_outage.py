from __future__ import annotations

import re
import time

import pytest

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.slurm import commands
from mgpu_slurm.slurm.commands import BUSY, UNREACHED, Patience, SlurmUnavailable, wait_out


@pytest.fixture
def notes() -> list[str]:
    return []


def test_outage_is_reported_once_with_the_deadline(notes: list[str]) -> None:
    some = Patience(notes.append, seconds=120)
    some.tell(SlurmUnavailable("socket timed out"))
    some.tell(SlurmUnavailable("socket timed out"))
    expected = time.strftime("%H:%M", time.localtime(time.time() + 120))
    (note,) = notes
    assert re.fullmatch(
        rf"SLURM's controller does not answer; trying again until {expected}:\d\d; Ctrl-C stops waiting", note
    )


def test_busy_controller_is_not_called_silent(notes: list[str]) -> None:
    Patience(notes.append).tell(SlurmUnavailable("queue full", BUSY))
    assert notes[0].startswith("SLURM's controller accepts no jobs at the moment; trying again until ")


def test_pauses_grow_up_to_the_last_value(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(commands, "OUTAGE_PAUSES", (1.0, 5.0))
    monkeypatch.setattr(time, "sleep", pauses.append)
    some = Patience()
    for _ in range(3):
        some.pause()
    assert pauses == [1.0, 5.0, 5.0]


def test_wait_out_retries_until_there_is_an_answer(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "OUTAGE_PAUSES", (0.0,))
    answers = iter([SlurmUnavailable("no"), SlurmUnavailable("no"), "yes"])

    def ask() -> str:
        said = next(answers)
        if isinstance(said, Exception):
            raise said
        return said

    assert wait_out(ask, notes.append) == "yes"
    assert len(notes) == 1


def test_wait_out_raises_the_error_after_the_deadline(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "OUTAGE_SECONDS", 0.0)

    def ask() -> str:
        raise SlurmUnavailable("connection refused", UNREACHED)

    with pytest.raises(SlurmUnavailable, match="connection refused"):
        wait_out(ask, notes.append)
    assert notes == []


def test_refusal_is_not_retried(notes: list[str]) -> None:
    def ask() -> str:
        raise ClusterError("no such partition")

    with pytest.raises(ClusterError, match="no such partition"):
        wait_out(ask, notes.append)
    assert notes == []
