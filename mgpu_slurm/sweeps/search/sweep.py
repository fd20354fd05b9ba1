"""A sweep as its file describes it, and in words."""

from __future__ import annotations

from dataclasses import dataclass

from mgpu_slurm.request.parallelism import DEFAULT_PARALLELISM, Parallelism
from mgpu_slurm.request.resources import Flags, Resources
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder.sweep_records import confirmation_of
from mgpu_slurm.sweeps.search.goals import Constraint, Direction, Objective
from mgpu_slurm.sweeps.search.parameters import Values
from mgpu_slurm.sweeps.search.space import Space
from mgpu_slurm.sweeps.search.sweep_options import Budget, Confirm, Pruner, Sampler


@dataclass(frozen=True)
class Sweep:
    """A sweep file, checked as far as possible without the job's code."""

    study: str
    job: str | None
    """The job function, as passed to `submit`; None if the job is a command."""
    command: tuple[str, ...]
    """Words of the command, with `{lr}` for a parameter; empty if the job is a function."""
    objectives: tuple[Objective, ...]
    """The metrics to maximize or minimize; trials are pruned by the first."""
    constraints: tuple[Constraint, ...]
    """Bounds on metrics: a trial that violates one counts as worst."""
    sampler: Sampler
    pruner: Pruner
    trials: int | None
    """None for as many as the budget allows, or for all points of a grid."""
    workers: int
    trials_per_worker: int
    """How many trials a worker trains at the same time."""
    budget: Budget
    resources: Resources
    """Resources of one worker."""
    flags: Flags
    """The resources that the file names."""
    fixed: Values
    """Values of the job's config shared by all trials, by name."""
    space: Space | str
    """The space, or the function that chooses the values: `module:function`, called with the trial."""
    storage: str | None
    """URL of a database, with `${VARIABLE}` not expanded; None for the study's own journal."""
    max_retries: int
    """How often a trial is resumed after its worker has died."""
    stuck_after: float = Spec.stuck_after
    """Minutes without progress after which a worker's ranks and its trial are stopped."""
    parallelism: Parallelism = DEFAULT_PARALLELISM
    """How the ranks of a worker share the model of a trial."""
    stage: tuple[str, ...] = ()
    """Data sets to copy to the disk of each node."""
    container: str | None = None
    """The image that workers run in; None for that of the cluster file."""
    mounts: tuple[str, ...] = ()
    """What it sees besides the project and the runs."""
    seeds: int = 1
    """With how many seeds each trial is trained; its values are their means."""
    confirm: Confirm | None = None
    enqueue: tuple[Values, ...] = ()
    """Points known to be good: the values of the first trials."""
    warm_start: str | None = None
    """An earlier study whose trials the sampler knows from the start."""

    @property
    def metric(self) -> str:
        """The metric by which trials are pruned: the first one."""
        return self.objectives[0].metric

    @property
    def direction(self) -> Direction:
        return self.objectives[0].direction

    def lines(self) -> list[str]:
        """Return a summary of the sweep for people."""
        space = self.space.lines() if isinstance(self.space, Space) else [f"by {self.space}"]
        trials = "as many as the budget allows" if self.trials is None else str(self.trials)
        if self.pruner.name == "pbt":
            trials = f"{self.pruner.population}, and copies of them"
        if self.sampler.name == "grid" and isinstance(self.space, Space) and len(self.space.grid()) != self.trials:
            trials += f" of the grid's {len(self.space.grid())} points"
        return [
            *_under("space", space),
            *_under("metric" if len(self.objectives) == 1 else "metrics", list(map(str, self.objectives))),
            *([f"require   {', '.join(map(str, self.constraints))}"] if self.constraints else []),
            f"sampler   {self.sampler.words}",
            f"pruner    {self.pruner.words}",
            *self._too_few(),
            f"trials    {trials}{f', {len(self.enqueue)} of them enqueued' if self.enqueue else ''}",
            *([f"knows     the trials of study {self.warm_start}"] if self.warm_start else []),
            *([f"seeds     {', '.join(map(str, self.seed_values))} for each trial"] if self.seeds > 1 else []),
            *self._confirm_words(),
            f"workers   {self._workers_words()}{self._shared_words()}",
            *([f"budget    {words}"] if (words := self.budget.words(self.metric)) else []),
        ]

    @property
    def seed_values(self) -> range:
        """The seeds of a trial: they count up from that in `fixed`."""
        first = self.fixed.get("seed", 0)
        assert isinstance(first, int)
        return range(first, first + self.seeds)

    @property
    def confirm_seeds(self) -> range:
        """The seeds for the confirmation: others than those by which the best trials were found."""
        assert self.confirm is not None
        first = self.seed_values[-1] + 1
        return range(first, first + self.confirm.seeds)

    @property
    def sets_seeds(self) -> bool:
        """Whether the sweep itself chooses the job's `seed`."""
        return self.seeds > 1 or self.confirm is not None

    def workers_for(self, trials: int | None) -> int:
        """Return how many workers so many trials occupy, at most all of them.

        Args:
            trials: None for as many as the budget allows.
        """
        return self.workers if trials is None else min(self.workers, -(-trials // self.trials_per_worker))

    @property
    def most_at_once(self) -> int | None:
        """How many trials may run at the same time; None without a limit."""
        return self.pruner.population if self.pruner.name == "pbt" else self.trials

    def _confirm_words(self) -> list[str]:
        if self.confirm is None:
            return []
        seeds = ", ".join(map(str, self.confirm_seeds))
        return [f"confirm   the best {self.confirm.top} with seeds {seeds}, as study {confirmation_of(self.study)}"]

    def _workers_words(self) -> str:
        needed = self.workers_for(self.most_at_once)
        if needed == self.workers:
            return str(needed)
        return f"{needed}, as no more than {self.most_at_once} trials can run at the same time"

    def _shared_words(self) -> str:
        return f", each with {self.trials_per_worker} trials at the same time" if self.trials_per_worker > 1 else ""

    def _too_few(self) -> list[str]:
        """Return a warning if no trial may become complete by its rank."""
        rungs, factor = self.pruner.rungs, self.pruner.reduction_factor
        needed = factor ** (len(rungs) - 1)
        # without pauses, the first trials are trained to the end
        if self.pruner.name != "asha" or not self.pruner.pause or self.trials is None or self.trials >= needed:
            return []
        return [
            f"warning   {self.trials} trials are too few for {len(rungs)} rungs, where one of {needed} is trained to"
            " the end: raise trials, or set budget.gpu_hours instead"
        ]


def _under(title: str, lines: list[str]) -> list[str]:
    return [f"{title if not place else '':<9} {line}" for place, line in enumerate(lines)]
