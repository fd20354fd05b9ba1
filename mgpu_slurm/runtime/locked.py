"""Sees from outside of a rank that it is stuck in C code which gives the interpreter's lock to nobody.

No thread of such a rank can look, speak or end it. Other ranks miss it; but it may be the only one, or all may be in
the same call. A timer of the system shows its stacks all the same (see `watchdog`), in a file that is emptied as soon
as the rank comes on: what stays there for as long as a rank may stand still is of one that is stuck.
"""

from __future__ import annotations

import re
import time
import traceback
from contextlib import suppress

from mgpu_slurm.causes import STUCK
from mgpu_slurm.paths import RunFolder, write_json
from mgpu_slurm.records import now
from mgpu_slurm.runtime.places import place
from mgpu_slurm.wording import in_words

LONGEST_LOOK = 2.0
"""Seconds that may pass between two looks: who looks may have been suspended with all the rest."""

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')


class LockWatch:
    """Of rank 0 of one attempt."""

    def __init__(self, folder: RunFolder, attempt: int, seconds: float) -> None:
        """
        Args:
            seconds: for which a rank may stand still; 0 for as long as it likes.
        """
        self._stacks = folder.stacks(attempt)
        self._log = folder.rank_log(attempt, 0)
        self._record = folder.rank_failure(attempt, 0)
        self._seconds = seconds
        self._looked = time.monotonic()
        self._stood = 0.0
        """Seconds for which the stacks have been there."""

    def is_stuck(self) -> bool:
        """To be asked every second."""
        at = time.monotonic()
        passed, self._looked = min(at - self._looked, LONGEST_LOOK), at
        self._stood = self._stood + passed if self._seconds and self._shown() else 0.0
        return self._stood > self._seconds

    def _shown(self) -> bool:
        with suppress(OSError):
            return self._stacks.stat().st_size > 0
        return False

    def conclude(self, node: str) -> None:
        """Puts the stacks into the rank's log, where they are looked for, and says in its stead why it was ended.

        Args:
            node: where the rank was.
        """
        with suppress(OSError):
            shown = self._stacks.read_text(errors="replace")
            self._stacks.unlink()
            if not shown:
                return
            doing = f"is in C code that holds the interpreter's lock, at {_place(shown)}"
            message = f"no progress for more than {in_words(2 * self._seconds)}: it {doing}"
            is_stuck = self._stood > self._seconds
            with open(self._log, "a") as log:
                said = f"stuck: {message}; this rank was ended" if is_stuck else "this rank let none of its threads run"
                log.write(f"mgpu_slurm: {said}. Its threads:\n{shown}")
            if is_stuck:
                write_json(
                    self._record,
                    {
                        "rank": 0,
                        "node": node,
                        "time": now(),
                        "error": STUCK,
                        "message": message,
                        "doing": doing,
                        "consequence": False,
                        "collectives": 0,
                    },
                )


def _place(shown: str) -> str:
    # faulthandler shows the innermost frame first, and the other threads before the one that it was called in
    current = shown.partition("Current thread")[2]
    frames = [traceback.FrameSummary(m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(current)]
    return place(frames[::-1]) if frames else "a place that is not known"
