"""Where the time of recorded steps went, from traces as torch's profiler writes them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.reports import profile_summary
from mgpu_slurm.reports.profile_summary import Operator, Profile, RankTrace, summarize
from mgpu_slurm.run_folder.layout import RunFolder


def event(
    cat: str, name: str, begin: float, end: float, tid: object = 1, external: int | None = None
) -> dict[str, Any]:
    args = {} if external is None else {"External id": external}
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": tid, "args": args}


STEPS = [
    event("user_annotation", "ProfilerStep#10", 1000, 2000),
    event("user_annotation", "ProfilerStep#11", 2000, 3000),
]


class TestSummary:
    def test_cpu_time_is_that_of_operators_but_collectives(self) -> None:
        events = [
            *STEPS,
            # before the steps
            event("cpu_op", "aten::mm", 0, 900),
            event("cpu_op", "aten::linear", 1000, 1500),
            event("cpu_op", "aten::addmm", 1100, 1400),
            event("cpu_op", "aten::addmm", 2000, 2200),
            # computes itself, although it calls another one
            event("cpu_op", "aten::resolve_conj", 2000, 2010),
            # waits for another rank in the thread of the group, half of it while something is computed
            event("user_annotation", "gloo:all_reduce", 1200, 1600, tid=2),
            event("cpu_op", "c10d::allreduce_", 1600, 1700),
        ]
        trace, operators = summarize(3, "3.json.gz", events)
        shares = {"computes": 0.3, "communicates": 0.15, "idle": 0.55}
        assert trace == RankTrace(3, "3.json.gz", 2, pytest.approx(1e-3), False, **shares)
        times = {each.name: (each.seconds * 1e6, each.calls) for each in operators}
        assert times == {
            "aten::linear": (pytest.approx(100), 0.5),
            "aten::addmm": (pytest.approx(245), 1),
            "aten::resolve_conj": (pytest.approx(5), 0.5),
            "c10d::allreduce_": (pytest.approx(50), 0.5),
        }

    def test_gpu_time_is_that_of_kernels(self) -> None:
        events = [
            *STEPS,
            event("gpu_user_annotation", "ProfilerStep#10", 1100, 2100, tid="stream 7"),
            event("cpu_op", "aten::mm", 1000, 1010, external=5),
            event("cpu_op", "aten::mm", 1010, 1020, external=6),
            event("kernel", "sm90_gemm_f32", 1100, 1500, tid="stream 7", external=5),
            event("kernel", "sm90_gemm_f32", 1600, 1800, tid="stream 7", external=6),
            event("gpu_memcpy", "Memcpy HtoD", 1700, 1900, tid="stream 8"),
            # a half of it while a kernel computes
            event("kernel", "ncclDevKernel_AllReduce_Sum_f32", 1400, 1600, tid="stream 9", external=7),
        ]
        trace, operators = summarize(0, "0.json.gz", events)
        assert (trace.on_gpu, trace.computes, trace.communicates, trace.idle) == (True, 0.35, 0.05, 0.6)
        times = {each.name: (each.seconds * 1e6, each.calls) for each in operators}
        assert times == {
            "aten::mm": (pytest.approx(300), 1),
            "Memcpy HtoD": (pytest.approx(100), 0.5),
            "ncclDevKernel_AllReduce_Sum_f32": (pytest.approx(100), 0.5),
        }

    def test_trace_without_steps_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"'x\.json\.gz' has no steps"):
            summarize(0, "x.json.gz", [event("cpu_op", "aten::mm", 0, 1)])


def rank(number: int, communicates: float) -> RankTrace:
    return RankTrace(number, f"profile/1-{number}.json.gz", 4, 0.1, True, 0.9 - communicates, communicates, 0.1)


OPERATORS = (Operator("aten::mm", 0.04, 12), Operator("aten::add_", 0.00012, 1200))


class TestLines:
    def test_tables_have_ranks_and_operators(self) -> None:
        lines = Profile("one", 1, (rank(0, 0.3), rank(1, 0.28)), OPERATORS).lines()
        assert lines == [
            "profile   one, attempt 1, 4 steps",
            "",
            "RANK        STEP  COMPUTES  COMMUNICATES   IDLE",
            "   0      100 ms       60%           30%    10%",
            "   1      100 ms       62%           28%    10%",
            "",
            "Most expensive kernels on the GPU, per step and rank:",
            "",
            "      TIME  SHARE    CALLS  OPERATOR",
            "     40 ms    40%       12  aten::mm",
            "   0.12 ms     0%    1,200  aten::add_",
            "",
            "trace     profile/1-0.json.gz, with those of the other ranks",
            "          open it at https://ui.perfetto.dev",
        ]

    def test_rank_that_others_wait_for_is_named(self) -> None:
        shown = Profile("one", 1, (rank(0, 0.5), rank(1, 0.02), rank(2, 0.4)), OPERATORS).lines()
        assert "The other ranks wait for rank 1: they communicate for 45% of a step, it for 2%." in shown

    def test_one_rank_waits_for_nobody(self) -> None:
        assert not any("wait" in line for line in Profile("one", 1, (rank(0, 0.0),), OPERATORS).lines())


class TestFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> RunFolder:
        folder = RunFolder(tmp_path / "one")
        folder.profile.mkdir(parents=True)
        for attempt, number in ((1, 0), (2, 0), (2, 10), (2, 9)):
            events = [*STEPS, event("cpu_op", "aten::mm", 1000, 1000 + 100 * attempt)]
            self.write(folder.trace(attempt, number), {"traceEvents": [*events, {"ph": "M", "name": "process_name"}]})
        return folder

    @staticmethod
    def write(path: Path, value: object) -> None:
        path.write_bytes(gzip.compress(json.dumps(value).encode()))

    def test_last_attempt_is_shown_by_default(self, folder: RunFolder) -> None:
        found = profile_summary.profile_of(folder)
        assert (found.attempt, [each.rank for each in found.ranks]) == (2, [0, 9, 10])
        assert found.operators == (Operator("aten::mm", pytest.approx(1e-4), 0.5),)
        assert replace(found, ranks=(), operators=()) == Profile("one", 2, (), ())
        assert profile_summary.profile_of(folder, 1).ranks[0].computes == 0.05

    def test_missing_traces_are_an_error(self, folder: RunFolder, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="has recorded no steps in attempt 3, but in 1, 2: submit it with"):
            profile_summary.profile_of(folder, 3)
        with pytest.raises(UserError, match="run other has recorded no steps: submit it with --profile 10-13"):
            profile_summary.profile_of(RunFolder(tmp_path / "other"))

    def test_damaged_trace_is_an_error(self, folder: RunFolder) -> None:
        path = folder.trace(2, 9)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(UserError, match=r"2-9.json.gz' cannot be read \(Compressed file ended"):
            profile_summary.profile_of(folder)
