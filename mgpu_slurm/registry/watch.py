"""Watch runs until they have ended, even while their executor does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import current_state
from mgpu_slurm.run_folder import records, states
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import RunState

ASK_EVERY = {"local": 1.0, "allocation": 15.0, "slurm": 15.0}
"""Seconds between two requests of a watch to an executor; a controller serves thousands of clients."""

ANSWER_TAKES = 0.5
"""Seconds to block for an answer before continuing with the runs' own records."""


class Watch:
    """A repeated look at runs: their records each time, their executor only as often as it can bear."""

    def __init__(self, *folders: RunFolder, note: Note = quiet, may_vanish: bool = False) -> None:
        """
        Args:
            folders: of runs and groups.
            note: called once each time the cluster does not answer, or is not the one of the job.
            may_vanish: leave out runs that are deleted meanwhile; if False, that is an error.
        """
        self._folders = folders
        self._note = note
        self._may_vanish = may_vanish
        self._ended: dict[RunFolder, RunState] = {}
        self._question: _Question | None = None
        self._next_question = 0.0
        self._pause = 0.5
        self._said: list[str] = []

    @property
    def problem(self) -> str | None:
        """Why the states may be outdated; None if the executor has answered."""
        return self._said[0] if self._said else None

    def state(self) -> RunState:
        """Return the state of a run, or of the first run of a group."""
        return self.states()[0]

    def states(self) -> list[RunState]:
        return [state for _, state in self.pairs()]

    def pairs(self) -> list[tuple[RunFolder, RunState]]:
        """Return the state of each run, in the order of their folders.

        Raises:
            UserError: a run was deleted.
        """
        places = {folder.group: place for place, folder in enumerate(self._folders) if folder.group.path.exists()}
        for folder in self._folders if not self._may_vanish else ():
            if folder.group not in places:
                raise UserError(f"run {folder.run} was deleted meanwhile")
        left = [folder for folder in self._folders if folder.group in places]
        recorded = [pair for folder in left for pair in records.read_states(folder, without=self._ended)]
        recorded = [pair for pair in recorded if pair[0] not in self._ended]
        found = self._asked(recorded) or recorded
        newest = {folder: state for folder, state in (dict(found) | self._ended).items() if folder.group in places}
        self._ended |= {folder: state for folder, state in found if not states.is_alive(state.state)}
        return sorted(newest.items(), key=lambda pair: (places[pair[0].group], pair[0].task or 0))

    def _asked(self, alive: list[tuple[RunFolder, RunState]]) -> list[tuple[RunFolder, RunState]] | None:
        """Return the executor's answer; None until the next request, and while the answer is outstanding.

        Args:
            alive: the runs that have not ended, and their recorded states.
        """
        if self._question is None:
            if not alive or time.monotonic() < self._next_question:
                return None
            self._question = _Question([folder for folder, _ in alive])
        found = self._question.answer()
        if found is None:
            return None
        if self._question.notes and self._question.notes != self._said:
            self._note(f"{self._question.notes[0]}; asking again")
        self._said = self._question.notes
        self._question = None
        longest = max((ASK_EVERY.get(state.executor, 1.0) for _, state in alive), default=1.0)
        self._pause = min(2 * self._pause, longest)
        self._next_question = time.monotonic() + self._pause
        return found


def wait(
    folder: RunFolder, as_one: Callable[[Sequence[RunState]], str], timeout: float | None, note: Note = quiet
) -> str:
    """Wait until runs have ended, and return their state.

    Args:
        as_one: returns one state for all runs.
        timeout: in seconds; None to wait forever.
        note: see `Watch`.

    Raises:
        TimeoutError: they have not ended within that time.
    """
    begun = time.monotonic()
    watch = Watch(folder, note=note)
    while True:
        state = as_one(watch.states())
        if not states.is_alive(state):
            return state
        waited = time.monotonic() - begun
        if timeout is not None and waited >= timeout:
            raise TimeoutError(f"run {folder.run} is still {state} after {timeout} s")
        # poll after a fiftieth of the time waited so far, at least once a second
        time.sleep(min(1.0, max(0.05, waited / 50)))


class _Question(threading.Thread):
    """A call of `current_state.current` in the background, since an executor may answer late."""

    def __init__(self, folders: list[RunFolder]) -> None:
        super().__init__(daemon=True)
        self.notes: list[str] = []
        """Notes on an executor that did not answer."""
        self._folders = folders
        self._found: list[tuple[RunFolder, RunState]] | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._found = current_state.current(self._folders, self.notes.append)
        except BaseException as error:
            self._error = error

    def answer(self) -> list[tuple[RunFolder, RunState]] | None:
        """Return the answer; None if it does not come within `ANSWER_TAKES`."""
        self.join(ANSWER_TAKES)
        if self._error is not None:
            raise self._error
        return self._found
