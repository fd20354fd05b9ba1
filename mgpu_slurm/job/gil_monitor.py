"""Detects from outside that a rank is stuck in C code that does not release the GIL.

No thread of such a rank can detect, report or end this. Other ranks would notice, but it may be the only rank, or all
ranks may be in the same call. A system timer still dumps its stacks (see `watchdog`), into a file that is emptied as
soon as any of its threads runs. If the file stays non-empty for the permitted time without progress, the rank is stuck.
"""

from __future__ import annotations

import re
import traceback
from contextlib import suppress

from mgpu_slurm.core import retry
from mgpu_slurm.core.files import write_json
from mgpu_slurm.core.formatting import in_words
from mgpu_slurm.core.log_lines import PREFIX
from mgpu_slurm.job.stacks import place
from mgpu_slurm.run_folder.failures import STUCK
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Failure
from mgpu_slurm.run_folder.records import now

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')


class GilMonitor:
    """Watches rank 0 of one attempt."""

    def __init__(self, folder: RunFolder, attempt: int, seconds: float, process: int = 0) -> None:
        """
        Args:
            seconds: Permitted seconds without progress; 0 for no limit.
            process: As in `Rank`.
        """
        self._stacks = folder.stacks(attempt, process)
        self._log = folder.rank_log(attempt, process)
        self._record = folder.rank_failure(attempt, process)
        self._seconds = seconds
        self._time = retry.OwnTime()
        self._stood = 0.0
        """Seconds for which the stacks have been in the file."""

    def is_stuck(self) -> bool:
        """Return whether the rank is stuck. Must be called every second."""
        passed = self._time.passed()
        self._stood = self._stood + passed if self._seconds and self._are_shown() else 0.0
        return self._stood > self._seconds

    def _are_shown(self) -> bool:
        with suppress(OSError):
            return self._stacks.stat().st_size > 0
        return False

    def conclude(self, node: str) -> None:
        """Record why the rank was ended, in its place, and append the stacks to its log.

        Args:
            node: The rank's node.
        """
        with suppress(OSError):
            if self._are_shown():
                self._write_down(node, self._stacks.read_text(errors="replace"))
            self._stacks.unlink()

    def _write_down(self, node: str, shown: str) -> None:
        doing = f"holds the interpreter's lock in C code, its main thread at {_place(shown)}"
        message = f"no progress for more than {in_words(2 * self._seconds)}: it {doing}"
        said = "no thread of this rank could run"
        if self._stood > self._seconds:
            said = f"stuck: {message}; this rank was killed"
            record = Failure(rank=0, node=node, time=now(), error=STUCK, message=message, doing=doing).to_json()
            retry.for_the_disk(lambda: write_json(self._record, record), self._record)
        with open(self._log, "a") as log:
            log.write(f"{PREFIX}{said}. Its threads:\n{shown}")


def _place(shown: str) -> str:
    # faulthandler prints the main thread last, and the innermost frame of each thread first
    main = shown.rstrip().rpartition("\n\n")[2]
    frames = [traceback.FrameSummary(m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(main)]
    return place(frames[::-1]) if frames else "an unknown place"
