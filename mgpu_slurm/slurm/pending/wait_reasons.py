"""Explain in plain words why a job waits: squeue(1), JOB REASON CODES."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mgpu_slurm.slurm.pending import limits

FEWER = "cancel it, and `resume` it with less"
OTHER_QOS = "cancel it, and `resume` it with another --qos or --account"
RELEASE = "`scontrol release {job}` lets it start"
NEVER = "it can never start: "
NO_NODE = f"{NEVER}no node has what it asks for"
WAIT = "nothing to fix: it starts by itself"
MAINTENANCE = "reserved for maintenance"


@dataclass(frozen=True)
class Explanation:
    """What a reason means, and what helps."""

    words: str
    fix: str = WAIT
    is_plain: bool = False
    """Whether the reason says as much in a table, where there is little room."""


_EXPLANATIONS = {
    "None": Explanation("SLURM has not looked at it yet", is_plain=True),
    "Priority": Explanation("jobs with a higher priority come first", is_plain=True),
    "Resources": Explanation("it is among the next, and waits until enough of what it asks for is free", is_plain=True),
    "BeginTime": Explanation(
        "SLURM holds it back until a time: that of --begin, or a pause after a requeue", is_plain=True
    ),
    "Dependency": Explanation("it waits for other runs (--after)", is_plain=True),
    "JobArrayTaskLimit": Explanation("as many runs of its group are active as it allows at the same time"),
    "JobHeldUser": Explanation("it is held by its user", RELEASE, is_plain=True),
    "JobHeldAdmin": Explanation("it is held by an administrator", "ask your admins"),
    "JobHoldMaxRequeue": Explanation("it is held: SLURM had to start it again too often", RELEASE),
    "job requeued in held state": Explanation("it was requeued and is held", RELEASE, is_plain=True),
    "launch failed requeued held": Explanation("it is held: its launch failed, as by a broken node", RELEASE),
    "PartitionConfig": Explanation(f"{NEVER}it asks for more than the partition allows", FEWER),
    "PartitionNodeLimit": Explanation(f"{NEVER}it asks for more nodes than the partition allows", FEWER),
    "PartitionTimeLimit": Explanation(f"{NEVER}it asks for more time than the partition allows", FEWER),
    "PartitionDown": Explanation("its partition is down", "wait, or use another one with --partition"),
    "PartitionInactive": Explanation("its partition starts no jobs at present", "wait, or use another --partition"),
    "BadConstraints": Explanation(NO_NODE, FEWER),
    "MaxMemPerLimit": Explanation(f"{NEVER}it asks for more memory than the site allows a core or node", FEWER),
    "AccountNotAllowed": Explanation(f"{NEVER}its partition does not accept its account", OTHER_QOS),
    "QOSNotAllowed": Explanation(f"{NEVER}its account or partition does not accept its QOS", OTHER_QOS),
    "InvalidAccount": Explanation(f"{NEVER}its account does not exist any more", OTHER_QOS),
    "InvalidQOS": Explanation(f"{NEVER}its QOS does not exist any more", OTHER_QOS),
    "QOSUsageThreshold": Explanation("your recent use of the cluster is above what its QOS allows"),
    "QOSJobLimit": Explanation("its QOS allows no more jobs"),
    "QOSResourceLimit": Explanation("its QOS allows no more resources"),
    "QOSTimeLimit": Explanation("its QOS allows no more time"),
    "AssociationJobLimit": Explanation("its account allows no more jobs"),
    "AssociationResourceLimit": Explanation("its account allows no more resources"),
    "AssociationTimeLimit": Explanation("its account allows no more time"),
    "Licenses": Explanation("other jobs use the licenses that it asks for"),
    "Reservation": Explanation("its reservation has not begun, or has no room"),
    "ReservationDeleted": Explanation(
        "it is held: its reservation was deleted", "cancel it, and `resume` it without --reservation"
    ),
    "ReqNodeNotAvail": Explanation(
        "a node that it needs is down, drained or reserved", "wait, or `resume` it without --nodelist"
    ),
}
_BY_REASON = {reason.lower(): explanation for reason, explanation in _EXPLANATIONS.items()}
_OF_MAINTENANCE = Explanation(
    "it would not end before a maintenance of nodes that it needs",
    "wait, or `resume` it with a --time that ends before",
)


def normal(reason: str) -> str:
    """Return a reason in squeue's form; scontrol has underscores for blanks."""
    return reason.replace("_", " ").strip()


def is_of_maintenance(reason: str) -> bool:
    return MAINTENANCE in normal(reason).lower()


def explained(reason: str) -> Explanation | None:
    """Return what a reason of squeue means; None if it is unknown, or words of its own.

    Args:
        reason: may end with details, such as `ReqNodeNotAvail, UnavailableNodes:n[1-2]`.
    """
    if is_of_maintenance(reason):
        return _OF_MAINTENANCE
    reason = normal(reason)
    code = re.split(r"[,(:]", reason, maxsplit=1)[0].strip()
    if (named := limits.named_by(code)) is not None:
        if named.is_of_a_job:
            return Explanation(
                NEVER + named.words, "cancel it, and `resume` it with more" if named.kind == "Min" else FEWER
            )
        return Explanation(named.words)
    return _BY_REASON.get(reason.lower()) or _BY_REASON.get(code.lower())
