"""Looking at runs until they have ended, also while their executor does not answer."""

from __future__ import annotations

import threading
import time

from mgpu_slurm.core import records, states
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.layout import RunFolder
from mgpu_slurm.core.retry import Note, quiet
from mgpu_slurm.registry import current_state
from mgpu_slurm.registry.current_state import State

ASK_EVERY = {"local": 1.0, "allocation": 15.0, "slurm": 15.0}
"""Seconds between two questions to an executor by one who waits; a controller serves thousands."""

ANSWER_TAKES = 0.5
"""Seconds for which one who waits stands still for an answer, before going on by what runs say themselves."""


class Watch:
    """Runs, again and again: their records each time, their executor's word not more often than that can bear."""

    def __init__(self, folder: RunFolder, note: Note = quiet) -> None:
        """
        Args:
            note: hears, once each time, that the cluster does not answer, or is not the one to ask.
        """
        self._folder = folder
        self._note = note
        self._ended: dict[RunFolder, State] = {}
        self._question: _Question | None = None
        self._next_question = 0.0
        self._pause = 0.5
        self._said: list[str] = []

    @property
    def problem(self) -> str | None:
        """Why what is seen may be old; None where the executor has answered."""
        return self._said[0] if self._said else None

    def state(self) -> State:
        """Of a run, or of the first one of a group."""
        return self.states()[0]

    def states(self) -> list[State]:
        return [state for _, state in self.pairs()]

    def pairs(self) -> list[tuple[RunFolder, State]]:
        if not self._folder.group.path.exists():
            raise UserError(f"run {self._folder.run} was deleted meanwhile")
        recorded = records.read_states(self._folder, without=self._ended)
        found = self._asked([folder for folder, _ in recorded]) or recorded
        newest = dict(found) | self._ended
        self._ended |= {folder: state for folder, state in found if not states.is_alive(state["state"])}
        return sorted(newest.items(), key=lambda pair: pair[0].task or 0)

    def _asked(self, alive: list[RunFolder]) -> list[tuple[RunFolder, State]] | None:
        """What the executor says; None until the next question, and while an answer is not there."""
        if self._question is None:
            if not alive or time.monotonic() < self._next_question:
                return None
            self._question = _Question(alive)
        found = self._question.answer()
        if found is None:
            return None
        if self._question.notes and self._question.notes != self._said:
            self._note(f"{self._question.notes[0]}; asking again")
        self._said = self._question.notes
        self._question = None
        executor = records.read_state(alive[0])["executor"] if alive else ""
        self._pause = min(2 * self._pause, ASK_EVERY.get(executor, 1.0))
        self._next_question = time.monotonic() + self._pause
        return found


class _Question(threading.Thread):
    """`registry.current`, in the background: an executor that does not answer takes its time."""

    def __init__(self, folders: list[RunFolder]) -> None:
        super().__init__(daemon=True)
        self.notes: list[str] = []
        """What there is to say where the executor did not answer."""
        self._folders = folders
        self._found: list[tuple[RunFolder, State]] | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._found = current_state.current(self._folders, self.notes.append)
        except BaseException as error:
            self._error = error

    def answer(self) -> list[tuple[RunFolder, State]] | None:
        """None where it is not there in `ANSWER_TAKES`."""
        self.join(ANSWER_TAKES)
        if self._error is not None:
            raise self._error
        return self._found
