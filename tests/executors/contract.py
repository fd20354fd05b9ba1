"""What every executor has to do, whoever runs the job in the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_slurm.executors.base import Executor
from mgpu_slurm.executors.selection import EXECUTORS
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import Project, log, wait_until

WAITS = "touch started; while [ ! -e go ]; do sleep 0.05; done; echo went"
"""A command that ends when it is told to, in the run's own working directory."""


class ExecutorContract:
    """Take it, name the executor, and give a project in which `--executor NAME` works."""

    name: str

    @pytest.fixture
    def place(self) -> Project:
        raise NotImplementedError

    @property
    def executor(self) -> Executor:
        return EXECUTORS[self.name]

    @pytest.fixture
    def restart(self) -> Callable[[Path], object]:
        """Start a run that waits for its next attempt now; for executors that would let it wait for long."""
        return lambda folder: None

    def submit(self, place: Project, *words: str) -> Path:
        place.executor = self.name
        return place.submit(*words)

    def started(self, place: Project, *words: str) -> Path:
        folder = self.submit(place, *words, "--", "sh", "-c", WAITS)
        wait_until(lambda: records.read_state(RunFolder(folder)).state == "RUNNING")
        wait_until(lambda: (folder / "code" / "started").exists())
        return folder

    def release(self, folder: Path) -> None:
        (folder / "code" / "go").touch()

    def state_of(self, place: Project, folder: Path) -> str:
        (facts,) = place.json("status", folder.name)
        return str(facts["state"])

    def test_run_records_the_executor_name(self, place: Project) -> None:
        folder = self.submit(place, "--", "true")
        assert records.read_state(RunFolder(folder)).executor == self.executor.name == self.name
        assert place.finish(folder)["state"] == "COMPLETED"

    def test_ranks_run_on_the_requested_number_of_nodes(self, place: Project) -> None:
        told = "echo $RANK of $WORLD_SIZE on $SLURM_NODEID"
        folder = self.submit(place, "--nodes", "2", "--ntasks-per-node", "2", "--", "sh", "-c", told)
        assert place.finish(folder)["state"] == "COMPLETED"
        assert [log(folder, rank) for rank in range(4)] == [f"{rank} of 4 on {rank // 2}\n" for rank in range(4)]

    def test_failed_run_reports_its_exit_code(self, place: Project) -> None:
        facts = place.finish(self.submit(place, "--", "sh", "-c", "exit 3"))
        assert (facts["state"], "exit code 3" in facts["reason"]) == ("FAILED", True)

    def test_state_follows_a_run_from_start_to_end(self, place: Project) -> None:
        folder = self.started(place)
        assert self.state_of(place, folder) == "RUNNING"
        self.release(folder)
        assert place.finish(folder)["state"] == "COMPLETED"
        assert log(folder, 0).endswith("went\n")

    def test_cancelled_run_ends(self, place: Project) -> None:
        folder = self.started(place)
        assert place.call("cancel", folder.name).returncode == 0
        assert place.finish(folder)["state"] == "CANCELLED"

    def test_run_that_asks_for_a_requeue_is_started_again(
        self, place: Project, restart: Callable[[Path], object]
    ) -> None:
        folder = self.submit(place, "--", "sh", "-c", '[ "$MGPU_ATTEMPT" = 2 ] || exit 75')
        restart(folder)
        facts = place.finish(folder)
        assert (facts["state"], facts["attempts"]) == ("COMPLETED", 2)

    def test_failed_run_can_be_resumed(self, place: Project) -> None:
        folder = self.submit(place, "--retries", "0", "--", "sh", "-c", "[ -e fixed ]")
        assert place.finish(folder)["state"] == "FAILED"
        (folder / "code" / "fixed").touch()
        assert place.call("resume", folder.name, "--no-follow").returncode == 0
        facts = place.finish(folder)
        assert (facts["state"], facts["attempts"]) == ("COMPLETED", 2)

    def test_shell_runs_a_command_alongside_the_ranks(self, place: Project) -> None:
        folder = self.started(place)
        done = place.call("shell", folder.name, "--", "sh", "-c", "echo in $(pwd)")
        assert done.stdout.endswith(f"in {folder / 'code'}\n"), done.stderr
        self.release(folder)
        place.finish(folder)

    def test_excessive_request_is_rejected_or_pends_with_a_reason(self, place: Project) -> None:
        done = place.call("submit", "--executor", self.name, "--gpus-per-node", "4096", "--no-follow", "--", "true")
        if self.executor.is_queued and done.returncode == 0:
            (facts,) = place.json("status")
            assert (facts["state"], facts["reason"] != "") == ("PENDING", True)
            return
        assert done.returncode in (2, 3)
        assert done.stderr.count("\n") == 1, done.stderr
        assert not place.runs.exists() or [*place.runs.iterdir()] == []
