"""What comes over a training on a cluster: a real SLURM, whose nodes, network and controller fail."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from mgpu_slurm.run_folder import records
from tests.chaos.faults import (
    Fault,
    a_rank_dies,
    any_process_dies,
    dies_in_a_save,
    it_is_cancelled,
    phase_of_a_save,
)
from tests.chaos.training import RANKS, Training, send, words_of
from tests.on_slurm.cluster import Cluster
from tests.on_slurm.machine import NODES
from tests.support import Project, make_project

BACK_AFTER = (1.0, 6.0)
"""Seconds after which what has failed is there again, between these."""


class Slurm:
    """A place for rounds; see `rounds.Site`."""

    name = "slurm"
    seconds = 300.0
    pace = 0.1

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.faults = (
            Fault("a rank is killed", a_rank_dies, "Killed|SIGKILL"),
            Fault("preempted", self.preempted, "SLURM took the nodes"),
            Fault("a node is lost", self.node_lost, "a node failed"),
            Fault("a node's network is cut", self.cut, "a node failed"),
            Fault("the controller is away", self.controller_away, "Killed|SIGKILL"),
            Fault("the batch step is killed", self.batch_step_killed, "FAILED", by_hand=True),
            Fault("a node is given up", self.node_given_up, "a node failed"),
            Fault("cancelled", it_is_cancelled, "CANCELLED", by_hand=True),
            Fault("killed in a phase of a save", dies_in_a_save, "Killed|SIGKILL", config=phase_of_a_save),
            Fault("any process is killed", any_process_dies, "", by_hand=True, ends_attempt=False),
            Fault(
                "its time is up",
                self.time_up,
                "it stopped before its time limit to be requeued|left before the time limit",
                words=("--time", "3", "--signal", "USR2@30"),
                config=lambda draw: {"pace": 0.7},
            ),
        )

    def pair(self, draw: random.Random) -> tuple[Fault, ...]:
        """One of what is around the run, and one of the run itself."""
        around = ("preempted", "a node is lost", "a node's network is cut", "the controller is away")
        own = ("a rank is killed", "the batch step is killed", "cancelled", "killed in a phase of a save")
        names = (draw.choice(around), draw.choice(own))
        return tuple(fault for fault in self.faults if fault.name in names)

    def project(self, folder: Path) -> Project:
        """On the login node; the nodes see its folder."""
        project = make_project(folder)
        project.environ |= self._cluster.environ
        project.executor = "slurm"
        return project

    def look_after(self, training: Training) -> None:
        """Nobody waits for a job that SLURM holds back after a requeue."""
        facts = training.facts
        if facts["state"] == "PENDING" and facts["reason"].startswith("BeginTime"):
            self._cluster.start_now(facts["job_id"])

    def tidy(self) -> None:
        self._cluster.reset()

    # -- faults

    def preempted(self, training: Training, at: int, draw: random.Random) -> bool:
        training.until_step(at)
        taker = self._cluster.preempt(NODES)
        self._cluster.release(taker)
        return True

    def node_lost(self, training: Training, at: int, draw: random.Random) -> bool:
        return self._without_a_node(training, at, draw, self._cluster.node_down, self._cluster.node_up)

    def cut(self, training: Training, at: int, draw: random.Random) -> bool:
        """What runs there goes on, for a while, and hears nothing."""
        return self._without_a_node(training, at, draw, self._cluster.cut, self._cluster.reconnect)

    def node_given_up(self, training: Training, at: int, draw: random.Random) -> bool:
        return self._without_a_node(training, at, draw, self._cluster.node_given_up, self._cluster.reconnect)

    def _without_a_node(
        self,
        training: Training,
        at: int,
        draw: random.Random,
        take: Callable[[str], None],
        bring_back: Callable[[str], None],
    ) -> bool:
        """One of its own, for a while."""
        training.until_step(at)
        node = draw.choice(self._nodes(training))
        take(node)
        time.sleep(draw.uniform(*BACK_AFTER))
        bring_back(node)
        return True

    def controller_away(self, training: Training, at: int, draw: random.Random) -> bool:
        """A rank dies meanwhile."""
        training.until_step(at)
        rank = draw.randrange(RANKS)
        # the other fault of a round may have ended this attempt; without a controller there is no next one
        training.rank(rank)
        self._cluster.stop_controller()
        killed = [pid for number, pid in training.ranks().items() if number == rank]
        send(killed, signal.SIGKILL)
        time.sleep(draw.uniform(*BACK_AFTER))
        self._cluster.start_controller()
        return bool(killed)

    def batch_step_killed(self, training: Training, at: int, draw: random.Random) -> bool:
        training.until_step(at)
        found: list[int] = []

        def is_there() -> bool:
            found[:] = [pid for pid in training.processes() if {"mgpu_slurm.job", "batch"} <= {*words_of(pid)}]
            return bool(found)

        training.until(is_there)
        send(found, signal.SIGKILL)
        return True

    def time_up(self, training: Training, at: int, draw: random.Random) -> bool:
        """SLURM looks at limits every 30 s."""
        training.until_step(min(at, 20))
        job = training.facts["job_id"]
        self._cluster.run("scontrol", "update", f"JobId={job}", "EndTime=now+45seconds")
        training.until(lambda: len(training.current().attempts()) > 1)
        return True

    def _nodes(self, training: Training) -> list[str]:
        """Of the newest attempt."""
        started = [event for event in records.events(training.worker) if event.event == "started"]
        return list(started[-1].nodes)
