"""Check this site's SLURM and cluster file.

Of SLURM: its version, partitions, settings and limits, as far as runs depend on them.

Functions that judge are pure; `findings_of_slurm` and those of the cluster file query SLURM.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.core.formatting import counted
from mgpu_slurm.core.retry import Note
from mgpu_slurm.doctor import check_results
from mgpu_slurm.doctor.check_results import Finding, span
from mgpu_slurm.executors import slurm_queue
from mgpu_slurm.run_folder import layout
from mgpu_slurm.slurm import commands, site
from mgpu_slurm.slurm.pending import limits
from mgpu_slurm.slurm.pending.limits import Limit
from mgpu_slurm.slurm.site import Association, Partition, Reservation
from mgpu_slurm.submission import cluster_file as clusters
from mgpu_slurm.submission import plan
from mgpu_slurm.submission.cluster_file import ClusterFile
from mgpu_slurm.submission.plan import Request

OLDEST_SLURM = (20, 11)
"""First version with srun --overlap; all other features used here are older."""

OLDEST_TESTED = (22, 5)
"""Also the first version in which srun takes the cores of a rank only from SRUN_CPUS_PER_TASK."""

SLOW_CONTROLLER = 2.0
SHORT_KILL_WAIT = 30
"""Seconds; SLURM's default, enough to write a checkpoint of some GB."""

ASK_WITHIN = 20.0

CONTROLLER = "controller"
"""Name of the check whether SLURM answers at all."""


@dataclass
class Site:
    """Facts about the site for later checks."""

    partitions: list[Partition] = field(default_factory=list)

    @property
    def partitions_with_gpus(self) -> list[str]:
        return [partition.name for partition in self.partitions if partition.has_gpus]


def findings_of_slurm(found: Site) -> Iterator[Finding]:
    """Query SLURM, each query with a time-out, and yield findings; also fills `found`."""
    try:
        version = site.parse_version(commands.run(site.version_command(), ASK_WITHIN))
        begun = time.perf_counter()
        commands.run(site.ping_command(), ASK_WITHIN)
        answered = time.perf_counter() - begun
        settings = site.parse_config(commands.run(site.config_command(), ASK_WITHIN))
        partitions = commands.run(site.partitions_command(), ASK_WITHIN)
        found.partitions = site.parse_partitions(partitions, commands.run(site.nodes_command(), ASK_WITHIN))
    except ClusterError as error:
        yield check_results.failed(CONTROLLER, f"SLURM does not answer: {error}", "try again later, or ask the site")
        return
    if version:
        yield version_finding(version)
    yield controller_finding(settings.get("ClusterName", ""), answered)
    for partition in found.partitions:
        yield partition_finding(partition)
    if not any(partition.is_default for partition in found.partitions):
        fix = "pass --partition, or set it under flags: in mgpu.yaml"
        yield check_results.warning("partitions", "there is no default partition", fix)
    yield from setting_findings(settings, found.partitions)
    yield from _accounting_findings(settings)
    yield from _reservation_findings(datetime.now())
    yield from variable_findings(os.environ)


def version_finding(version: tuple[int, ...]) -> Finding:
    year, month, *rest = version
    # 22.05.8, as SLURM writes it
    text = f"SLURM {'.'.join(map(str, [year, f'{month:02}', *rest]))}"
    if version < OLDEST_SLURM:
        return check_results.failed(
            "version", f"{text}: srun has no --overlap before 20.11", "ask the site to update it"
        )
    if version < OLDEST_TESTED:
        untested = f"{text}: older than 22.05, the oldest release that mgpu_slurm is tested on; nothing is refused"
        return check_results.warning("version", untested, "try a short run with 2 nodes; ask the site to update SLURM")
    return check_results.ok("version", f"{text}: supported; ranks get their cores by SRUN_CPUS_PER_TASK")


def controller_finding(cluster: str, seconds: float) -> Finding:
    text = f"controller of {cluster or 'the cluster'} answers in {span(seconds)}"
    if seconds > SLOW_CONTROLLER:
        fix = "it is busy: submit many runs at once (--seeds), and follow few of them"
        return check_results.warning(CONTROLLER, text, fix)
    return check_results.ok(CONTROLLER, text)


def partition_finding(partition: Partition) -> Finding:
    """Return one line with the limits and nodes of a partition."""
    name = f"partition {partition.name}{' (default)' if partition.is_default else ''}"
    total = sum(partition.nodes.values())
    unusable = [f"{count} {state}" for state, count in sorted(partition.nodes.items()) if site.is_unusable(state)]
    nodes = f"{counted(total, 'node')}{' (' + ', '.join(unusable) + ')' if unusable else ''}"
    text = f"{name}: {nodes}, {_gpus(partition)}, {_time_limit(partition)}"
    if partition.max_nodes is not None:
        text += f", at most {partition.max_nodes} nodes a job"
    if partition.state != "UP":
        return check_results.warning(
            "partitions", f"{text}: it is {partition.state}", "use another one with --partition"
        )
    if not partition.usable_nodes:
        level = check_results.failed if partition.is_default else check_results.warning
        return level("partitions", f"{text}: none of its nodes is usable", "use another one with --partition, or wait")
    return check_results.ok("partitions", text)


def _gpus(partition: Partition) -> str:
    """Return the GPUs of its nodes, such as `0, 4 (v100) or 8 (a100) GPUs each`."""
    if not partition.has_gpus:
        return "no GPUs"
    has_types = any(name for gpus in partition.gpus for name in gpus)
    *others, most = [f"{gpus.total()}{_types(gpus) if has_types else ''}" for gpus in partition.gpus]
    if others:
        return f"{', '.join(others)} or {most} GPUs each"
    (gpus,) = partition.gpus
    return f"{counted(gpus.total(), 'GPU')}{_types(gpus) if has_types else ''} each"


def _types(gpus: Counter[str]) -> str:
    """Return ` (2 v100, 6 a100)`, ` (a100)` if all are the same, or nothing without GPUs."""
    names = [name or "no type" for name in gpus]
    if len(names) > 1:
        names = [f"{count} {name or 'of no type'}" for name, count in gpus.items()]
    return f" ({', '.join(names)})" if names else ""


def _time_limit(partition: Partition) -> str:
    if partition.max_time is None:
        return f"no time limit{f' (default {partition.default_time})' if partition.default_time else ''}"
    asked_none = partition.default_time or "the limit"
    return f"time limit {partition.max_time} (default {asked_none})"


def setting_findings(settings: Mapping[str, str], partitions: list[Partition]) -> Iterator[Finding]:
    """Judge the SLURM settings that affect runs; those that this version does not report are skipped."""
    if "JobRequeue" in settings:
        by_default = "" if settings["JobRequeue"] == "1" else ", which is not the site's default (JobRequeue=0)"
        text = f"runs request requeueing{by_default}; if it is refused, they submit a job that continues them"
        yield check_results.ok("requeue", text)
    if settings.get("MaxArraySize", "").isdigit():
        text = f"a job array holds at most {settings['MaxArraySize']} runs; larger groups use several arrays"
        yield check_results.ok("arrays", text)
    yield from _kill_wait_findings(settings, partitions)
    if settings.get("SelectType", "").endswith(("linear", "cons_res")):
        text = f"{settings['SelectType']}: SLURM does not count GPUs with --gpus-per-node"
        fix = 'set rename: {gpus-per-node: "gres=gpu:{}"} in mgpu.yaml'
        yield check_results.warning("select", text, fix)
    plugins = settings.get("JobSubmitPlugins", "(null)")
    if plugins not in ("", "(null)"):
        yield check_results.ok(
            "plugins", f"JobSubmitPlugins={plugins}: the site may change or refuse the options of a run"
        )


def _kill_wait_findings(settings: Mapping[str, str], partitions: list[Partition]) -> Iterator[Finding]:
    wait = settings.get("KillWait", "").partition(" ")[0]
    if not wait.isdigit():
        return
    seconds = int(wait)
    graces = [partition.grace for partition in partitions if partition.preempt_mode != "OFF"]
    text = f"a cancelled run has {seconds} s to save (KillWait)"
    if graces:
        text += f", a preempted one {seconds + min(graces)} s"
    if seconds < SHORT_KILL_WAIT:
        fix = "a save that takes longer is lost, and the previous checkpoint counts: call run.save() now and then"
        yield check_results.warning("kill wait", text, fix)
    else:
        yield check_results.ok("kill wait", text)
    cancelling = [partition.name for partition in partitions if "CANCEL" in partition.preempt_mode]
    if cancelling:
        text = f"preemption cancels runs in {', '.join(cancelling)}, and does not requeue them"
        yield check_results.warning("preemption", text, "`resume` continues such a run from its checkpoint")


def _accounting_findings(settings: Mapping[str, str]) -> Iterator[Finding]:
    begun = time.perf_counter()
    try:
        commands.run(site.accounting_command(), ASK_WITHIN)
    except ClusterError as error:
        yield no_accounting_finding(str(error), settings.get("MinJobAge", ""))
        return
    yield check_results.ok("accounting", f"accounting: sacct answers in {span(time.perf_counter() - begun)}")
    yield from limit_findings(*_rights(_user()))


def _rights(user: str) -> tuple[list[Association], list[Limit]]:
    """Return the accounts that the user may use, and the limits that apply there; some sites do not tell them."""
    rights: list[Association] = []
    found: list[Limit] = []
    with contextlib.suppress(ClusterError):
        rights = site.parse_associations(commands.run(site.associations_command(user), ASK_WITHIN))
    with contextlib.suppress(ClusterError):
        found += limits.parse_shown(commands.run(limits.show_command(user, ()), ASK_WITHIN), user, "")
    with contextlib.suppress(ClusterError):
        by_qos = limits.parse_qos(commands.run(limits.qos_command(), ASK_WITHIN)) if rights else {}
        allowed = dict.fromkeys(name for right in rights for name in right.qos)
        found += [limit for name in allowed for limit in by_qos.get(name, [])]
    return rights, found


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # containers may run with ids that are not in passwd
        return str(os.getuid())


def no_accounting_finding(problem: str, min_job_age: str) -> Finding:
    text = f"no accounting ({problem}): the end of a run is known only from its own folder"
    if min_job_age:
        text += f", and for {min_job_age} from SLURM (MinJobAge)"
    fix = "nothing to fix: a run whose job is killed counts as lost unless `status` is called in that time"
    return check_results.warning("accounting", text, fix)


def limit_findings(rights: list[Association], found: list[Limit]) -> Iterator[Finding]:
    """Name the user's accounts, and the limits of each account and QOS."""
    if rights:
        accounts = ", ".join(dict.fromkeys(right.account for right in rights))
        yield check_results.ok("account", f"account{'s' if ',' in accounts else ''} {accounts}")
    by_owner: dict[str, list[str]] = {}
    for limit in found:
        by_owner.setdefault(limit.owner, []).append(limit.short())
    for owner, texts in by_owner.items():
        yield check_results.ok("account limits", f"{owner}: at most {', '.join(dict.fromkeys(texts))}")


def _reservation_findings(now: datetime) -> Iterator[Finding]:
    try:
        output = commands.run(site.reservations_command(), ASK_WITHIN)
    except ClusterError:
        return
    ahead = [each for each in site.parse_reservations(output) if each.end > now]
    for reservation in ahead:
        yield reservation_finding(reservation, now)


def reservation_finding(reservation: Reservation, now: datetime) -> Finding:
    text = reservation.sentence
    if not reservation.is_maintenance:
        return check_results.ok("reservations", f"{text}: only its users get these nodes")
    if reservation.start <= now:
        return check_results.warning("reservations", f"{text}: no run starts there", "use other nodes, or wait")
    left = limits.clock(int((reservation.start - now).total_seconds() // 60))
    fix = "a run with a longer --time waits until it is over"
    return check_results.warning("reservations", f"{text}, {left} from now", fix)


def variable_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Warn of variables with which this shell sets defaults for sbatch, and which do not reach runs."""
    names = sorted(name for name in environ if name.startswith("SBATCH_") and name not in commands.DEFAULTS_OF_SBATCH)
    if names:
        text = f"{', '.join(names)} in this shell {'does' if len(names) == 1 else 'do'} not reach runs"
        fix = "set the same under flags: in mgpu.yaml, or on the command line"
        yield check_results.warning("variables", text, fix)


# -- the cluster file, mgpu.yaml: whether it is valid, and whether this SLURM accepts its clusters' flags


def findings_of_file(cwd: Path, note: Note, slurm_answers: bool) -> Iterator[Finding]:
    """Check the cluster file, and with SLURM the flags of its clusters.

    Args:
        note: Called while waiting for SLURM.
        slurm_answers: Whether SLURM can be queried.
    """
    files = [str(path) for path in (clusters.user_file(), cwd / clusters.FILE_NAME) if path.exists()]
    if not files:
        text = f"no {clusters.FILE_NAME} (here or {clusters.user_file()}): only command-line options are used"
        yield check_results.ok("cluster file", text)
        if slurm_answers:
            yield _taken(None, cwd, note, is_meant=True)
    else:
        try:
            file = clusters.load(cwd)
        except UserError as error:
            yield check_results.failed("cluster file", str(error), "fix the file")
            return
        plural = "s" if len(file.clusters) > 1 else ""
        named = f"cluster{plural} {', '.join(file.clusters)}" if file.clusters else "no clusters"
        yield check_results.ok("cluster file", f"{' and '.join(files)}: {named}")
        if slurm_answers:
            yield from _cluster_findings(file, cwd, note)


def _cluster_findings(file: ClusterFile, cwd: Path, note: Note) -> Iterator[Finding]:
    for name in file.clusters:
        if name != "local":
            yield _taken(name, cwd, note, is_meant=name == file.cluster or len(file.clusters) == 1)


def _taken(name: str | None, cwd: Path, note: Note, is_meant: bool) -> Finding:
    """Check whether sbatch would accept a job of one node with a cluster's flags; nothing is queued.

    Args:
        name: Name of the cluster; None for a job without one.
        is_meant: Whether it is the default cluster; others may belong to another site.
    """
    what = f"cluster {name!r}" if name else "a job without a cluster file"
    request = Request(command=("true",), executor="slurm", cluster=name, project=cwd, name="doctor", sinks=("none",))
    try:
        made = plan.make(request, cwd, layout.runs_root(), note)
        start = slurm_queue.check(made.spec, made.folder)
    except (UserError, ClusterError) as error:
        if is_meant:
            fix = "fix its flags in mgpu.yaml" if name else "add the missing options under flags: in mgpu.yaml"
            return check_results.failed("flags", f"{what}: {error}", fix)
        fix = "ignore this if that cluster is at another site"
        return check_results.warning("flags", f"{what} does not fit this SLURM: {error}", fix)
    assert start is not None
    return check_results.ok("flags", f"{what}, on one node: {start.sentence}")
