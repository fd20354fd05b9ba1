"""Send runs to a tracker that had none, or not all of their reports: `export --to mlflow|wandb`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mgpu_slurm.core.formatting import counted
from mgpu_slurm.request.spec import Spec, read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.trackers.destinations import Destination, resolve
from mgpu_slurm.trackers.outcome import Sent
from mgpu_slurm.trackers.sending import Sender

_BUSY = "its own process is sending it: wait for the end of the run"


@dataclass(frozen=True)
class Exported:
    """What a tracker has of a run now."""

    run: str
    sent: Sent
    new: int
    """The number of reports that were sent now."""

    def to_json(self) -> dict[str, Any]:
        known = asdict(self.sent)
        return {
            "run": self.run,
            **{name: known[name] for name in ("id", "address", "reports", "problem")},
            "new": self.new,
        }

    @property
    def line(self) -> str:
        if self.sent.problem:
            return f"not sent  {self.run}: {self.sent.problem}"
        before = self.sent.reports - self.new
        there = f", {before} were there" if before else ""
        return f"sent      {self.run}: {counted(self.new, 'report')}{there}  {self.sent.address}"


def destination_of(text: str, spec: Spec, cwd: Path) -> Destination:
    """Return the place that a call names, or else that of the run itself, or else of the tracker's own variables.

    Raises:
        UserError: nothing names one, it is invalid, or its library is not installed.
    """
    own = [each for each in map(Destination.parse, spec.sinks) if each.tracker == text]
    (resolved,) = resolve([str(own[0]) if own else text], cwd, Path(spec.project).name)
    return resolved


def send(runs: Sequence[tuple[RunFolder, bool]], text: str, cwd: Path) -> Iterator[Exported]:
    """Send runs, and yield what became of each.

    Args:
        runs: with whether each has ended. Of one that has not, what is settled is sent.
        text: the tracker, such as `mlflow` or `wandb=PROJECT`.

    Raises:
        UserError: see `destination_of`.
    """
    specs: dict[RunFolder, Spec] = {}
    for folder, has_ended in runs:
        spec = specs.get(folder.group) or specs.setdefault(folder.group, read_spec(folder.group))
        destination = destination_of(text, spec, cwd)
        sender = Sender(folder, spec, [destination])
        try:
            if not sender.is_mine():
                yield Exported(folder.run, Sent(str(destination), problem=_BUSY), 0)
                continue
            sender.look(has_ended, everything=has_ended)
            (link,) = sender.links
            yield Exported(folder.run, link.sent, link.new)
        except OSError as error:
            yield Exported(folder.run, Sent(str(destination), problem=str(error)), 0)
        finally:
            sender.close()
