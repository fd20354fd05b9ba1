"""When a run is restarted: at its time limit, after failures, and without progress."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RestartPolicy:
    """The options of a call; None keeps the default of a new run, or the value of a resumed one."""

    signal: str | None = None
    """Signal before the time limit, in the format of `--signal`."""
    max_requeues: int | None = None
    """Maximum number of requeues at the time limit."""
    retries: int | None = None
    """Maximum consecutive restarts after a failure of any kind."""
    stuck_after: float | None = None
    """Minutes without progress after which an attempt is stopped; 0 disables."""

    @staticmethod
    def taken_from(options: MutableMapping[str, Any]) -> RestartPolicy:
        """Remove the policy's options from those of a command, and return them as a policy."""
        return RestartPolicy(**{each.name: options.pop(each.name) for each in dataclasses.fields(RestartPolicy)})

    @property
    def given(self) -> dict[str, object]:
        """Return the values that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


DEFAULT = RestartPolicy()
