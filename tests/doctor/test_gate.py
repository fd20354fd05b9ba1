"""Which tasks of the array may start."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.doctor.gate import Gate
from tests.slurm.conftest import FakeCommand, fake_command

__all__ = ["fake_command"]


class Site:
    """A gate, and what it has told SLURM, whose nodes have the given states."""

    def __init__(self, folder: Path, fake_command: FakeCommand, **states: str) -> None:
        self._said = folder / "said"
        self._nodes = folder / "nodes"
        self.set(**states)
        fake_command("sinfo", f"cat {self._nodes}")
        fake_command("scontrol", f'echo "$@" >> {self._said}')
        self.gate = Gate("main")
        for task, name in enumerate(states):
            self.gate.add(name, f"7_{task}")

    def set(self, **states: str) -> None:
        lines = (f"{name}|main*|{state}|Unknown|Unknown|none\n" for name, state in states.items())
        self._nodes.write_text("".join(lines))

    def turn(self, *waiting: str) -> list[str]:
        self._said.write_text("")
        self.gate.turn(waiting)
        return self._said.read_text().splitlines()


def test_idle_nodes_come_first_and_busy_ones_once_they_are_free(tmp_path: Path, fake_command: FakeCommand) -> None:
    site = Site(tmp_path, fake_command, n1="allocated", n2="idle", n3="mixed", n4="idle", n5="drained")
    assert site.turn("n1", "n2", "n3", "n4", "n5") == ["release 7_1,7_3"]
    # both have started
    assert site.turn("n1", "n3", "n5") == ["release 7_2"]
    assert site.turn("n1", "n5") == []
    site.set(n1="idle", n5="drained")
    assert site.turn("n1", "n5") == ["release 7_0"]


def test_task_that_waits_is_held_so_that_others_may_start(tmp_path: Path, fake_command: FakeCommand) -> None:
    site = Site(tmp_path, fake_command, n1="mixed", n2="mixed", n3="idle")
    assert site.turn("n1", "n2", "n3") == ["release 7_2"]
    assert site.turn("n1", "n2", "n3") == ["hold 7_2", "release 7_0,7_1"]
    # one of them waits: now it is the turn of those that were tried least
    assert site.turn("n2", "n3") == ["hold 7_1", "release 7_2"]
    assert site.turn("n2", "n3") == ["hold 7_2", "release 7_1"]
    # alone, it is in nobody's way
    assert site.turn("n2") == []


def test_controller_that_does_not_answer_is_asked_at_the_next_turn(
    tmp_path: Path, fake_command: FakeCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, fake_command, n1="idle")
    fake_command("sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    assert site.turn("n1") == []
