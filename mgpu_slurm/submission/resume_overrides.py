"""Changes to a resumed run: other resources, or the project's current code. All of them are applied, or none."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from mgpu_slurm.core import files
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.config import Config
from mgpu_slurm.request.parallelism import DEFAULT_PARALLELISM, Parallelism
from mgpu_slurm.request.profile_window import ProfileWindow
from mgpu_slurm.request.resources import RESOURCE_FLAGS, Flags, resources_from
from mgpu_slurm.request.spec import DEFAULT_POLICY, RestartPolicy, Spec, read_spec
from mgpu_slurm.request.time_limit import announcement
from mgpu_slurm.run_folder import layout, records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.states import COMPLETED
from mgpu_slurm.submission import cluster_file as clusters
from mgpu_slurm.submission.project import environment, job_config, snapshot
from mgpu_slurm.trackers import destinations

T = TypeVar("T")


@dataclass(frozen=True)
class Change:
    """The changes requested with a resume."""

    flags: Flags = field(default_factory=dict)
    """Resources by sbatch's long names; None keeps a value."""
    restart: RestartPolicy = DEFAULT_POLICY
    parallelism: Parallelism = DEFAULT_PARALLELISM
    profile: str | None = None
    """Steps and ranks to record."""
    new_code: bool = False
    """Whether to use the project's current code and the calling environment's packages."""
    probes: tuple[Config, ...] = ()
    """Sets of values that the new code's config has to accept in a sweep, in addition to those of all trials."""

    @property
    def given(self) -> Flags:
        """Return the flags that have a value."""
        return {name: value for name, value in self.flags.items() if value is not None}

    @property
    def all_given(self) -> dict[str, object]:
        """Return all options that have a value."""
        profile = {} if self.profile is None else {"profile": self.profile}
        return self.given | self.restart.given | self.parallelism.given | profile

    def __bool__(self) -> bool:
        return self.new_code or bool(self.all_given)


NO_CHANGE = Change()


@contextmanager
def applied(folder: RunFolder, change: Change) -> Iterator[Spec]:
    """Apply and write the change to the folder's spec; an error inside the block undoes it.

    Args:
        folder: of a single run, or of a whole group.

    Raises:
        UserError: the change does not fit the run.
    """
    before = read_spec(folder)
    if not change:
        yield before
        return
    if folder.task is not None:
        raise UserError(f"run {folder.run} shares its spec with its group: resume {folder.group.run} with the change")
    spec = _with_restart(_with_resources(before, change.given, change.parallelism), change.restart)
    if change.profile is not None:
        _check_is_ahead(folder, change.profile)
        spec = replace(spec, profile=change.profile)
    with _new_code(folder, spec, change.probes) if change.new_code else nullcontext(spec) as spec:
        try:
            spec.write(folder)
            records.update_state(folder, nodes=spec.resources.nodes, ranks=spec.resources.ranks)
            yield spec
        except BaseException:
            before.write(folder)
            records.update_state(folder, nodes=before.resources.nodes, ranks=before.resources.ranks)
            raise
    records.record_event(
        folder,
        "changed",
        flags=change.all_given,
        new_code=change.new_code,
    )


def _with_resources(spec: Spec, given: Flags, parallelism: Parallelism) -> Spec:
    had: Flags = {name.replace("_", "-"): spec.resources.value_of(name) for name in (*RESOURCE_FLAGS, "sbatch")}
    resources = resources_from(configs.merge(had, given), "resources")
    lead = spec.lead
    if resources.time != spec.resources.time:
        _, usual = announcement(spec.signal, spec.resources.time_limit, spec.is_queued)
        # a requested lead is the time that a save needs
        asked = spec.signal if lead == usual else f"{spec.signal}@{lead}"
        _, lead = announcement(asked, resources.time_limit, spec.is_queued)
    return replace(spec, resources=resources, lead=lead, parallelism=parallelism.over(spec.parallelism))


def _with_restart(spec: Spec, given: RestartPolicy) -> Spec:
    signal, lead = spec.signal, spec.lead
    if given.signal is not None:
        signal, lead = announcement(given.signal, spec.resources.time_limit, spec.is_queued)
    return replace(
        spec,
        signal=signal,
        lead=lead,
        max_requeues=_new(given.max_requeues, spec.max_requeues),
        retries=_new(given.retries, spec.retries),
        stuck_after=_new(given.stuck_after, spec.stuck_after),
    )


def _check_is_ahead(folder: RunFolder, profile: str) -> None:
    """Check that the steps to record are still to come.

    Raises:
        UserError: they are not.
    """
    step = min(state.step for _, state in records.read_states(folder) if state.state != COMPLETED)
    if ProfileWindow.parse(profile).last <= step:
        later = f"{step + 10}-{step + 13}"
        raise UserError(f"--profile {profile}: the run has done {step} steps: name later ones, such as {later}")


def _new(given: T | None, before: T) -> T:
    return before if given is None else given


@contextmanager
def _new_code(folder: RunFolder, spec: Spec, probes: Sequence[Config]) -> Iterator[Spec]:
    """Replace the code by a new snapshot, and keep the previous code as `code-<attempts>`."""
    if spec.target.pickled is not None:
        raise UserError(f"--code new: {spec.target.pickled} was given as an object, not by name: submit it again")
    staging = RunFolder(folder.path / f"{layout.STAGING_PREFIX}code")
    shutil.rmtree(staging.path, ignore_errors=True)
    staging.create(spec.readable_by)
    limit = clusters.load(Path.cwd()).named(spec.cluster).snapshot_limit
    old = folder.path / f"code-{max(state.attempts for _, state in records.read_states(folder))}"
    facts_before = files.read_json(folder.environment)
    try:
        databases = destinations.database_files(spec.sinks)
        taken = snapshot.take(Path(spec.project), staging.code, limit, folder.path.parent, spec.workdir, databases)
        facts = environment.describe(taken)
        spec = replace(spec, python=sys.executable)
        values = [configs.merge(spec.config, probe) for probe in probes] or [spec.config]
        completed = job_config.complete(spec, values, staging, spec.original, imports=False)
        # trials share only the given values
        config = configs.only(completed.config, spec.config) if spec.kind == "sweep" else completed.config
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder.code, old)
        os.rename(staging.code, folder.code)
        files.write_json(folder.environment, facts.to_json())
        try:
            yield replace(spec, config=config, config_base=completed.base)
        except BaseException:
            shutil.rmtree(folder.code)
            os.rename(old, folder.code)
            files.write_json(folder.environment, facts_before)
            raise
    finally:
        shutil.rmtree(staging.path, ignore_errors=True)
