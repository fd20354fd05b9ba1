"""Call sbatch, parse its answers, and submit a run exactly once or not at all.

Used on the login node for a new run, and in a job for its own continuation. Each submission has a token, and
`claims/<token>` of the run contains the id of the first job that started with it: SLURM may have accepted a submission
twice, an earlier job may start after a later one was submitted, and a job that SLURM restarts is the same job.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.core.files import sync_folder
from mgpu_slurm.core.formatting import printable
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm import commands
from mgpu_slurm.slurm.commands import Patience
from mgpu_slurm.slurm.pending import limits

TIME_LIMIT = 60
"""Seconds that sbatch may take to answer; it is terminated after that."""

KILL_AFTER = 5
"""Seconds after that until it is killed."""

_NOT_STARTED = (126, 127)
_TIMED_OUT = 124
_WRONG_OPTION = 255
_NO_SUCH_NODES = (
    "CPU count per node can not be satisfied",
    "Invalid generic resource (gres) specification",
    "Memory specification can not be satisfied",
    "Requested node configuration is not available",
)
"""Refusals of a job that asks for what no nodes have, in the words of slurm_errno.c."""
_START = re.compile(r"Job \d+ to start at (?P<at>\S+) .*on (?:nodes )?(?P<nodes>\S+) in partition (?P<partition>\S+)")
_ANSWER = re.compile(r"\s*(?P<id>[0-9]{1,18})(?:;\S+)?\s*")


class MayBeQueued(ClusterError):
    """It is unknown whether SLURM has accepted the job."""


def new_token() -> str:
    """Return a token that marks one submission, so that its job can be found in SLURM's queue."""
    return f"mgpu-{secrets.token_hex(8)}"


def comment(spec: Spec, token: str) -> str:
    """Return the comment of a job: the user's own, and the token."""
    return " ".join(filter(None, [spec.resources.sbatch.get("comment"), token]))


def command(*arguments: str) -> list[str]:
    """Return the command that calls sbatch with a time limit; errors too are printed on standard output."""
    # timeout creates a separate process group, so that Ctrl-C at a terminal does not interrupt sbatch half-way
    limited = 'exec timeout --kill-after="$0" "$@" 2>&1'
    return ["sh", "-c", limited, str(KILL_AFTER), str(TIME_LIMIT), "sbatch", *arguments]


def call(words: Sequence[str], environ: Mapping[str, str], text: str = "") -> str:
    """Run sbatch and return its output.

    Args:
        environ: the environment of sbatch, and so of the job (see `commands.scrubbed_environment`).
        text: the script, if the command does not name one.

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
    """Return the job id in the output of `sbatch --parsable`, skipping a site's banners.

    Raises:
        SlurmUnavailable: there is none.
    """
    ids = [found["id"] for found in map(_ANSWER.fullmatch, output.splitlines()) if found]
    if not ids:
        raise commands.SlurmUnavailable(f"sbatch printed no job id: {commands.error_line(output)[:200]}")
    return ids[-1]


def failure(code: int, output: str) -> ClusterError:
    """Return the error of a failed sbatch: a `SlurmUnavailable` if a retry may help, else a refusal.

    Args:
        code: its exit code, negative if a signal ended it.
    """
    said = commands.error_line(output)
    if code in _NOT_STARTED:
        if shutil.which("sbatch") is None:
            return ClusterError("no sbatch on PATH: run this on a login node of the cluster")
        return ClusterError(f"sbatch cannot be started: {said}")
    if code == _TIMED_OUT:
        return commands.SlurmUnavailable(f"sbatch did not answer within {TIME_LIMIT} s")
    if code < 0 or (code > 128 and not _is_wrong_option(code, output)):
        return commands.SlurmUnavailable(f"sbatch was killed by {_signal_name(abs(code) % 128)}")
    request = commands.passing(output)
    if request is None:
        meaning = _meaning(said.rpartition(": ")[2])
        return ClusterError(f"sbatch refused the job: {said}" + (f": {meaning}" if meaning else ""))
    return commands.SlurmUnavailable(f"sbatch got no answer: {said}", request)


def _meaning(refusal: str) -> str | None:
    """Return what a refusal means or what helps; None if its own words say it."""
    if refusal in _NO_SUCH_NODES:
        return "`sinfo -o '%P %D %c %m %G'` shows what nodes there are"
    # a limit is named by the reason of a job that waits for it
    limit = limits.named_by(refusal)
    return None if limit is None else limit.words


def _is_wrong_option(code: int, output: str) -> bool:
    """Return whether sbatch itself reported a wrong option; a substitute such as ssh uses the code for no answer."""
    return code == _WRONG_OPTION and any(line.startswith("sbatch: ") for line in output.splitlines())


def _signal_name(signum: int) -> str:
    with suppress(ValueError):
        return signal.Signals(signum).name
    return f"signal {signum}"


def find(folder: RunFolder, token: str) -> str | None:
    """Return the id of a submission's job; None if there is none.

    Args:
        folder: of the run or group.

    Raises:
        ClusterError: SLURM does not answer.
    """
    # a job that has started has claimed its token, even if SLURM has forgotten it
    return claimant(folder, token) or commands.job_marked(token)


class ExactlyOnceSubmission:
    """The submission of one job, which is queued once or not at all."""

    def __init__(self, token: str, ask: Callable[[], str], look: Callable[[], str | None]) -> None:
        """
        Args:
            token: marks the job.
            ask: calls sbatch once and returns the job id; raises the error of `failure`.
            look: returns the id of the job if SLURM has it, else None; raises ClusterError if SLURM does not answer.
        """
        self._token = token
        self._ask = ask
        self._look = look
        self.job_id: str | None = None
        """None until it is known."""
        self.is_unsure = False
        """Whether the job may be queued although no answer was received."""

    def queue(self, patience: Patience) -> str:
        """Submit the job and return its id.

        Raises:
            MayBeQueued: SLURM stopped answering, and may have accepted the job before.
            ClusterError: SLURM refused the job, or did not answer for too long; nothing is queued.
        """
        while self.job_id is None:
            problem = self._asked()
            if problem is not None:
                patience.tell(problem)
                # retry only when SLURM answers and does not have the job
                if not self.find(problem, patience) and patience.is_over:
                    raise _nothing_queued(problem)
        return self.job_id

    def _asked(self) -> commands.SlurmUnavailable | None:
        """Call sbatch once; return the problem if SLURM was unavailable, else None."""
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
        """Return whether the job was queued despite a problem; afterwards this is certain.

        Args:
            problem: the reason for the search, for the error.

        Raises:
            MayBeQueued: SLURM does not answer.
            ClusterError: the same, but nothing is queued.
        """
        # SLURM may still accept an abandoned request after its first answer
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
        """Record the outcome in the run's history.

        Not in its state: the job may be running by now, and then only the job writes the state.
        """
        if self.job_id is not None:
            records.record_event(folder, "submitted", token=self._token, job_id=self.job_id)
        elif not self.is_unsure:
            records.record_event(folder, "refused", token=self._token)

    def _unknown(self, problem: Exception, silent: ClusterError) -> ClusterError:
        if not self.is_unsure:
            return _nothing_queued(problem)
        return MayBeQueued(
            f"{problem}; the job may be queued nevertheless, because {silent}:"
            f" look for {self._token} in squeue -o '%i %k'"
        )


def _nothing_queued(problem: Exception) -> ClusterError:
    return ClusterError(f"{problem}; nothing was queued: try again later")


def claim(folder: RunFolder, token: str, job_id: str) -> str:
    """Claim a run for a job permanently; return the id of the job that holds it, this one or another.

    Args:
        folder: of a single run.
        token: of the job's own submission.
        job_id: as SLURM's commands know it.
    """
    for later in [token, *_tokens_after(folder, token)]:
        holder = _write_claim(folder.claims / later, job_id)
        if holder != job_id:
            return holder
    return job_id


def _tokens_after(folder: RunFolder, token: str) -> list[str]:
    """Return the tokens of the run's later submissions, oldest first.

    A job claims these too, so that their jobs cannot take the run if they start later. If one of them has started
    already, it keeps the run.
    """
    tokens = [submission.token for submission in records.submissions_of(folder)]
    return tokens[tokens.index(token) + 1 :] if token in tokens else []


def _write_claim(path: Path, job_id: str) -> str:
    """Write the claim atomically if there is none yet; return the id of the job that holds it."""
    path.parent.mkdir(exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(job_id)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o640)
        # unlike a rename it fails if the name exists, also between two machines
        os.link(temporary, path)
        sync_folder(path.parent)
    except FileExistsError:
        return path.read_text()
    finally:
        os.unlink(temporary)
    return job_id


def claimant(folder: RunFolder, token: str) -> str | None:
    """Return the id of the job that started with a token, or None.

    Args:
        folder: of a run or a group; for a group the id is the array's.
    """
    own = folder.claims / token
    if own.exists():
        return own.read_text()
    of_a_task = next(folder.tasks.glob(f"*/claims/{token}"), None)
    return None if of_a_task is None else of_a_task.read_text().partition("_")[0]


@dataclass(frozen=True)
class Start:
    """When and where a job would start, given the current queue."""

    at: str
    """Time in ISO 8601 with the zone."""
    nodes: str
    partition: str

    @property
    def sentence(self) -> str:
        at = datetime.fromisoformat(self.at)
        if at > datetime.now().astimezone() + commands.FORESEEABLE:
            return (
                f"SLURM would start it on {self.nodes} of {self.partition}, but cannot tell when: jobs ahead of it"
                " have no time limit or never start"
            )
        when = at.strftime("%Y-%m-%d %H:%M:%S")
        return f"SLURM would start it at {when} on {self.nodes} in partition {self.partition}, by the current queue"


def start_in(output: str) -> Start:
    """Return the start in the output of `sbatch --test-only`.

    Raises:
        ClusterError: the output has another form.
    """
    found = _START.search(printable(output))
    at = commands.time_of(found["at"]) if found is not None else None
    if found is None or at is None:
        raise ClusterError(f"cannot parse the output of sbatch --test-only: {commands.error_line(output)[:200]}")
    return Start(datetime.fromisoformat(at).astimezone().isoformat(), found["nodes"], found["partition"])
