"""Time limits and the signals that announce them: which formats are read, and what is refused."""

from __future__ import annotations

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.time_limit import parse_signal, parse_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60", 3600), ("1:30", 90), ("1:00:00", 3600), ("1-0", 86400), ("2-3:04", 183840), ("1-2:3:4", 93784)],
)
def test_parse_time_reads_all_formats_of_sbatch(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["-5", "0", "0:00", "ten", "", "1:2:3:4", "1-", "1.5"])
def test_parse_time_rejects_other_text(text: str) -> None:
    with pytest.raises(UserError, match=f"--time '{text}'"):
        parse_time(text)


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("USR2", None, ("USR2", None)),
        ("USR2", 3600, ("USR2", 120)),
        ("USR2", 50, ("USR2", 10)),
        ("SIGUSR1@30", 60, ("USR1", 30)),
        ("usr1@30", 60, ("USR1", 30)),
    ],
)
def test_parse_signal_returns_name_and_lead(text: str, limit: int | None, expected: tuple[str, int | None]) -> None:
    assert parse_signal(text, limit) == expected


@pytest.mark.parametrize(
    ("text", "limit", "words"),
    [
        ("USR2@60", 60, "lead of 60 s must be shorter than the time limit of 60 s"),
        ("USR2@60", None, "need a --time"),
        ("USR3", 60, "'USR3' cannot announce"),
        ("KILL", 60, "'KILL' cannot announce the time limit"),
        ("TERM", 60, "'TERM' cannot announce"),
        ("_IGN", 60, "'_IGN' cannot announce"),
        ("USR2@soon", 60, "expected NAME@SECONDS"),
    ],
)
def test_parse_signal_rejects_unsuitable_signals(text: str, limit: int | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_signal(text, limit)
