"""A study in a database, with Optuna's tables and queries, few connections and retries.

A database accepts some hundred connections at once (PostgreSQL 100 by default), and a worker needs one only for
moments. So a connection is kept for a moment, shared by consecutive calls, and then closed; a worker that gets none
waits for its turn.

If the server restarts, calls wait for it. A call that lost its connection is repeated if that is safe: if no commit was
in flight, or if the call is idempotent, which is every call except creating a study, queueing a trial and giving one
back. If a worker took a trial without receiving the answer, it does not own the trial, which is recovered like that of
a dead worker.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, RDBStorage, get_storage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import URL, create_engine, inspect
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, OperationalError, PendingRollbackError
from sqlalchemy.pool import NullPool

from mgpu_slurm.core import retry
from mgpu_slurm.core.errors import ClusterError, NoStudy, UserError
from mgpu_slurm.core.retry import Waiting
from mgpu_slurm.sweeps.optuna_adapter import CreateOnceStorage

CONNECTION_SECONDS = 0.5
"""Seconds for which a connection is kept: long compared to the 25 ms of a new one, short compared to a trial."""

LOGIN_SECONDS = 5.0
"""Seconds to wait for a database that does not answer when a study is created."""

_CONNECT_SECONDS = 10
_EXTRAS = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}
_LIBPQ = ("psycopg", "psycopg2")

# messages of a PostgreSQL server that is temporarily unavailable, as in its source, and MySQL's error numbers for that
_BUSY = ("too many clients", "connection slots are reserved", "the database system is", "too many connections")
_BUSY_NUMBERS = (1040, 1053, 1203)

_REFUSED = ("no password supplied", "SSL was required", "certificate verify failed")
"""libpq's messages for logins that fail regardless of the server's state."""

# "FATAL", or its translation into the server's language, followed by the server's message
_ANSWER = re.compile(r"failed: [^\s:]+:  ")

_ENDED = ("57P01", "57P02")
"""PostgreSQL's error codes for a connection that it closes: admin_shutdown, crash_shutdown."""

Answer = TypeVar("Answer")
Given = ParamSpec("Given")


class _NotNow(Exception):
    """No connection is available at the moment; nothing has been sent."""


def _asked(method: Callable[Concatenate[Any, Given], Answer]) -> Callable[Concatenate[Database, Given], Answer]:
    """Wrap the storage method of that name, to repeat it until it is answered; for idempotent methods."""

    def ask(self: Database, /, *words: Given.args, **named: Given.kwargs) -> Answer:
        inner: Callable[Given, Answer] = getattr(self._inner, method.__name__)
        return self._ask(lambda: inner(*words, **named))

    return ask


def _asked_once(method: Callable[Concatenate[Any, Given], Answer]) -> Callable[Concatenate[Database, Given], Answer]:
    """Wrap a method as `_asked` does, for one that is not idempotent."""

    def ask(self: Database, /, *words: Given.args, **named: Given.kwargs) -> Answer:
        inner: Callable[Given, Answer] = getattr(self._inner, method.__name__)
        return self._ask(lambda: inner(*words, **named), is_repeatable=False)

    return ask


class Database(BaseStorage):
    """Studies in a database. For one process, without its children; calls are serialized."""

    def __init__(self, url: URL, shown: str, is_new: bool) -> None:
        """
        Args:
            url: includes the password, which is passed only to the driver.
            shown: names the database in errors.
            is_new: create missing tables, and refuse those of another version of Optuna; if False, missing tables mean
                that there is no study.

        Raises:
            UserError: the driver is not installed, or the database has no tables, or those of another Optuna version.
            ClusterError: the database refuses, or has not answered for too long.
        """
        self._shown = shown
        self._secret = url.password
        self._seconds = LOGIN_SECONDS if is_new else retry.SECONDS
        self._lock = threading.RLock()
        self._driver, self._arguments, self._options = _driver(url, shown)
        self._rdb: RDBStorage | None = None
        # without host and user: a URL without a password cannot reveal it
        bare = f"{url.drivername}://"
        if not is_new and not self._ask(lambda: self._has_tables(bare)):
            raise no_study(shown)
        self._inner = get_storage(self._ask(lambda: self._opened(bare, is_new)))
        if is_new:
            self._ask(self._check_version)

    def _has_tables(self, bare: str) -> bool:
        """Return whether the tables exist. Checked first: Optuna would create some of them, in all workers at once."""
        return inspect(create_engine(bare, creator=self._connect, poolclass=NullPool)).has_table("studies")

    def _opened(self, bare: str, is_new: bool) -> RDBStorage:
        options = {"creator": self._connect, "pool_size": 1}
        self._rdb = _Rdb(bare, options, skip_compatibility_check=True, skip_table_creation=not is_new)
        self._rdb.shown = self._shown
        return self._rdb

    def _check_version(self) -> None:
        assert self._rdb is not None
        there, ours = self._rdb.get_current_version(), self._rdb.get_head_version()
        if there != ours:
            raise UserError(
                f"storage {self._shown!r}: its tables are of another version of Optuna ({there}; here they are {ours}):"
                " use a separate database, or upgrade them with `optuna storage upgrade`"
            )

    # -- storage methods

    create_new_study = _asked_once(BaseStorage.create_new_study)
    delete_study = _asked_once(BaseStorage.delete_study)
    set_study_user_attr = _asked(BaseStorage.set_study_user_attr)
    set_study_system_attr = _asked(BaseStorage.set_study_system_attr)
    get_study_id_from_name = _asked(BaseStorage.get_study_id_from_name)
    get_study_name_from_id = _asked(BaseStorage.get_study_name_from_id)
    get_study_directions = _asked(BaseStorage.get_study_directions)
    get_study_user_attrs = _asked(BaseStorage.get_study_user_attrs)
    get_study_system_attrs = _asked(BaseStorage.get_study_system_attrs)
    get_all_studies = _asked(BaseStorage.get_all_studies)
    create_new_trial = _asked_once(BaseStorage.create_new_trial)
    set_trial_param = _asked(BaseStorage.set_trial_param)
    get_trial_id_from_study_id_trial_number = _asked(BaseStorage.get_trial_id_from_study_id_trial_number)
    set_trial_intermediate_value = _asked(BaseStorage.set_trial_intermediate_value)
    set_trial_user_attr = _asked(BaseStorage.set_trial_user_attr)
    set_trial_system_attr = _asked(BaseStorage.set_trial_system_attr)
    get_trial = _asked(BaseStorage.get_trial)
    get_all_trials = _asked(BaseStorage.get_all_trials)
    get_best_trial = _asked(BaseStorage.get_best_trial)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        attempts = 0

        def change() -> bool:
            nonlocal attempts
            attempts += 1
            try:
                return self._inner.set_trial_state_values(trial_id, state, values)
            except UpdateFinishedTrialError:
                if attempts == 1 or not _is_so(self._inner.get_trial(trial_id), state, values):
                    raise
                # an earlier attempt, whose answer was lost, has taken effect
                return True

        # giving it back again after another worker has taken it would give it to two workers
        return self._ask(change, is_repeatable=state != TrialState.WAITING)

    def remove_session(self) -> None:
        """Close the connection now."""
        with self._lock:
            if self._rdb is not None:
                self._rdb.engine.dispose()

    # -- calls and connections

    def _ask(self, call: Callable[[], Answer], is_repeatable: bool = True) -> Answer:
        """Repeat a call until it is answered, and return the answer.

        Args:
            is_repeatable: whether the call is idempotent.
        """
        silent = f"storage {self._shown!r}: the database does not answer"
        patience = Waiting(silent, self._seconds)
        with self._lock:
            while True:
                try:
                    return call()
                except _NotNow as error:
                    problem = str(error)
                except (StorageInternalError, DBAPIError) as error:
                    problem = self._lost(error, is_repeatable)
                if patience.is_over():
                    raise ClusterError(f"{silent}: {problem}")
                patience.pause(problem)

    def _lost(self, error: Exception, is_repeatable: bool) -> str:
        """Return the driver's message for a lost connection; raise other errors, and those that must not be retried."""
        cause = error if isinstance(error, DBAPIError) else error.__cause__
        told = self._told(cause.orig if isinstance(cause, DBAPIError) else cause)
        if isinstance(cause, PendingRollbackError):
            # Optuna has continued to read over a lost connection
            return told
        if not isinstance(cause, DBAPIError) or not _is_lost(cause):
            raise ClusterError(f"storage {self._shown!r}: the database refused: {told}") from None
        # a transaction lost in a statement was rolled back; an error in a commit has no statement
        if cause.statement is None and not is_repeatable:
            raise _unknown(self._shown, told) from None
        return told

    def _connect(self) -> Any:
        """Return a new connection of the driver, which is closed after a moment."""
        try:
            connection = self._driver.connect(*self._arguments, **self._options)
        except self._driver.loaded_dbapi.Error as error:
            told = self._told(error)
            if _is_refusal(error):
                raise ClusterError(f"storage {self._shown!r}: the database refused: {told}") from None
            raise _NotNow(told) from None
        timer = threading.Timer(CONNECTION_SECONDS, self.remove_session)
        timer.daemon = True
        timer.start()
        return connection

    def _told(self, error: BaseException | None) -> str:
        """Return a driver's message on one line, without the password; no driver is known to print it."""
        told = " ".join(str(error).split())
        return told.replace(self._secret, "***") if self._secret else told


class _Rdb(CreateOnceStorage):
    shown = ""
    """Name of the database in errors."""

    def creation_lost(self) -> ClusterError:
        return _unknown(self.shown, "it was lost when a trial was created")


def _unknown(shown: str, told: str) -> ClusterError:
    return ClusterError(
        f"storage {shown!r}: the connection was lost during a change, and it is unknown whether it is stored: {told}"
    )


def no_study(shown: str, study: str | None = None) -> NoStudy:
    which = "no study" if study is None else f"no study {study!r}"
    return NoStudy(f"storage {shown!r}: it has {which}: `mgpu-slurm sweep` creates it before its workers start")


def _driver(url: URL, shown: str) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Return SQLAlchemy's dialect for a driver, and the arguments and options of its connections."""
    try:
        kind: Any = url.get_dialect()
        made = kind(dbapi=kind.import_dbapi())
    except NoSuchModuleError:
        raise UserError(f"storage {shown!r}: unknown driver: remove what follows the +") from None
    except ImportError as error:
        extra = _EXTRAS[url.get_backend_name()]
        raise UserError(f"storage {shown!r}: {error}: pip install 'mgpu-slurm[{extra}]'") from None
    arguments, options = made.create_connect_args(url)
    if url.get_driver_name() in _LIBPQ:
        # without it libpq waits for the system's network time-out, which is minutes
        options.setdefault("connect_timeout", _CONNECT_SECONDS)
    return made, arguments, options


def _is_refusal(error: Exception) -> bool:
    """Return whether a server answered and refused the login for good, so that waiting does not help."""
    number = error.args[0] if error.args else None
    if isinstance(number, int):
        return 1000 <= number < 2000 and number not in _BUSY_NUMBERS
    told = str(error)
    if any(words in told for words in _BUSY):
        return False
    # a server that is starting or stopping does not ask for a password, whatever its language
    has_asked = getattr(getattr(error, "pgconn", None), "used_password", False)
    is_answer = "FATAL" in told or (has_asked and _ANSWER.search(told) is not None)
    return is_answer or any(words in told for words in _REFUSED)


def _is_lost(error: DBAPIError) -> bool:
    """Return whether the connection is lost; SQLAlchemy checks the socket, which may close after the last message."""
    code = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
    # an error from a PostgreSQL server has a code; an error of its driver about the connection has none
    is_drivers_word = isinstance(error, OperationalError) and getattr(error.orig, "sqlstate", "") is None
    return error.connection_invalidated or is_drivers_word or code in _ENDED


def _is_so(trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> bool:
    return trial.state == state and trial.values == (None if values is None else list(values))
