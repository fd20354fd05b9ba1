"""A study in a database: Optuna's own tables and queries, reached with few connections and with patience.

A database takes some hundred connections at once, PostgreSQL 100 unless it is told otherwise, and a worker needs its
own for moments only. So a connection is kept for a moment, in which calls that follow each other share it, and is then
given up; who gets none waits for its turn.

A server that restarts is waited for. A call that lost its connection is made again where that changes nothing: where no
commit was on its way, and where the same call twice is the same as once; that is all but to make a study, to queue a
trial, and to give one back. A trial that a worker took without hearing of it is not its own: it is left as one of a
worker that died.
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
"""For so long a connection is kept: long beside the 25 ms that a new one costs, short beside a trial."""

LOGIN_SECONDS = 5.0
"""For so long a database that does not answer is waited for by who makes a study."""

_CONNECT_SECONDS = 10
_EXTRAS = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}
_LIBPQ = ("psycopg", "psycopg2")

# what a PostgreSQL says that answers, but not now, in the words of its source; and MySQL's numbers for the same
_BUSY = ("too many clients", "connection slots are reserved", "the database system is", "too many connections")
_BUSY_NUMBERS = (1040, 1053, 1203)

_REFUSED = ("no password supplied", "SSL was required", "certificate verify failed")
"""What libpq says when it does not get in whatever the server does."""

# "FATAL" or the word for it in the server's language, and what the server says
_ANSWER = re.compile(r"failed: [^\s:]+:  ")

_ENDED = ("57P01", "57P02")
"""PostgreSQL's codes of a connection that it ends: admin_shutdown, crash_shutdown."""

Answer = TypeVar("Answer")
Given = ParamSpec("Given")


class _NotNow(Exception):
    """There is no connection at the moment; nothing has been sent."""


def _asked(method: Callable[Concatenate[Any, Given], Answer]) -> Callable[Concatenate[Database, Given], Answer]:
    """The method of Optuna's storage of that name, made until it is answered; once or twice, it does the same."""

    def ask(self: Database, /, *words: Given.args, **named: Given.kwargs) -> Answer:
        inner: Callable[Given, Answer] = getattr(self._inner, method.__name__)
        return self._ask(lambda: inner(*words, **named))

    return ask


def _asked_once(method: Callable[Concatenate[Any, Given], Answer]) -> Callable[Concatenate[Database, Given], Answer]:
    """The same of one that does more when it is made twice."""

    def ask(self: Database, /, *words: Given.args, **named: Given.kwargs) -> Answer:
        inner: Callable[Given, Answer] = getattr(self._inner, method.__name__)
        return self._ask(lambda: inner(*words, **named), is_repeatable=False)

    return ask


class Database(BaseStorage):
    """Studies in a database. For one process, not for its children; its calls come one at a time."""

    def __init__(self, url: URL, shown: str, is_new: bool) -> None:
        """
        Args:
            url: with the password, which goes to the driver alone.
            shown: names the database in errors.
            is_new: makes the tables where they are missing, and refuses those of another version of Optuna; else they
                are there, or there is no study.

        Raises:
            UserError: its driver is not installed, or it holds nothing of Optuna's, or of another version of it.
            ClusterError: it refuses, or has not answered for too long.
        """
        self._shown = shown
        self._secret = url.password
        self._seconds = LOGIN_SECONDS if is_new else retry.SECONDS
        self._lock = threading.RLock()
        self._driver, self._arguments, self._options = _driver(url, shown)
        self._rdb: RDBStorage | None = None
        # without a word of where and who: what has no password cannot tell it
        bare = f"{url.drivername}://"
        if not is_new and not self._ask(lambda: self._has_tables(bare)):
            raise no_study(shown)
        self._inner = get_storage(self._ask(lambda: self._opened(bare, is_new)))
        if is_new:
            self._ask(self._check_version)

    def _has_tables(self, bare: str) -> bool:
        """Asked first: Optuna would make some of them, all workers at once."""
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
                f"storage {self._shown!r}: its tables are those of another Optuna ({there}; here they are {ours}):"
                " name a database of its own, or bring them up to date with optuna storage upgrade"
            )

    # -- what is stored

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
                # an attempt whose answer was lost has arrived
                return True

        # to give back what somebody else may have taken by then would give it to two
        return self._ask(change, is_repeatable=state != TrialState.WAITING)

    def remove_session(self) -> None:
        """Gives up the connection now."""
        with self._lock:
            if self._rdb is not None:
                self._rdb.engine.dispose()

    # -- how it is asked

    def _ask(self, call: Callable[[], Answer], is_repeatable: bool = True) -> Answer:
        """The answer to a call, made until there is one.

        Args:
            is_repeatable: the same call twice is the same as once.
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
        """What the driver says of a lost connection; raises what is something else, or may not be tried again."""
        cause = error if isinstance(error, DBAPIError) else error.__cause__
        told = self._told(cause.orig if isinstance(cause, DBAPIError) else cause)
        if isinstance(cause, PendingRollbackError):
            # Optuna has tried to read on over a connection that was lost
            return told
        if not isinstance(cause, DBAPIError) or not _is_lost(cause):
            raise ClusterError(f"storage {self._shown!r}: the database refuses: {told}") from None
        # what was lost with a statement was taken back; a commit comes without one
        if cause.statement is None and not is_repeatable:
            raise _unknown(self._shown, told) from None
        return told

    def _connect(self) -> Any:
        """A connection of the driver's, for a moment."""
        try:
            connection = self._driver.connect(*self._arguments, **self._options)
        except self._driver.loaded_dbapi.Error as error:
            told = self._told(error)
            if _is_refusal(error):
                raise ClusterError(f"storage {self._shown!r}: the database refuses: {told}") from None
            raise _NotNow(told) from None
        timer = threading.Timer(CONNECTION_SECONDS, self.remove_session)
        timer.daemon = True
        timer.start()
        return connection

    def _told(self, error: BaseException | None) -> str:
        """What a driver says, on one line; none is known to say a password, and none does."""
        told = " ".join(str(error).split())
        return told.replace(self._secret, "***") if self._secret else told


class _Rdb(CreateOnceStorage):
    shown = ""
    """Names the database in errors."""

    def creation_lost(self) -> ClusterError:
        return _unknown(self.shown, "it was lost when a trial was created")


def _unknown(shown: str, told: str) -> ClusterError:
    return ClusterError(
        f"storage {shown!r}: the connection was lost over a change, and nobody knows whether it is stored: {told}"
    )


def no_study(shown: str, study: str | None = None) -> NoStudy:
    which = "no study" if study is None else f"no study {study!r}"
    return NoStudy(f"storage {shown!r}: there is {which} in it: mgpu-slurm sweep makes it, before its workers start")


def _driver(url: URL, shown: str) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """SQLAlchemy's side of a driver, and what it calls the driver with."""
    try:
        kind: Any = url.get_dialect()
        made = kind(dbapi=kind.import_dbapi())
    except NoSuchModuleError:
        raise UserError(f"storage {shown!r}: there is no such driver: leave out what follows the +") from None
    except ImportError as error:
        extra = _EXTRAS[url.get_backend_name()]
        raise UserError(f"storage {shown!r}: {error}: pip install 'mgpu-slurm[{extra}]'") from None
    arguments, options = made.create_connect_args(url)
    if url.get_driver_name() in _LIBPQ:
        # by itself it waits for as long as the system's network code does, which is minutes
        options.setdefault("connect_timeout", _CONNECT_SECONDS)
    return made, arguments, options


def _is_refusal(error: Exception) -> bool:
    """Return whether a server answered and did not like what it was asked, which waiting does not change."""
    number = error.args[0] if error.args else None
    if isinstance(number, int):
        return 1000 <= number < 2000 and number not in _BUSY_NUMBERS
    told = str(error)
    if any(words in told for words in _BUSY):
        return False
    # a server that starts or ends asks for no password, in any language
    has_asked = getattr(getattr(error, "pgconn", None), "used_password", False)
    is_answer = "FATAL" in told or (has_asked and _ANSWER.search(told) is not None)
    return is_answer or any(words in told for words in _REFUSED)


def _is_lost(error: DBAPIError) -> bool:
    """Whether the connection is gone; SQLAlchemy asks the socket, which may close after the server's last word."""
    code = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
    # what a PostgreSQL server says has a code; what its driver says of the connection has none
    is_drivers_word = isinstance(error, OperationalError) and getattr(error.orig, "sqlstate", "") is None
    return error.connection_invalidated or is_drivers_word or code in _ENDED


def _is_so(trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> bool:
    return trial.state == state and trial.values == (None if values is None else list(values))
