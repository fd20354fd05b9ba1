from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.slurm import accounting, commands, jobs, site
from tests.slurm.conftest import FakeCommand


def test_submission_is_found_by_its_token() -> None:
    output = "41|(null)\n42|project-7 mgpu-ab12\n43|mgpu-ab1\n"
    assert commands.marked_command() == ["squeue", "--me", "--noheader", "--states=all", "-o", "%F|%k"]
    assert commands.parse_marked(output, "mgpu-ab12") == "42"
    assert commands.parse_marked(output, "mgpu-ab1") == "43"
    assert commands.parse_marked(output, "mgpu-ffff") is None


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("1-02:03:04", 93784), ("2:03:04", 7384), ("59:30", 3570), ("0:00", 0), ("UNLIMITED", None), ("INVALID", None)],
)
def test_time_left_is_parsed(said: str, seconds: int | None) -> None:
    assert commands.parse_time_left(f"{said}\n") == seconds


def test_job_marked_asks_squeue(fake_command: FakeCommand) -> None:
    fake_command("squeue", 'echo "42|mgpu-ab12"')
    assert commands.job_marked("mgpu-ab12") == "42"
    fake_command("squeue", "exit 1")
    with pytest.raises(ClusterError):
        commands.job_marked("mgpu-ab12")


BANNERS = ("|   Maintenance on Monday   |", "| a | b | c | d | e | f | g |", "Your job 500 has ended.", "a|b|c", "")


@pytest.mark.parametrize(
    ("parse", "line"),
    [
        (jobs.parse_squeue, "44_1|RUNNING|N/A|0|2024-05-01T11:00:00|NONE||None|"),
        (accounting.parse_sacct, "43|FAILED|2024-05-01T12:00:01|2024-05-01T12:00:02|2024-05-01T12:00:09|a"),
        (site.parse_sinfo, "gpu*|4|gpu:a100:8(S:0-1)"),
        (lambda output: commands.parse_marked(output, "mgpu-1"), "42|mgpu-1"),
    ],
)
def test_site_banners_are_ignored(parse: Callable[[str], object], line: str) -> None:
    banners = "".join(f"{banner}\n" for banner in BANNERS)
    assert parse(f"{banners}{line}\n{banners}") == parse(line)
    assert not parse(banners)


def test_scancel_command() -> None:
    assert commands.scancel_command(["42", "43_1"]) == ["scancel", "42", "43_1"]


def test_sbatch_defaults_of_the_profile_become_flags() -> None:
    environ = {"SBATCH_ACCOUNT": "lab", "SBATCH_PARTITION": "", "SBATCH_TIMELIMIT": "5", "SLURM_ACCOUNT": "x"}
    assert commands.flags_of_profile(environ) == {"account": "lab"}


def test_scrubbed_environment_drops_variables_of_other_jobs() -> None:
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "MGPU_RUNS": "/runs", "RANKING": "1", "GPUS": "0"}
    leaked = [
        *("SLURM_CPU_BIND", "SLURM_JOB_ID", "SBATCH_PARTITION", "SRUN_CPUS_PER_TASK", "PMIX_RANK", "PMI_FD"),
        *("OMPI_COMM_WORLD_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"),
        *("MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "MGPU_PROJECT"),
    ]
    environ = kept | dict.fromkeys(leaked, "x")
    assert commands.scrubbed_environment(environ) == kept
    assert set(environ) == {*kept, *leaked}


def test_thread_count_set_for_a_run_is_not_passed_on() -> None:
    request = {"OMP_NUM_THREADS": "4"}
    assert commands.scrubbed_environment(request | {"MGPU_THREADS": "4"}) == {}
    assert commands.scrubbed_environment(request | {"MGPU_THREADS": "2"}) == request
    assert commands.scrubbed_environment(request) == request


def test_run_returns_stdout_and_ignores_user_filters(
    fake_command: FakeCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    fake_command("squeue", 'echo noise >&2; echo "$@" "[$SQUEUE_PARTITION$SLURM_TIME_FORMAT]" "$SLURM_CONF"')
    assert commands.run(["squeue", "a b"]) == "a b [] /etc/slurm.conf\n"


def test_run_reports_a_missing_command(fake_command: FakeCommand) -> None:
    with pytest.raises(ClusterError, match=r"^no sinfo on PATH: run this on a login node of the cluster$"):
        commands.run(["sinfo"])


def test_run_times_out_if_a_command_does_not_answer(fake_command: FakeCommand) -> None:
    fake_command("sinfo", "exec tail -f /dev/null")
    with pytest.raises(ClusterError, match=r"^sinfo did not answer within 0\.1 s"):
        commands.run(["sinfo"], timeout=0.1)


def test_run_reports_a_failure_in_one_line(fake_command: FakeCommand) -> None:
    fake_command("scancel", 'echo "Welcome to HPC" >&2; echo "scancel: error: no such job" >&2; echo more >&2; exit 3')
    with pytest.raises(ClusterError, match=r"^scancel failed \(exit code 3\): scancel: error: no such job$"):
        commands.run(["scancel", "42"])


def test_run_reports_a_failure_without_a_message(fake_command: FakeCommand) -> None:
    fake_command("scancel", "exit 1")
    with pytest.raises(ClusterError, match=r"exit code 1.*no message"):
        commands.run(["scancel", "42"])


def test_run_reports_a_command_that_cannot_be_executed(fake_command: FakeCommand, tmp_path: Path) -> None:
    fake_command("sinfo", "")
    (tmp_path / "sinfo").write_bytes(b"\x7fELF nonsense")
    with pytest.raises(ClusterError, match="sinfo cannot be started"):
        commands.run(["sinfo"])


WAITING = """\
1|(null)
50|afterok:9(unfulfilled)
51|afterany:9(unfulfilled),afterok:8(unfulfilled)
52|afterok:9_*(unfulfilled)
53|afterok:9_1(unfulfilled)
54|afternotok:9(unfulfilled)
55|afterok:99(unfulfilled)
77|afterany:9(unfulfilled)
"""


def test_dependants_of_a_job_also_wait_for_its_successor() -> None:
    assert commands.parse_dependants(WAITING, "9", "77") == {
        "50": "afterok:9,afterok:77",
        "51": "afterany:9,afterok:8,afterany:77",
    }


def test_dependants_of_an_array_also_wait_for_task_successors() -> None:
    assert commands.parse_dependants(WAITING, "9_1", "77_1") == {
        "52": "afterok:9,afterok:77_1",
        "53": "afterok:9_1,afterok:77_1",
    }
