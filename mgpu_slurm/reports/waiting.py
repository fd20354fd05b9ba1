"""Explain why a run waits in SLURM's queue: which limit or reservation keeps it there, with numbers, and what helps.

`status` shows what the reason itself tells. Here SLURM is asked more: one query each for the job, its partition, the
limits, the user's running jobs and the reservations. What a site does not tell is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState
from mgpu_slurm.slurm import commands, job_identity, jobs, site
from mgpu_slurm.slurm.jobs import RunningJob
from mgpu_slurm.slurm.pending import limits, wait_reasons
from mgpu_slurm.slurm.pending.limits import Limit, NamedLimit
from mgpu_slurm.slurm.site import Reservation

SHOWN_JOBS = 3
"""Number of running jobs that are named."""

TO_START = timedelta(minutes=2)
"""Time for which a job with a shorter limit may still wait for its start."""

MAX_SECONDS = 366 * 24 * 3600
"""Longest time limit that is told from none."""

_MAY_BE_RESERVED = re.compile(r"ReqNodeNotAvail|Resources|Priority|Nodes required")

Fields = Mapping[str, str]


@dataclass(frozen=True)
class Wait:
    """Why a run waits, and what helps."""

    reason: str
    """SLURM's own word for it."""
    words: str
    fix: str


def wait_of(folder: RunFolder, state: RunState) -> Wait | None:
    """Return why a run waits in SLURM's queue; None if it does not, or SLURM does not tell."""
    if state.executor != "slurm" or state.state not in (states.PENDING, states.REQUEUED) or state.job_id is None:
        return None
    job = _waiting_job(folder, state.job_id)
    if job is None:
        return None
    reason = wait_reasons.normal(job.get("Reason", ""))
    partition = _fields(site.partition_command(job.get("Partition", "")), "PartitionName")
    if (named := limits.named_by(reason)) is not None and (wait := _for_limit(job, partition, reason, named)):
        return wait
    if wait := _for_reservation(state.job_id, job, partition, reason) or _for_partition(job, partition, reason):
        return wait
    meaning = wait_reasons.explained(reason)
    if meaning is None:
        return None
    detail = commands.value_of(job.get("Dependency", "")) if reason == "Dependency" else None
    words = f"{meaning.words}: {detail}" if detail else meaning.words
    return Wait(reason, words, meaning.fix.format(job=state.job_id))


def _ask(command: list[str]) -> str:
    """Return SLURM's answer; nothing if the site forbids the question, or has no accounting."""
    try:
        return commands.run(command, commands.SQUEUE_TAKES)
    except ClusterError:
        return ""


def _fields(command: list[str], name: str) -> Fields:
    """Return the fields of the first thing that scontrol shows; none if it shows nothing."""
    rows = map(commands.pairs_in, _ask(command).splitlines())
    return next((row for row in rows if name in row), {})


def _waiting_job(folder: RunFolder, job_id: str) -> Fields | None:
    """Return the fields of a run's job; None if SLURM has no such job, or it does not wait."""
    output = _ask(jobs.show_command(job_id))
    shown = jobs.parse_shown(output)
    rows = [row for row in map(commands.pairs_in, output.splitlines()) if row.get("JobState") == states.PENDING]
    return rows[0] if rows and all(job_identity.belongs_to(folder, job) for job in shown) else None


# -- limits


def _for_limit(job: Fields, partition: Fields, reason: str, named: NamedLimit) -> Wait | None:
    user, _, uid = job.get("UserId", "").rstrip(")").partition("(")
    # a partition may have a QOS of its own, whose limits have the same names
    names = [job.get("QOS", ""), partition.get("QoS", "")]
    qos = [name for name in names if commands.value_of(name)] if named.is_of_qos else []
    found = limits.parse_shown(_ask(limits.show_command(user, qos)), user, uid, job.get("Account"))
    asked = limits.asked_of(job)
    meant = limits.of_reason(found, named, asked)
    if not meant and qos:
        by_name = limits.parse_qos(_ask(limits.qos_command()))
        meant = limits.of_reason([limit for name in qos for limit in by_name.get(name, [])], named, asked)
    if not meant:
        return None
    first = meant[0]
    words = "; ".join(limit.sentence(limits.amount_of(limit, asked)) for limit in meant)
    return Wait(reason, words, _fix_of_limit(first, limits.amount_of(first, asked), user))


def _fix_of_limit(limit: Limit, asked: int, user: str) -> str:
    again = "cancel it, and `resume` it with"
    if limit.kind == "Min":
        return f"{again} at least {limit.amount(limit.value)}"
    if limit.time and asked > limit.value:
        return f"{again} less of it, or a shorter --time"
    if limit.resource == limits.WALL and limit.per:
        return f"{again} --time {limit.amount(limit.value)} or less"
    if asked > limit.value:
        return f"{again} at most {limit.amount(limit.value)}" + (" per node" if limit.per == "PN" else "")
    if limit.time == "Mins" or limit.resource == limits.WALL:
        return "use another --qos or --account, or ask your admins when the use of the past no longer counts"
    own = [job for job in _running(user) if limit.owner in (f"QOS {job.qos}", f"account {job.account}")]
    if own:
        shown = ", ".join(job.words for job in own[:SHOWN_JOBS])
        more = f" and {len(own) - SHOWN_JOBS} more" if len(own) > SHOWN_JOBS else ""
        wait = f"wait for {'your other' if limit.is_of_one_user else 'other jobs, such as your'} {shown}{more}"
    else:
        wait = f"wait for other jobs of {limit.owner}"
    room = limit.value - (limit.used or 0)
    is_divisible = limit.resource not in (limits.JOBS, limits.SUBMITTED) and not limit.time
    return f"{wait}, or {again} at most {limit.amount(room)}" if is_divisible and room > 0 else wait


def _running(user: str) -> list[RunningJob]:
    return jobs.parse_running(_ask(jobs.running_command(user)))


def _for_partition(job: Fields, partition: Fields, reason: str) -> Wait | None:
    """Return which limit of its partition a job exceeds; None for other reasons."""
    field, asks = {
        "PartitionTimeLimit": ("MaxTime", "TimeLimit"),
        "PartitionNodeLimit": ("MaxNodes", "NumNodes"),
    }.get(reason, ("", ""))
    if field not in partition or asks not in job:
        return None
    option = "--time" if field == "MaxTime" else "--nodes"
    words = f"partition {partition['PartitionName']} allows {option} {partition[field]}; this run asks for {job[asks]}"
    return Wait(reason, words, f"cancel it, and `resume` it with {option} {partition[field]} or less")


# -- reservations


def _for_reservation(job_id: str, job: Fields, partition: Fields, reason: str) -> Wait | None:
    if not (reason == "Reservation" or _MAY_BE_RESERVED.match(reason)):
        return None
    found = site.parse_reservations(_ask(site.reservations_command()))
    if reason == "Reservation":
        own = [each for each in found if each.name == job.get("Reservation")]
        return Wait(reason, _of_own(own[0]), wait_reasons.WAIT) if own else None
    nodes = commands.value_of(job.get("ReqNodeList", "")) or partition.get("Nodes", "")
    now, seconds = datetime.now(), commands.parse_time_left(job.get("TimeLimit", ""))
    for reservation in found:
        reaches = seconds is None or now + timedelta(seconds=min(seconds, MAX_SECONDS)) > reservation.start
        if reaches and reservation.end > now and _is_meant(reservation, reason, nodes):
            return _until(reservation, reason, job_id, now)
    return None


def _of_own(reservation: Reservation) -> str:
    begins = "has not begun" if reservation.start > datetime.now() else "has no room for it yet"
    return f"{reservation.sentence} {begins}"


def _is_meant(reservation: Reservation, reason: str, nodes: str) -> bool:
    """Return whether a job waits because of a reservation of these nodes, on which it could run otherwise."""
    if "ReqNodeNotAvail" in reason:
        is_wanted = reservation.is_maintenance or not wait_reasons.is_of_maintenance(reason)
        return is_wanted and "UnavailableNodes" not in reason and reservation.shares(nodes)
    # SLURM tells only that other jobs come first, which it says of most jobs
    return reservation.is_maintenance and reservation.has_all(nodes)


def _until(reservation: Reservation, reason: str, job_id: str, now: datetime) -> Wait:
    minutes = int((reservation.start - now - TO_START).total_seconds() // 60)
    if minutes <= 0:
        return Wait(reason, f"its nodes are taken by {reservation.sentence}", wait_reasons.WAIT)
    most = limits.clock(minutes)
    words = f"{reservation.sentence}: with --time {most} or less it could start before"
    return Wait(reason, words, f"`scontrol update JobId={job_id} TimeLimit={most}` shortens it in the queue")
