"""sbatch: what it is asked, what its answer means, and how a job arrives in the queue once or not at all.

Both sides use it: the login node for a new run, a job for its own continuation.
"""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from mgpu_slurm.core import records
from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.slurm import commands, job_lock
from mgpu_slurm.slurm.outage import Patience

TIME_LIMIT = 60
"""Seconds for which sbatch may work on an answer; it is ended after that."""

KILL_AFTER = 5
"""Seconds for which it may put off its end."""

_NOT_STARTED = (126, 127)
_TIMED_OUT = 124
_WRONG_OPTION = 255
_START = re.compile(r"Job \d+ to start at (?P<at>\S+) .*on (?:nodes )?(?P<nodes>\S+) in partition (?P<partition>\S+)")
_ANSWER = re.compile(r"\s*(?P<id>\d+)(?:;\S+)?\s*")


class MayBeQueued(ClusterError):
    """Nobody can tell whether SLURM has taken the job."""


def new_token() -> str:
    """Marks one submission, so that its job can be found again in SLURM's queue."""
    return f"mgpu-{secrets.token_hex(8)}"


def comment(spec: Spec, token: str) -> str:
    """What a job carries: the user's own words, and the token."""
    return " ".join(filter(None, [spec.resources.sbatch.get("comment"), token]))


def command(*arguments: str) -> list[str]:
    """Calls sbatch, and ends it after a time. What it says comes on standard output, errors too."""
    # timeout makes a process group of its own, so that Ctrl-C at a terminal does not end sbatch half-way
    limited = 'exec timeout --kill-after="$0" "$@" 2>&1'
    return ["sh", "-c", limited, str(KILL_AFTER), str(TIME_LIMIT), "sbatch", *arguments]


def call(words: Sequence[str], environ: Mapping[str, str], text: str = "") -> str:
    """What sbatch says.

    Args:
        environ: what sbatch, and with it the job, inherits (see `commands.scrubbed_environment`).
        text: the script, where the command names none.

    Raises:
        SlurmUnavailable: SLURM does not answer at the moment.
        ClusterError: it refused.
    """
    done = subprocess.run(
        words,
        input=text,
        stdout=subprocess.PIPE,
        env=dict(environ),
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise failure(done.returncode, done.stdout)
    return done.stdout


def job_id_in(output: str) -> str:
    """The job id that `sbatch --parsable` answers, past the banners of a site.

    Raises:
        SlurmUnavailable: there is none.
    """
    ids = [found["id"] for found in map(_ANSWER.fullmatch, output.splitlines()) if found]
    if not ids:
        raise commands.SlurmUnavailable(f"sbatch answered without a job id: {commands.error_line(output)[:200]}")
    return ids[-1]


def failure(code: int, output: str) -> ClusterError:
    """Why sbatch failed: a `SlurmUnavailable` if asking again may help, else a refusal.

    Args:
        code: its exit code, negative where a signal ended it.
    """
    said = commands.error_line(output)
    if code in _NOT_STARTED:
        return ClusterError(f"sbatch cannot be started: {said}")
    if code == _TIMED_OUT:
        return commands.SlurmUnavailable(f"sbatch did not answer within {TIME_LIMIT} s")
    if code < 0 or (code > 128 and not _is_wrong_option(code, output)):
        return commands.SlurmUnavailable(f"sbatch was ended by {_signal_name(abs(code) % 128)}")
    request = commands.passing(output)
    if request is None:
        return ClusterError(f"sbatch refused the job: {said}")
    return commands.SlurmUnavailable(f"sbatch got no answer: {said}", request)


def _is_wrong_option(code: int, output: str) -> bool:
    """Whether sbatch has ended by itself; one that stands in for it, such as ssh, has the same code for no answer."""
    return code == _WRONG_OPTION and any(line.startswith("sbatch: ") for line in output.splitlines())


def _signal_name(signum: int) -> str:
    with suppress(ValueError):
        return signal.Signals(signum).name
    return f"signal {signum}"


def find(folder: RunFolder, token: str) -> str | None:
    """The id of the job that came of a submission; None where there is none.

    Args:
        folder: of the run or group.

    Raises:
        ClusterError: SLURM does not answer.
    """
    # a job that has started says so itself, also when SLURM has forgotten it
    return job_lock.holder(folder, token) or commands.job_marked(token)


class ExactlyOnceSubmission:
    """One job on its way into SLURM's queue, where it arrives once or not at all."""

    def __init__(self, token: str, ask: Callable[[], str], look: Callable[[], str | None]) -> None:
        """
        Args:
            token: marks the job.
            ask: calls sbatch once and returns the job id; raises what `failure` gives.
            look: the id of the job where SLURM has it, else None; a ClusterError where it does not answer.
        """
        self._token = token
        self._ask = ask
        self._look = look
        self.job_id: str | None = None
        """Once it is known."""
        self.is_unsure = False
        """Whether the job may be queued without anybody here having seen it."""

    def queue(self, patience: Patience) -> str:
        """Brings the job into the queue; its id.

        Raises:
            MayBeQueued: SLURM stopped answering, and the job may have been taken before.
            ClusterError: SLURM refused the job, or did not answer for too long; nothing is queued.
        """
        while self.job_id is None:
            problem = self._asked()
            if problem is not None:
                patience.tell(problem)
                # only a SLURM that answers, and does not have the job, is asked to take it again
                if not self.find(problem, patience) and patience.is_over:
                    raise _nothing_queued(problem)
        return self.job_id

    def _asked(self) -> commands.SlurmUnavailable | None:
        """Calls sbatch once; why nobody can tell what became of that, or None."""
        self.is_unsure = True
        try:
            self.job_id = self._ask()
        except commands.SlurmUnavailable as problem:
            self.is_unsure = problem.request == commands.LOST
            return problem
        except ClusterError:
            self.is_unsure = False
            raise
        self.is_unsure = False
        return None

    def find(self, problem: Exception, patience: Patience) -> bool:
        """Whether the job is in the queue all the same; certain afterwards.

        Args:
            problem: why that is to be asked.

        Raises:
            MayBeQueued: SLURM does not answer.
            ClusterError: the same, but nothing is queued.
        """
        # the first answer may be older than what SLURM still does with a request that nobody waits for any more
        answers = 2 if self.is_unsure else 1
        while answers:
            patience.pause()
            try:
                self.job_id = self._look()
            except ClusterError as silent:
                if patience.is_over:
                    raise self._unknown(problem, silent) from None
                continue
            answers = 0 if self.job_id is not None else answers - 1
        self.is_unsure = False
        return self.job_id is not None

    def write_down(self, folder: RunFolder) -> None:
        """Tells the run's history what became of it.

        Not its state: the job may be running by now, and the state is its own then.
        """
        if self.job_id is not None:
            records.record_event(folder, "submitted", token=self._token, job_id=self.job_id)
        elif not self.is_unsure:
            records.record_event(folder, "refused", token=self._token)

    def _unknown(self, problem: Exception, silent: ClusterError) -> ClusterError:
        if not self.is_unsure:
            return _nothing_queued(problem)
        return MayBeQueued(
            f"{problem}; whether the job is queued all the same is not known, because {silent}:"
            f" look for {self._token} in squeue -o '%i %k'"
        )


def _nothing_queued(problem: Exception) -> ClusterError:
    return ClusterError(f"{problem}; nothing was queued: try again later")


@dataclass(frozen=True)
class Start:
    """When and where a job would start, as the queue is now."""

    at: str
    """ISO 8601 with the zone."""
    nodes: str
    partition: str

    @property
    def sentence(self) -> str:
        at = datetime.fromisoformat(self.at)
        if at > datetime.now().astimezone() + commands.FORESEEABLE:
            return (
                f"SLURM would start it on {self.nodes} of {self.partition}, and cannot say when: before it are jobs"
                " that have no time limit, or that never start"
            )
        when = at.strftime("%Y-%m-%d %H:%M:%S")
        return f"SLURM would start it at {when} on {self.nodes} in partition {self.partition}, as the queue is now"


def start_in(output: str) -> Start:
    """What `sbatch --test-only` says.

    Raises:
        ClusterError: it says something else.
    """
    found = _START.search(output)
    if found is None:
        raise ClusterError(f"sbatch --test-only was not understood: {commands.error_line(output)}")
    at = datetime.fromisoformat(found["at"]).astimezone().isoformat()
    return Start(at, found["nodes"], found["partition"])
