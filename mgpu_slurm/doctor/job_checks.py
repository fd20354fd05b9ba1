"""The part of `doctor` that needs a job: it runs on two nodes and reports line by line."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mgpu_slurm import api
from mgpu_slurm.core.errors import ClusterError, MgpuError
from mgpu_slurm.core.files import read_jsonl
from mgpu_slurm.core.formatting import counted, program
from mgpu_slurm.core.retry import Note
from mgpu_slurm.doctor import check_results
from mgpu_slurm.doctor.check_results import Finding
from mgpu_slurm.executors.allocation import AllocationExecutor
from mgpu_slurm.registry import index
from mgpu_slurm.registry.watch import Watch
from mgpu_slurm.run_folder import layout, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.slurm import commands, jobs, site
from mgpu_slurm.submission import submit as submitting
from mgpu_slurm.submission.plan import Request

TARGET = "mgpu_slurm.doctor.in_job:checkup"
NODES = 2
TIME_LIMIT = "10"
"""Minutes. A short job starts sooner, and this is enough for the checks."""

PAUSE = 0.2


def findings_of_job(request: Request, note: Note) -> Iterator[Finding]:
    """Submit the checkup and yield its findings. If nothing failed, its run is deleted afterwards.

    Args:
        request: The resources and the container to check.
        note: Called with the job's state meanwhile.
    """
    try:
        submission = _submit(request, note)
    except MgpuError as error:
        yield check_results.failed("submission", f"the checkup was not submitted: {error}", "fix that and try again")
        return
    spec, handle = submission.plan.spec, api.Handle(submission.plan.folder)
    nodes = counted(spec.resources.nodes, "simulated node" if spec.nodes_are_simulated else "node")
    told: list[Finding] = []
    try:
        note(f"the checkup is job {submission.job_id} on {nodes}; Ctrl-C cancels it")
        if spec.is_queued:
            told += requeue_findings(submission.job_id)
            yield from told
        for finding in _followed(handle.files, note):
            told.append(finding)
            yield finding
    except BaseException:
        # nobody would read its findings
        with suppress(MgpuError):
            handle.cancel()
            note(f"cancelled {handle.name}")
        raise
    if check_results.has_failed(told):
        note(f"the checkup's run is kept: {handle.folder}; see its log: {program()} logs {handle.name}")
    else:
        tidy(handle, note)


def tidy(handle: api.Handle, note: Note) -> None:
    """Delete the run of a checkup. A failure to do so, such as a node with its files open, is not a finding."""
    try:
        handle.delete()
    except MgpuError as problem:
        note(f"cannot delete the checkup's run {handle.name}: {problem}")


def _submit(asked_for: Request, note: Note) -> submitting.Submission:
    asked = {name: value for name, value in asked_for.flags.items() if value is not None}
    if asked_for.executor != AllocationExecutor.name:
        # a held allocation has fixed nodes and a fixed end
        asked = {"nodes": NODES, "time": TIME_LIMIT} | asked
    # NCCL logs once which network it uses, and the checkup reads that
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET")
    runs = layout.runs_root()
    index.make_writable(runs)
    # the job is part of this package and needs no files from the current folder, which may be a home folder
    with tempfile.TemporaryDirectory(prefix=layout.STAGING_PREFIX, dir=runs) as nothing:
        request = replace(
            asked_for,
            target=TARGET,
            flags=asked,
            name="doctor",
            project=Path(nothing),
            # those of the cluster file are for trainings
            sinks=("none",),
        )
        return submitting.submit(request, note)


def requeue_findings(job_id: str) -> list[Finding]:
    """Check whether the site lets jobs be requeued on request; this needs a job, since a plugin may decide."""
    try:
        may = site.may_be_requeued(commands.run(jobs.show_command(job_id)))
    except ClusterError:
        return []
    if may is False:
        text = "this site disables requeueing (--requeue is dropped)"
        fix = "at its time limit a run submits a job that continues it; after preemption, use `resume`"
        return [check_results.warning("requeue", text, fix)]
    return [check_results.ok("requeue", "the job may be requeued")] if may else []


def _followed(folder: RunFolder, note: Note) -> Iterator[Finding]:
    """Yield the job's findings as it writes them, until it has ended; then one more if it ended badly."""
    watch = Watch(folder)
    shown = 0
    last_words = ""
    while True:
        # read the state before the findings, so that no finding written before the end is missed
        state = watch.state()
        written = [Finding.from_plain(record) for record in read_jsonl(folder.checkup)]
        # a new attempt starts the file again
        yield from written[shown if shown <= len(written) else 0 :]
        shown = len(written)
        if not states.is_alive(state.state):
            break
        words = f"{state.state}: {state.reason}"
        if words != last_words and state.reason:
            note(words)
        last_words = words
        time.sleep(PAUSE)
    if state.state != states.COMPLETED:
        yield ended_badly(folder, state, shown)


def ended_badly(folder: RunFolder, state: RunState, shown: int) -> Finding:
    """Return a finding for a checkup that did not complete.

    Args:
        shown: Number of findings that it had written before.
    """
    text = f"the checkup ended as {state.state}: {state.reason or 'no reason was recorded'}"
    if state.state == states.CANCELLED:
        return check_results.failed("job", text, "try again")
    if not shown and not any(folder.logs.glob("[0-9]*-*.log")):
        fix = (
            f"no rank has written anything: usually nodes do not see the runs folder {folder.path.parent} or this"
            " Python; put both on a file system that all nodes share (MGPU_RUNS sets the runs folder)"
        )
        return check_results.failed("job", text, fix)
    return check_results.failed("job", text, f"look at the logs of the ranks in {folder.logs}")
