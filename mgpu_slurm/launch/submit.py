"""Submitting: the plan made real, in a folder that is hidden until it is complete.

A request that is refused leaves no folder behind; a submission that is killed leaves a run that works or a hidden
folder that the next submission removes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mgpu_slurm import config as configs
from mgpu_slurm import paths, records, slurm, states
from mgpu_slurm import target as targets
from mgpu_slurm.errors import ClusterError, UserError
from mgpu_slurm.launch import checked, environment, local, plan, registry, script, signature, snapshot
from mgpu_slurm.launch.check import Answer, Question, fill_config, resolve_config
from mgpu_slurm.launch.plan import Plan, Request
from mgpu_slurm.paths import RunFolder
from mgpu_slurm.spec import Spec

STALE_STAGING_SECONDS = 3600


@dataclass(frozen=True)
class Submission:
    """What was submitted, and as what."""

    plan: Plan
    job_id: str


def submit(request: Request) -> Submission:
    """Submits a run and returns as soon as its executor has taken it.

    Raises:
        UserError: something in the call or a file is wrong; no run folder is left.
        ClusterError: the cluster refused or did not answer; no run folder is left.
    """
    cwd, runs = Path.cwd(), paths.runs_root()
    made = plan.make(request, cwd, runs)
    paths.make_writable(runs)
    _remove_stale_staging(runs)
    with _staged(made, runs) as staging, local.supervisor(made.spec, made.folder, staging) as supervisor:
        made = _complete(made, request, staging, supervisor, cwd)
        registry.remember_root(runs)
        if supervisor is None:
            staging.path.rename(made.folder.path)
            return Submission(made, _queue(made.folder, made.spec, made.token))
        job_id = supervisor.claim(staging)
        staging.path.rename(made.folder.path)
        supervisor.go(made.folder)
        return Submission(made, job_id)


def rehearse(request: Request) -> Plan:
    """The plan of a submission, complete and checked, with nothing started and nothing left behind."""
    cwd, runs = Path.cwd(), paths.runs_root()
    made = plan.make(request, cwd, runs)
    with tempfile.TemporaryDirectory(prefix="mgpu-") as folder, _staged(made, Path(folder)) as staging:
        return _complete(made, request, staging, None, cwd)


def restart(folder: RunFolder, spec: Spec) -> str:
    """Starts a run that has ended again, as its next attempt; the job id.

    Raises:
        ClusterError: the cluster refused; the run stays as it ended.
    """
    with _locked(folder):
        before = records.read_state(folder)
        if states.is_alive(before["state"]):
            raise UserError(f"run {folder.run} is being resumed by somebody else")
        pending = {"state": "PENDING", "reason": "", "job_id": None, "ended": None, "submitted": records.now()}
        try:
            with local.supervisor(spec, folder, folder) as supervisor:
                if supervisor is None:
                    records.update_state(folder, sync=True, **pending)
                    return _queue(folder, spec, plan.new_token())
                job_id = supervisor.claim(folder, **pending)
                supervisor.go(folder)
                return job_id
        except BaseException:
            paths.write_json(folder.state, before)
            raise


@contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    """Nobody else on this machine starts the run meanwhile; on file systems without locks this is a wish."""
    descriptor = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _queue(folder: RunFolder, spec: Spec, token: str) -> str:
    """Hands a complete run folder to sbatch; the job id."""
    # submitit costs a tenth of a second to import
    from mgpu_slurm.launch import submitit_executor

    text = script.render(spec, folder, token)
    paths.write_whole(folder.submission, text)
    # whoever finds this without an answer after it can look for the job by its token
    records.record_event(folder, "submitting", token=token)
    try:
        job_id = submitit_executor.submit(text, folder, slurm.scrubbed_environment(os.environ))
    except ClusterError as refused:
        job_id = _found_in_queue(folder, token, refused)
    # not into the state: the job may be running by now, and the state is its own then
    records.record_event(folder, "submitted", job_id=job_id, token=token)
    return job_id


def _found_in_queue(folder: RunFolder, token: str, refused: ClusterError) -> str:
    """The job id of a submission that sbatch did not confirm: it may have queued the job all the same.

    Raises:
        ClusterError: it did not, and the folder of a run that never started is gone; or nobody can tell, and it stays.
    """
    try:
        job_id = slurm.job_marked(token)
    except ClusterError as silent:
        raise ClusterError(
            f"{refused}; whether the job is queued all the same is not known, because {silent}:"
            f" look for {token} in squeue -o '%i %k'"
        ) from None
    if job_id is None:
        if not records.attempts_started(folder):
            shutil.rmtree(folder.path, ignore_errors=True)
        raise refused
    return job_id


@contextmanager
def _staged(made: Plan, runs: Path) -> Iterator[RunFolder]:
    """A hidden folder beside the runs; it is gone afterwards unless it was renamed into a run."""
    paths.open_to(made.spec.readable_by)
    staging = RunFolder(runs / f"{paths.STAGING_PREFIX}{made.spec.run}")
    staging.create(made.spec.readable_by)
    try:
        yield staging
    finally:
        shutil.rmtree(staging.path, ignore_errors=True)


def _remove_stale_staging(runs: Path) -> None:
    """What killed submissions left."""
    for path in runs.glob(f"{paths.STAGING_PREFIX}*"):
        # another submission may be done with its own meanwhile
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > STALE_STAGING_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _complete(made: Plan, request: Request, staging: RunFolder, supervisor: local.Supervisor | None, cwd: Path) -> Plan:
    """Takes the snapshot, lets the target complete its config, and writes the run's files."""
    taken = snapshot.take(Path(made.spec.project), staging.code, made.snapshot_limit, skip=paths.runs_root())
    facts = environment.describe(taken)
    key = checked.key(taken.digest, made.spec.target.label, made.spec.workdir, facts["packages"])
    made = made.with_config(_config(made, request, staging, supervisor, cwd, key))
    made.spec.write(staging)
    paths.write_json(staging.environment, facts)
    resources = made.spec.resources
    records.update_state(
        staging,
        run=made.spec.run,
        executor=made.spec.executor,
        nodes=resources.nodes,
        ranks=resources.ranks,
        submitted=made.spec.submitted,
    )
    return made


# -- the target's own word on its config


def _config(
    made: Plan, request: Request, staging: RunFolder, supervisor: local.Supervisor | None, cwd: Path, key: str
) -> dict[str, Any]:
    """The job's whole config.

    Args:
        key: names the code, which is not imported again where it was checked before.
    """
    target = made.spec.target
    if target.is_command:
        if request.values:
            raise UserError(f"key=value {next(iter(request.values))!r}: a command has no config; put it behind --")
        return {}
    if callable(request.target):
        config = fill_config(targets.config_class(request.target), target.label, request.values, cwd)
        if target.pickled is not None:
            _pickle(request.target, config, staging)
        plain: dict[str, Any] = configs.to_plain(config)
        return plain
    assert target.function is not None
    known = checked.recall(key)
    if known is not None:
        return resolve_config(signature.rebuild(known), target.function, request.values, cwd)
    workdir = staging.code / made.spec.workdir
    answer = _ask(Question(target.function, str(staging.code), str(workdir), str(cwd), request.values), supervisor)
    if answer.error is not None:
        raise UserError(answer.error)
    if answer.description is not None:
        checked.keep(key, answer.description)
    return answer.config


def _pickle(function: Any, config: Any, staging: RunFolder) -> None:
    """The config travels with the function: the names in its annotations mean nothing in another process."""
    import cloudpickle  # type: ignore[import-untyped]

    staging.function.write_bytes(cloudpickle.dumps((function, config)))


def _ask(question: Question, supervisor: local.Supervisor | None) -> Answer:
    asked = json.dumps(asdict(question))
    if supervisor is not None:
        line = supervisor.ask(asked)
    else:
        command = [sys.executable, "-m", "mgpu_slurm.launch.check"]
        line = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=False).stdout
    if not line:
        raise UserError(
            f"target {question.target!r} ended the process that imported it, without an error: import it by hand"
        )
    return Answer(**json.loads(line))
