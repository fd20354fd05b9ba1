"""`--profile`: the steps of a run that are recorded, and the ranks that record them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mgpu_slurm.core.errors import UserError

VARIABLE = "MGPU_PROFILE"
"""The option as given, in the environment of every rank; unset without it."""

MOST_STEPS = 100

_FORM = re.compile(r"(?P<first>[1-9]\d*)(?:-(?P<last>[1-9]\d*))?(?:@(?P<ranks>all|\d+(?:,\d+)*))?")


@dataclass(frozen=True)
class ProfileWindow:
    """The part of a run that is recorded."""

    first: int
    """The first step, counted from the beginning of the run."""
    last: int
    ranks: tuple[int, ...] | None = ()
    """Empty for those of the first node, None for all."""

    @classmethod
    def parse(cls, text: str) -> ProfileWindow:
        """Return the window of `10-13`, `10-13@0,8` or `10-13@all`.

        Raises:
            UserError: the text has another form, or names too many steps.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise UserError(f"--profile {text!r}: expected STEPS or STEPS@RANKS, such as 10-13, 10-13@0,8 or 10-13@all")
        first = int(match["first"])
        last = int(match["last"] or first)
        if last < first:
            raise UserError(f"--profile {text!r}: step {last} comes before step {first}: write {last}-{first}")
        if last - first >= MOST_STEPS:
            raise UserError(f"--profile {text!r}: {last - first + 1} steps are too many to look at: use {MOST_STEPS}")
        if match["ranks"] == "all":
            return cls(first, last, None)
        return cls(first, last, tuple(map(int, (match["ranks"] or "").split(","))) if match["ranks"] else ())

    def check(self, ranks: int) -> None:
        """Check that a run has the ranks.

        Raises:
            UserError: it does not.
        """
        if missing := [rank for rank in self.ranks or () if rank >= ranks]:
            raise UserError(f"--profile: there is no rank {missing[0]}: the run has ranks 0 to {ranks - 1}")

    def records(self, rank: int, node: int) -> bool:
        """Return whether a rank of a node records its steps."""
        if self.ranks is None:
            return True
        return rank in self.ranks if self.ranks else node == 0
