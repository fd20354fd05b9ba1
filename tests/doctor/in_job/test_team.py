"""Ranks that measure together, and what becomes of a check when one of them fails or falls silent."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from mgpu_slurm.doctor import in_job
from mgpu_slurm.doctor.check_results import Finding
from mgpu_slurm.doctor.in_job import network, shared_files
from mgpu_slurm.doctor.in_job.team import Answer, GatherTimeout, Member, Place, Team, who, within
from mgpu_slurm.rank.communication import rendezvous
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder.layout import RunFolder
from tests.ranks import join_ranks

TWO_NODES = [RankInfo(rank, 4, rank % 2, 2, rank // 2, f"n{1 + rank // 2}") for rank in range(4)]


def a_team(facts: RankInfo, patience: float = 20.0) -> Team:
    return Team(rendezvous.connect(facts, os.environ, timedelta(seconds=20)), facts, patience)


def a_place(folder: Path) -> Place:
    spec = Spec("r", Target(command=("true",)), "local", Resources(nodes=2, ntasks_per_node=2))
    return Place(RunFolder(folder), spec, torch.device("cpu"), 1, 0.0)


def what_it_knows(facts: RankInfo) -> Any:
    team = a_team(facts)
    team.meet("all")
    return [member.words for member in team.leaders], team.gather("double", 2 * facts.rank)


def test_ranks_agree_on_leaders_and_rank_0_gathers_values() -> None:
    answers = join_ranks(what_it_knows, TWO_NODES)
    assert [leaders for leaders, _ in answers] == [["rank 0 on n1", "rank 2 on n2"]] * 4
    assert [gathered for _, gathered in answers] == [{0: 0, 1: 2, 2: 4, 3: 6}, {}, {}, {}]


def looks(facts: RankInfo, silent: int, broken: int) -> list[dict[str, Any]]:
    team = a_team(facts, patience=2.0)
    if facts.rank == silent:
        return []

    def measure(team: Team, place: Place) -> Any:
        if facts.rank == broken:
            raise OSError("no such device")
        return facts.rank if team.me.is_leader else None

    def judge(answers: list[Answer]) -> list[Finding]:
        return [Finding("ok", "device", f"measured by {who([answer.member for answer in answers])}")]

    check = in_job.Check("device", measure, judge)
    return [finding.plain for finding in in_job.run_check(check, team, a_place(Path()), 0)]


def test_failing_and_silent_ranks_are_named_and_others_still_count() -> None:
    first, *others = join_ranks(looks, TWO_NODES, 3, 2)
    assert others == [[], [], []]
    assert [(finding["level"], finding["text"]) for finding in first] == [
        ("ok", "measured by rank 0 on n1"),
        ("failed", "device: rank 2 on n2: OSError: no such device"),
        ("failed", "device: rank 3 on n2: no answer within 2 s"),
    ]


def waits_for_nobody(facts: RankInfo) -> str:
    team = a_team(facts, patience=0.2)
    begun = time.monotonic()
    try:
        team.hear("never told")
    except GatherTimeout as error:
        assert time.monotonic() - begun < 10
        return str(error)
    return "heard"


def test_waiting_for_a_missing_message_times_out() -> None:
    assert join_ranks(waits_for_nobody, [RankInfo()]) == ["never told did not arrive within 0.2 s"]


def judged(facts: RankInfo, folder: Path, measure: Any, judge: Any) -> Any:
    team = a_team(facts)
    told = team.gather("check", measure(team, a_place(folder)))
    answers = [Answer(team.members[rank], value) for rank, value in told.items() if value is not None]
    return json.dumps([finding.plain for finding in judge(answers)]) if answers else None


def levels(answers: list[Any]) -> list[tuple[str, str]]:
    assert answers[1:] == [None] * (len(answers) - 1), answers
    return [(finding["level"], finding["text"]) for finding in json.loads(answers[0])]


def test_shared_folder_is_ok_if_nodes_see_each_others_files(tmp_path: Path) -> None:
    found = levels(
        join_ranks(judged, TWO_NODES, tmp_path, shared_files.measure_visibility, shared_files.judge_visibility)
    )
    ((level, text),) = found
    assert level == "ok"
    assert text.startswith(f"shared folder {tmp_path.parent}: n[1-2] see each other's files (new ")


def looks_elsewhere(team: Team, place: Place) -> Any:
    """The second node has a folder of the same name, and of its own."""
    shared_files.VISIBLE_WITHIN = 0.2
    if team.me.node == 1:
        place = a_place(place.folder.path / "of another node")
        place.folder.path.mkdir(exist_ok=True)
    return shared_files.measure_visibility(team, place)


def test_folder_that_nodes_do_not_share_fails_the_check(tmp_path: Path) -> None:
    found = levels(join_ranks(judged, TWO_NODES, tmp_path, looks_elsewhere, shared_files.judge_visibility))
    assert [level for level, _ in found] == ["failed", "failed"]
    assert f"n1 does not see what the other nodes write in {tmp_path.parent} within" in found[0][1]
    assert f"n2 does not see what n1 writes in {tmp_path.parent} within" in found[1][1]
    assert found[1][1].endswith("new, appended, replaced")


def test_working_locks_lose_no_counts(tmp_path: Path) -> None:
    (tmp_path / "checkup").mkdir()
    found = levels(join_ranks(judged, TWO_NODES, tmp_path, shared_files.measure_locks, shared_files.judge_locks))
    assert [level for level, _ in found] == ["ok", "ok"]
    assert found[0][1].startswith(f"fcntl locks work on n[1-2]: {4 * shared_files.INCREMENTS} counts by 4 ranks")


def counts_without_locks(team: Team, place: Place) -> Any:
    shared_files.LOCKS = {"fcntl": lambda descriptor: None, "flock": refused}
    return shared_files.measure_locks(team, place)


def refused(descriptor: int) -> None:
    raise OSError("No locks available")


def test_ineffective_and_unavailable_locks_are_reported(tmp_path: Path) -> None:
    (tmp_path / "checkup").mkdir()
    found = levels(join_ranks(judged, TWO_NODES, tmp_path, counts_without_locks, shared_files.judge_locks))
    assert [level for level, _ in found] == ["failed", "warning"]
    assert f"of {4 * shared_files.INCREMENTS} counts were lost" in found[0][1]
    assert found[1][1] == "flock locks on n[1-2] do not work: No locks available"


def test_nodes_reach_each_others_ports(tmp_path: Path) -> None:
    ((level, text),) = levels(join_ranks(judged, TWO_NODES, tmp_path, network.measure_ports, network.judge_ports))
    assert level == "ok"
    assert text.startswith("n[1-2] reach each other's ports: ")


def measures_a_clock_that_is_ahead(team: Team, place: Place) -> Any:
    real = time.time
    if team.me.node == 1:
        time.time = lambda: real() + 5.0
    return network.measure_clocks(team, place)


def test_clock_that_is_ahead_is_a_warning(tmp_path: Path) -> None:
    found = levels(join_ranks(judged, TWO_NODES, tmp_path, measures_a_clock_that_is_ahead, network.judge_clocks))
    assert found == [("warning", "the clock of n2 is 5.0 s ahead of that of n1")]


def test_rank_lists_are_abbreviated() -> None:
    members = [Member(rank, rank // 2, f"n{1 + rank // 2}", rank % 2) for rank in range(6)]
    assert who(members[3:4]) == "rank 3 on n2"
    assert who(members) == "ranks 0-5 on n[1-3]"
    assert who([members[0], members[5]]) == "ranks 0,5 on n1,n3"


def test_within_returns_the_time_taken_or_none_on_timeout() -> None:
    begun = time.perf_counter()
    seconds = within(5.0, lambda: time.perf_counter() - begun > 0.02)
    assert seconds is not None
    assert 0.01 < seconds < 1.0
    assert within(0.01, lambda: False) is None
