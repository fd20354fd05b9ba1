"""Lines of the logs of several ranks: the last ones, those that match, and those to come."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.reports.live import log_view
from mgpu_slurm.reports.live.log_view import LogView
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import Project, wait_until


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of 3 ranks that had 12 in its first attempt."""
    folder = RunFolder(tmp_path / "x")
    folder.create()
    records.update_state(folder, ranks=3, attempts=2)
    for attempt in (1, 2):
        records.record_event(folder, "started", attempt=attempt)
    folder.rank_log(1, 11).write_text("loss 3\n")
    folder.rank_log(1, 2).write_text("loss 1\nno end of the line")
    folder.rank_log(2, 2).write_bytes(b"\r 10%\r 100%\nloss 2\n")
    return folder


def shown(folder: RunFolder, ranks: str, tail: int | None = None, grep: str | None = None) -> str:
    view = LogView(log_view.ranks_of(ranks, folder), tail, None if grep is None else log_view.pattern_of(grep))
    return "".join(log_view.shown(folder, view))


def test_lines_of_several_ranks_begin_with_the_rank(folder: RunFolder) -> None:
    # of a progress bar the last state
    assert shown(folder, "0-2,11") == " 2: loss 1\n 2: no end of the line\n 2:  100%\n 2: loss 2\n11: loss 3\n"
    assert shown(folder, "all", grep="loss [23]") == " 2: loss 2\n11: loss 3\n"
    assert shown(folder, "all", tail=1) == " 2: loss 2\n11: loss 3\n"
    assert shown(folder, "2", tail=2, grep="loss|end") == "no end of the line\nloss 2\n"
    assert shown(folder, "2", tail=0) == ""


def test_progress_bar_is_one_line_however_long(folder: RunFolder) -> None:
    bar = "".join(f"\r{place}%" for place in range(50_000))
    folder.rank_log(1, 0).write_text(f"one\ntwo\n{bar}\nthree\u2028\fsame line\n", newline="")
    assert shown(folder, "0").count("\n") == 4
    assert shown(folder, "0", tail=2) == "49999%\nthree\u2028\fsame line\n"
    assert shown(folder, "0", grep="9%") == "49999%\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_last_lines_are_those_at_the_end(folder: RunFolder, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_view, "BLOCK", size)
    for text in ("", "\n", "a\n", "a", "a\n\n", "\n\nä\nb\n", "first\nsecond\nthird", "x" * 20 + "\ny"):
        folder.rank_log(1, 0).write_text(text)
        lines = [f"{line}\n" for line in text.split("\n")]
        lines = lines[:-1] if text.endswith("\n") or not text else lines
        for tail in range(4):
            assert shown(folder, "0", tail=tail) == "".join(lines[len(lines) - min(tail, len(lines)) :])
        assert shown(folder, "0") == text
        whole = text.encode()[: log_view.end_of_lines(folder.rank_log(1, 0))]
        assert whole.decode() == text[: text.rfind("\n") + 1]


@pytest.mark.parametrize("ranks", ["", "-1", "1,", "x", "1.5", "-", "2-1"])
def test_what_is_no_rank_is_named(folder: RunFolder, ranks: str) -> None:
    with pytest.raises(UserError, match=f"^--rank {re.escape(repr(ranks))}: expected a rank"):
        log_view.ranks_of(ranks, folder)


def test_rank_of_an_earlier_attempt_can_be_named_and_unknown_ones_cannot(folder: RunFolder) -> None:
    assert log_view.ranks_of("all", folder) == [0, 1, 2, 11]
    assert log_view.ranks_of("11", folder) == [11]
    for missing in ("12", "2-5", "0-999999999"):
        with pytest.raises(UserError, match=f"--rank {missing}: run x has ranks 0 to 2"):
            log_view.ranks_of(missing, folder)


def test_bad_expression_is_named() -> None:
    with pytest.raises(UserError, match=r"--grep '\(': not a regular expression: missing \)"):
        log_view.pattern_of("(")


SCRIPT = """
for n in 1 2 3; do echo line $n of rank $SLURM_PROCID; done
while ! test -e GATE; do sleep 0.05; done
echo line 4 of rank $SLURM_PROCID
printf 'line 5, which has no end'
"""


def test_ranks_are_followed_from_their_last_lines_on(project: Project) -> None:
    gate = project.folder / "gate"
    folder = project.submit("--nodes", "2", "--", "sh", "-c", SCRIPT.replace("GATE", str(gate)))
    logs = [folder / "logs" / f"1-{rank}.log" for rank in (0, 1)]
    wait_until(lambda: all(log.exists() and log.read_text().count("\n") == 3 for log in logs))
    before = project.call("logs", folder.name, "--grep", "line [12]")
    assert before.stdout == "".join(f"{rank}: line {n} of rank {rank}\n" for rank in (0, 1) for n in (1, 2))
    ranks = project.start("logs", folder.name, "--follow", "--rank", "all", "--tail", "1")
    lines = project.start("logs", folder.name, "--follow", "--grep", "line [24]", "--rank", "1")
    assert ranks.stdout is not None
    assert lines.stdout is not None
    assert [ranks.stdout.readline(), ranks.stdout.readline()] == ["0: line 3 of rank 0\n", "1: line 3 of rank 1\n"]
    started, first = lines.stdout.readline(), lines.stdout.readline()
    assert (started[:10], first) == ("-- started", "line 2 of rank 1\n")
    gate.touch()
    rest = ranks.communicate(timeout=60)[0].splitlines()
    assert sorted(rest[:4]) == sorted(
        f"{rank}: {line}" for rank in (0, 1) for line in (f"line 4 of rank {rank}", "line 5, which has no end")
    )
    assert rest[4].startswith(f"COMPLETED  {folder.name}")
    assert lines.communicate(timeout=60)[0].splitlines()[0] == "line 4 of rank 1"
    nothing = project.call("logs", folder.name, "--grep", "loss")
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert f"2 ranks of run {folder.name} have printed no line that matches 'loss'" in nothing.stderr
