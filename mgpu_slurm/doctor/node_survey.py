"""`doctor --nodes all`: check each node of a partition in a job array, one task for each node.

sbatch cannot name a node for each task of an array, so the array is submitted held, each task is tied to its node, and
released when that may have room. A task does not wait for another node, and a node on which nothing starts costs only
its own task. Tasks that are there at the same time measure the network between their nodes.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mgpu_slurm import api
from mgpu_slurm.core.errors import ClusterError, MgpuError, UserError
from mgpu_slurm.core.files import append_jsonl, read_jsonl
from mgpu_slurm.core.formatting import counted, in_words, program
from mgpu_slurm.core.hostlist import compress, expand
from mgpu_slurm.core.retry import Note
from mgpu_slurm.doctor import partners
from mgpu_slurm.doctor.gate import HELD, Gate
from mgpu_slurm.doctor.node_reports import Meeting, NodeFacts, NodeReport, Seen, judge
from mgpu_slurm.doctor.partners import Partners
from mgpu_slurm.executors.slurm import SlurmExecutor
from mgpu_slurm.registry.watch import Watch
from mgpu_slurm.request.container import NONE
from mgpu_slurm.request.spec import RestartPolicy
from mgpu_slurm.run_folder import layout, records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.slurm import commands, partition_nodes
from mgpu_slurm.slurm.partition_nodes import Node
from mgpu_slurm.slurm.pending import wait_reasons
from mgpu_slurm.submission import plan
from mgpu_slurm.submission import submit as submitting
from mgpu_slurm.submission.plan import Request

TARGET = "mgpu_slurm.doctor.in_job.node_probe:probe"
TIME_LIMIT = "5"
"""Minutes. A short job starts sooner, and SLURM ends what outlives this command."""

STARTS_WITHIN = 60.0
"""Seconds without any news after which tasks that wait for busy nodes are given up: by default, SLURM's backfill
scheduler looks for free nodes every 30 s."""

TURN_EVERY = 10.0
"""Seconds for which a task may wait in the way of others; see `Gate`."""

NEVER_AFTER = 10.0
"""Seconds after which SLURM's answer that a task can never start is believed if it is given again: until the scheduler
has looked at each task of an array, it gives that answer for all of them if it is true of one."""

PARTNER_WITHIN = 20.0
"""Seconds for which a node waits for another one to measure with; its GPUs are idle meanwhile."""

REPORTS_WITHIN = 150.0
"""Seconds from a task's start to its report: the measurements take some seconds, and a first import of torch from a
network file system may take more than a minute."""

ENDS_WITHIN = 300.0
"""Seconds from a task's start to its end; a node may fail while it measures with others."""

CANCEL_TAKES = 10.0
"""Seconds in which tasks end that are cancelled; runs that are alive cannot be deleted."""

_WITHOUT_LOGS = {states.PREEMPTED, states.NODE_FAIL}
"""Ends of tasks about which their logs tell nothing."""

PAUSE = 0.2
_NEWS_EVERY = 15.0


@dataclass(frozen=True)
class Checked:
    """What a survey has found out."""

    reports: list[NodeReport]
    is_interrupted: bool

    @property
    def has_failed(self) -> bool:
        """Whether a node is broken, or no node could be checked."""
        is_broken = any(report.verdict == "broken" for report in self.reports)
        return is_broken or not any(report.is_checked for report in self.reports)


def check_nodes(flags: Mapping[str, object], executor: str, cluster: str | None, note: Note) -> Checked:
    """Check each node; Ctrl-C ends it early, with what is known by then.

    Args:
        flags: resources by sbatch's long names; `nodelist` and `exclude` choose among the partition's nodes.
        note: called with what it waits for.

    Raises:
        UserError: a flag is wrong, or the executor is not SLURM.
        ClusterError: SLURM is missing, refuses the job, or does not answer.
    """
    if executor not in ("auto", SlurmExecutor.name):
        raise UserError(f"--nodes all --executor {executor}: only --executor slurm has job arrays")
    if shutil.which("sbatch") is None:
        raise ClusterError("--nodes all needs SLURM, and there is no sbatch on PATH: log in to the cluster")
    asked = {name: value for name, value in flags.items() if value is not None}
    listed, excluded = (expand(str(asked.pop(name, ""))) for name in ("nodelist", "exclude"))
    with tempfile.TemporaryDirectory(prefix="mgpu-") as nothing:
        # each node's GPUs belong to one rank, which checks all of them
        asked = {"time": TIME_LIMIT, "ntasks-per-node": 1} | asked | {"nodes": 1}
        made = plan.make(_request(asked, cluster, Path(nothing)), Path.cwd(), layout.runs_root(), note)
        partition = made.spec.resources.partition
        found = partition_nodes.nodes_of(partition)
        chosen = [node for node in found if (not listed or node.name in listed) and node.name not in excluded]
        if strange := [name for name in listed if name not in {node.name for node in found}]:
            raise UserError(f"--nodelist {compress(listed)}: {strange[0]} is not a node of the partition")
        usable = [node for node in chosen if not node.is_unusable]
        if not usable:
            return Checked(judge([Seen(node) for node in chosen], []), is_interrupted=False)
        held = asked | {"sbatch": {**_more(asked), "hold": ""}}
        submission = submitting.submit(_request(held, cluster, Path(nothing), len(usable)), note)
    survey = Survey(submission.plan.folder, usable, partition, note)
    note(f"checking {counted(len(usable), 'node')} by job {submission.job_id}; Ctrl-C ends it and shows what is known")
    is_interrupted = False
    try:
        survey.start()
        survey.follow()
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        survey.end()
    with suppress(ClusterError):
        found = partition_nodes.nodes_of(partition)
    return Checked(survey.reports(chosen, found), is_interrupted)


def _more(asked: Mapping[str, object]) -> dict[str, str]:
    more = asked.get("sbatch", {})
    assert isinstance(more, dict)
    return more


def _request(flags: dict[str, object], cluster: str | None, project: Path, tasks: int | None = None) -> Request:
    return Request(
        target=TARGET,
        # a group has a run for each seed
        values={"seed": 0},
        seeds=None if tasks is None else str(tasks),
        flags=flags,
        executor=SlurmExecutor.name,
        cluster=cluster,
        name="doctor",
        project=project,
        # another attempt would run on the same node
        restart=RestartPolicy(max_requeues=0, retries=0),
        sinks=("none",),
        container=NONE,
    )


class Survey:
    """The tasks of a job array, one for each node, and what they have reported."""

    def __init__(self, group: RunFolder, found: Sequence[Node], partition: str | None, note: Note) -> None:
        self._handle = api.Group(group)
        self._names = [node.name for node in found]
        self._folders = {node.name: group.of_task(task) for task, node in enumerate(found)}
        self._note = note
        self._gate = Gate(partition)
        self._facts: dict[str, NodeFacts] = {}
        self._ports: dict[str, int] = {}
        self._lines: dict[str, int] = dict.fromkeys(self._names, 0)
        self._partners = Partners()
        self._meetings: list[Meeting] = []
        self._unpinned: dict[str, str] = {}
        self._states: dict[str, RunState] = {}
        self._began: dict[str, float] = {}
        """When each task was first seen to run."""
        self._never_since: dict[str, float] = {}
        """Since when SLURM says of a task that it can never start."""
        self._hopeless: dict[str, str] = {}
        """Why a task can never start, if SLURM has said so again later."""
        self._free_since: dict[str, float] = {}
        """When each node last reported something."""
        self._silent: set[str] = set()

    # -- its course

    def start(self) -> None:
        """Tie each task to its node.

        Raises:
            ClusterError: SLURM does not answer.
        """
        jobs = {
            task: submission.job_of(task)
            for submission in records.submissions(self._handle.files)
            for task in submission.tasks or ()
        }
        for task, name in enumerate(self._names):
            partners.prepare(self._folders[name])
            job_id = jobs[task]
            assert job_id is not None
            try:
                commands.run(partition_nodes.pin_command(job_id, name))
                self._gate.add(name, job_id)
            except commands.SlurmUnavailable:
                raise
            except ClusterError as problem:
                # it stays held, and is cancelled in the end
                self._unpinned[name] = str(problem)

    def follow(self) -> None:
        """Return once nothing more can be expected, within a limited time."""
        watch = Watch(self._handle.files, note=self._note)
        last_news = next_turn = time.monotonic()
        next_note = last_news + _NEWS_EVERY
        before: object = None
        while True:
            for folder, state in watch.pairs():
                self.see(self._names[folder.task or 0], state)
            now = time.monotonic()
            for name in self._names:
                self.hear(name)
                if self._is_running(name):
                    limit = ENDS_WITHIN if name in self._facts else REPORTS_WITHIN
                    self._silent |= {name} if now > self._began.setdefault(name, now) + limit else set()
            self._order()
            if now >= next_turn:
                next_turn = now + TURN_EVERY
                self._gate.turn([name for name in self._names if self._is_expected(name) and name not in self._began])
            if (news := self._news()) != before:
                before, last_news = news, now
            expected = [name for name in self._names if self._is_expected(name)]
            waits = not any(self._is_running(name) for name in expected)
            if not expected or (waits and now - last_news > STARTS_WITHIN):
                return
            if now > next_note:
                next_note = now + _NEWS_EVERY
                self._note(self._progress(expected))
            # as long as a look takes with thousands of nodes
            time.sleep(max(PAUSE, time.monotonic() - now))

    def _progress(self, expected: Sequence[str]) -> str:
        """Return in words what is waited for."""
        said = [f"{len(self._facts)} of {len(self._names)} have reported"]
        if silent := [name for name in expected if name not in self._facts]:
            said.append(f"waiting for {compress(silent)}")
        if measuring := [name for name in expected if name in self._facts]:
            said.append(f"{compress(measuring)} measure the network, or wait for others to do so")
        return "; ".join(said)

    def end(self) -> None:
        """Cancel what is left of the job. Its runs are deleted, unless one of them shows why a node is broken."""
        try:
            self._handle.cancel()
        except MgpuError as problem:
            self._note(f"cannot cancel {self._handle.name}: {problem}")
        telling = [
            name
            for name, state in self._states.items()
            if name in self._silent or state.state in states.FAILURES - _WITHOUT_LOGS
        ]
        if telling:
            log = f"{program()} logs {self._folders[telling[0]].run}"
            self._note(f"the runs are kept: {self._handle.folder}; for the log of {telling[0]}: {log}")
            return
        with suppress(TimeoutError):
            self._handle.wait(CANCEL_TAKES)
        try:
            self._handle.delete()
        except MgpuError as problem:
            self._note(f"cannot delete the runs {self._handle.name}: {problem}")

    def reports(self, chosen: Sequence[Node], now: Sequence[Node]) -> list[NodeReport]:
        """Return a report for each of the chosen nodes.

        Args:
            now: the nodes as SLURM sees them after the check.
        """
        newest = {node.name: node for node in now}
        return judge([self._seen(node, newest.get(node.name, node)) for node in chosen], self._meetings)

    # -- its parts

    def see(self, name: str, state: RunState) -> None:
        """Take a task's state. SLURM is asked rarely; the task's own record knows no reason, and lags at its start."""
        before = self._states.get(name)
        is_older = before is not None and before.state == states.RUNNING and state.state == states.PENDING
        is_poorer = before is not None and before.state == state.state and not state.reason
        if is_older or is_poorer:
            return
        self._states[name] = state
        if wait_reasons.NEVER in state.reason:
            if time.monotonic() >= self._never_since.setdefault(name, time.monotonic()) + NEVER_AFTER:
                self._hopeless[name] = state.reason
        elif state.reason != HELD:
            self._never_since.pop(name, None)
            self._hopeless.pop(name, None)

    def hear(self, name: str) -> None:
        """Read what a task has written since."""
        told = list(read_jsonl(self._folders[name].checkup))
        for line in told[self._lines[name] :]:
            if "facts" in line:
                self._facts[name], self._ports[name] = NodeFacts.from_plain(line["facts"]), line["port"]
                self._free_since[name] = time.monotonic()
                self._partners.arrive(name)
            elif "partner" in line:
                self._meetings.append(Meeting((name, line["partner"]), line["rate"], line["problem"]))
                self._partners.end(name, line["partner"])
                self._free_since |= dict.fromkeys((name, line["partner"]), time.monotonic())
        self._lines[name] = len(told)
        if name in self._states and not states.is_alive(self._states[name].state):
            self._partners.leave(name)

    def _order(self) -> None:
        """Tell tasks whom to measure with, and those that have nobody left that they may end."""
        for name, other in self._partners.begin():
            order = {"node": other, "port": self._ports[other]}
            append_jsonl(partners.orders(self._folders[name]), order)
        coming = [name for name in self._names if self._is_expected(name) and name not in self._facts]
        is_running = any(map(self._is_running, coming))
        for name in self._partners.waiting():
            # a node that has been measured does not wait for tasks that have not started
            may_come = is_running or (bool(coming) and not self._partners.has_met(name))
            is_patient = time.monotonic() < self._free_since[name] + PARTNER_WITHIN
            if not self._partners.may_meet(name, may_come and is_patient):
                append_jsonl(partners.orders(self._folders[name]), {"leave": True})
                self._partners.leave(name)

    def _is_running(self, name: str) -> bool:
        return name in self._states and self._states[name].state == states.RUNNING

    def _is_expected(self, name: str) -> bool:
        """Return whether more may come from a task."""
        state = self._states.get(name)
        has_ended = state is not None and not states.is_alive(state.state)
        return not (has_ended or name in {*self._hopeless, *self._unpinned, *self._silent})

    def _news(self) -> object:
        return [state.state for state in self._states.values()], dict(self._lines)

    def _failure(self, name: str) -> str:
        """Return why a task has not reported, or failed, as far as its node may be the cause."""
        state = self._states.get(name, RunState())
        if name in self._silent:
            words, limit = ("ended", ENDS_WITHIN) if name in self._facts else ("reported", REPORTS_WITHIN)
            return f"its task has not {words} within {in_words(limit)}"
        if state.state in states.FAILURES - {states.PREEMPTED}:
            why = f"its task ended as {state.state}{f': {state.reason}' if state.reason else ''}"
            group = self._handle.files
            is_without_log = state.job_id is not None and not group.launch_log(state.job_id).exists()
            return f"{why}; it has no log, as if it did not see {group.path.parent}" if is_without_log else why
        return ""

    def _seen(self, before: Node, now: Node) -> Seen:
        """Return what is known of a node."""
        name = before.name
        if name not in self._folders:
            return Seen(before)
        failure = self._failure(name)
        facts = self._facts.get(name)
        state = self._states.get(name, RunState())
        if now.is_unusable and facts is None:
            # SLURM itself cancels a job on a node whose prolog fails
            failure = f"{failure or 'its task could not run'}; SLURM says {now.words}"
        if facts is not None or failure:
            return Seen(now, facts, failure)
        if problem := self._unpinned.get(name):
            return Seen(now, unchecked=problem)
        if state.state in states.TERMINAL:
            return Seen(now, unchecked=f"its task was {state.state.lower()}")
        if wait_reasons.NO_NODE in self._hopeless.get(name, ""):
            # it was tied to this one
            return Seen(now, unchecked="it lacks what the check asks for, such as GPUs, cores or memory")
        if not now.may_have_room:
            return Seen(now, unchecked=f"busy ({now.state})")
        # a task that is held has not had its turn
        waits = f" ({state.reason})" if state.reason not in ("", HELD) else ""
        return Seen(now, unchecked=f"its task did not start in time{waits}")
