"""The table of runs, and what a group's line tells of its runs."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime, timezone

import pytest

from mgpu_slurm.reports.live import status, status_screen, status_table
from mgpu_slurm.run_folder.record_types import RunState


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([0.5], "0.5"),
        ([1.0, 2.0, 3.0], "2±1"),
        # one that has diverged is not hidden behind the others, nor are the others' lines lost
        ([float("nan"), 1.0], "nan"),
        ([float("inf"), 1.0], "inf"),
        ([float("inf"), float("-inf")], "nan"),
    ],
)
def test_metrics_of_a_group_are_shown_as_mean_and_spread(losses: list[float], told: str) -> None:
    runs = [
        RunState(run=f"group/{place}", state="COMPLETED", metrics={"loss": loss}) for place, loss in enumerate(losses)
    ]
    line = status_table.overview(runs).splitlines()[1]
    assert line.split()[0] == "group"
    assert line.endswith(f" COMPLETED  loss={told}")


def test_small_terminal_shows_live_runs_and_the_newest_of_the_rest() -> None:
    runs = [RunState(run=f"run-{place}", state="RUNNING" if place in (3, 18) else "COMPLETED") for place in range(20)]
    lines = status_table.overview(runs, os.terminal_size((40, 10))).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["run-0", "run-1", "run-2", "run-3", "run-4", "run-5", "run-18"]
    assert lines[-1].startswith("and 13 others that have ended")
    assert max(map(len, lines[:-1])) <= 40
    assert len(status_table.overview(runs).splitlines()) == 21


def test_reason_comes_before_metrics_and_zero_progress_is_not_shown() -> None:
    run = RunState(run="run", state="FAILED", reason="rank 1 on n2: ValueError", metrics={"loss": 0.5}, step=3)
    _, line = status_table.table([run]).splitlines()
    assert line.split(maxsplit=5) == ["run", "FAILED", "0", "1x1", "3", "rank 1 on n2: ValueError  loss=0.5"]


def test_part_of_a_group_is_not_summarized() -> None:
    runs = [RunState(run=f"group/{place}", state="RUNNING") for place in range(2)]
    assert [line.split()[0] for line in status_table.table(runs[:1]).splitlines()] == ["RUN", "group/0"]
    assert [line.split()[0] for line in status_table.table(runs, {"group"}).splitlines()[1:]] == [
        "group/0",
        "group/1",
        "group",
    ]


def test_progress_and_time_left_are_shown_of_runs_that_say_their_total() -> None:
    now = datetime.now(timezone.utc).isoformat()
    known = {"total": 10, "pace": [60.0, 60.0], "reported": now}
    runs = [RunState(run=f"group/{place}", state="RUNNING", progress=place, **known) for place in (4, 5)]
    header, *lines = [line.split() for line in status_table.table(runs, {"group"}).splitlines()]
    assert header == ["RUN", "STATE", "ATTEMPT", "RANKS", "PROGRESS", "LEFT", "REASON,", "METRICS"]
    # the time left is that of the slowest run
    assert [line[:6] for line in lines] == [
        ["group/4", "RUNNING", "0", "1x1", "4/10", "5m59s"],
        ["group/5", "RUNNING", "0", "1x1", "5/10", "4m59s"],
        ["group", "RUNNING", "0", "1x1", "4-5/10", "5m59s"],
    ]
    assert status.facts(runs[0])["left_seconds"] == pytest.approx(360, abs=10)
    # one run of the group may take any time
    waiting = [*runs, RunState(run="group/6", state="PENDING")]
    assert status_table.summary("group", waiting).seconds_left(datetime.now(timezone.utc)) is None
    ended = [*runs, RunState(run="group/6", state="COMPLETED", progress=10, **known)]
    assert status_table.summary("group", ended).seconds_left(datetime.now(timezone.utc)) == pytest.approx(360, abs=10)


LONG = "train-imagenet-resnet50-long-schedule-20261121-115015-eb8f"
RUNS = [
    RunState(
        run="digits-20261121-115015-eb8f",
        state="RUNNING",
        **{"nodes": 2, "ranks": 8, "step": 12345, "progress": 17, "attempts": 1, "metrics": {"accuracy": 0.98123}},
        **{"submitted": "2026-11-21T11:50:15+00:00", "started": "2026-11-21T11:51:15+00:00"},
    ),
    RunState(
        run=LONG,
        state="COMPLETED",
        **{"nodes": 16, "ranks": 128, "step": 1234567, "progress": 90, "attempts": 3, "metrics": {"accuracy": 0.7}},
        **{"submitted": "2026-11-21T11:50:15+00:00", "started": "2026-11-21T11:51:15+00:00"},
    ),
    RunState(
        run="digits-20261120-115015-abcd",
        state="OUT_OF_MEMORY",
        reason="rank 0 on gpu-17: OutOfMemoryError: " + 60 * "x",
    ),
]


def test_half_a_terminal_has_progress_and_reasons() -> None:
    runs = [replace(RUNS[0], progress=3, total=90), RUNS[1]]
    header, first, *others = status_table.overview(runs, os.terminal_size((60, 24))).splitlines()
    assert max(map(len, (header, first, *others))) <= 60
    assert header.split() == ["RUN", "STATE", "PROGRESS", "REASON,", "METRICS"]
    assert first.startswith("digit...-115015-eb8f  RUNNING    3/90 ")


@pytest.mark.parametrize(
    ("columns", "name"), [(80, "train-imagene...-115015-eb8f"), (100, "train-imagenet-res...-115015-eb8f")]
)
def test_overview_with_reasons_and_metrics_fits_the_terminal(columns: int, name: str) -> None:
    header, first, long, failed = status_table.overview(RUNS, os.terminal_size((columns, 24))).splitlines()
    assert max(map(len, (header, first, long, failed))) <= columns
    assert header.endswith("REASON, METRICS")
    assert first.startswith(f"{'digits-20261121-115015-eb8f':<{len(name)}}  RUNNING ")
    assert first.endswith(" accuracy=0.9812")
    assert long.startswith(f"{name}  COMPLETED ")
    assert failed.endswith("...")
    # a terminal may show nothing else
    assert "".join((header, first, long, failed)).isascii()
    assert "rank 0 on gpu-" in failed


def test_names_of_a_group_are_whole_if_there_is_room() -> None:
    runs = [RunState(run=f"baseline-20261128-191220-6bf3/{number}", metrics={"loss": 0.5}) for number in range(2)]
    told = status_table.table(runs, room=os.terminal_size((60, 24))).splitlines()
    assert [line.split()[0] for line in told] == ["RUN", runs[0].run, "loss=0.5", runs[1].run, "loss=0.5"]


def test_named_run_is_shown_in_full_in_a_narrow_terminal() -> None:
    lines = status_table.table(RUNS, room=os.terminal_size((80, 24))).splitlines()
    assert max(map(len, lines)) <= 80
    assert f"    {LONG}" in lines
    assert "    accuracy=0.7" in lines
    assert "OutOfMemoryError" in "".join(lines)
    assert 60 * "x" in "".join(line.strip() for line in lines)
    # as much as fits: the rest has a line each
    assert lines[0].split() == ["RUN", "STATE", "ATTEMPT", "STEP", "PROGRESS", "TIME"]
    wide = status_table.table(RUNS, room=os.terminal_size((300, 24)))
    assert wide == status_table.table(RUNS)
    assert LONG in wide.splitlines()[2]


def test_full_screen_says_how_many_lines_are_left_out() -> None:
    told = [f"line {number}" for number in range(10)]
    assert status_screen.fitting(told, os.terminal_size((80, 11))) == told
    assert status_screen.fitting(told, os.terminal_size((80, 5))) == [
        *told[:3],
        "... 7 more lines (enlarge the window)",
    ]
    assert status_screen.fitting(told, os.terminal_size((8, 2))) == ["line 0", "... 9 mo"]


def test_speed_of_a_run_on_gpus_shows_how_busy_they_are() -> None:
    curves = {
        "speed/step_seconds": 0.25,
        "speed/samples_per_second": 1024.0,
        "speed/tokens_per_second": 1_048_576.0,
        "speed/mfu": 0.416,
        "gpu/utilization": 0.97,
        "gpu/power_watts": 612.3,
        "memory/peak_allocated_gib": 51.2,
        "memory/peak_reserved_gib": 60.04,
    }
    assert status._speed(curves) == (
        "250 ms a step  1,024 samples/s  1,048,576 tokens/s  MFU 42%  GPUs busy 97% at 612 W"
        "  peak 51.2 GiB, 60.0 reserved"
    )
