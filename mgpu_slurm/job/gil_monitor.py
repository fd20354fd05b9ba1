"""Sees from outside of a rank that it is stuck in C code which gives the interpreter's lock to nobody.

No thread of such a rank can look, speak or end it. Other ranks miss it; but it may be the only one, or all may be in
the same call. A timer of the system shows its stacks all the same (see `watchdog`), in a file that is emptied as soon
as any of its threads runs: what stays there for as long as a rank may stand still is of one that is stuck.
"""

from __future__ import annotations

import re
import traceback
from contextlib import suppress

from mgpu_slurm.core import retry
from mgpu_slurm.core.failures import STUCK
from mgpu_slurm.core.files import write_json
from mgpu_slurm.core.formatting import in_words
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.records import now
from mgpu_slurm.job.stacks import place

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
        self._time = retry.OwnTime()
        self._stood = 0.0
        """Seconds for which the stacks have been there."""

    def is_stuck(self) -> bool:
        """To be asked every second."""
        passed = self._time.passed()
        self._stood = self._stood + passed if self._seconds and self._are_shown() else 0.0
        return self._stood > self._seconds

    def _are_shown(self) -> bool:
        with suppress(OSError):
            return self._stacks.stat().st_size > 0
        return False

    def conclude(self, node: str) -> None:
        """Says in the rank's stead why it was ended, and puts the stacks into its log, where they are looked for.

        Args:
            node: where the rank was.
        """
        with suppress(OSError):
            if self._are_shown():
                self._write_down(node, self._stacks.read_text(errors="replace"))
            self._stacks.unlink()

    def _write_down(self, node: str, shown: str) -> None:
        doing = f"holds the interpreter's lock in C code, its main thread at {_place(shown)}"
        message = f"no progress for more than {in_words(2 * self._seconds)}: it {doing}"
        said = "this rank let none of its threads run"
        if self._stood > self._seconds:
            said = f"stuck: {message}; this rank was ended"
            record = {"rank": 0, "node": node, "time": now(), "error": STUCK, "message": message, "doing": doing}
            record |= {"consequence": False, "collectives": 0}
            retry.for_the_disk(lambda: write_json(self._record, record), self._record)
        with open(self._log, "a") as log:
            log.write(f"mgpu_slurm: {said}. Its threads:\n{shown}")


def _place(shown: str) -> str:
    # faulthandler shows the main thread last, and of each the innermost frame first
    main = shown.rstrip().rpartition("\n\n")[2]
    frames = [traceback.FrameSummary(m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(main)]
    return place(frames[::-1]) if frames else "a place that is not known"
