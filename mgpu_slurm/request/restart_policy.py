"""When a run is restarted: at its time limit, after failures, and without progress."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RestartPolicy:
    """What a call says of it; None for the default of a new run, and for no change of a resumed one."""

    signal: str | None = None
    """The signal before the time limit, as `--signal` takes it."""
    max_requeues: int | None = None
    """How often the run may start again at its time limit."""
    retries: int | None = None
    """How often in a row it starts again after a failure of any kind."""
    stuck_after: float | None = None
    """Minutes without progress after which an attempt is ended; 0 for never."""

    @staticmethod
    def taken_from(options: MutableMapping[str, Any]) -> RestartPolicy:
        """Take the policy's own out of the options of a command."""
        return RestartPolicy(**{each.name: options.pop(each.name) for each in dataclasses.fields(RestartPolicy)})

    @property
    def given(self) -> dict[str, Any]:
        """Return what is not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


DEFAULT = RestartPolicy()
