"""A study in a database: servers that restart, are full, refuse or say nothing, and passwords that nobody sees."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
import psycopg
import pytest
from optuna.trial import Trial, TrialState

from mgpu_slurm.core import retry
from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study import claims as claiming
from mgpu_slurm.sweeps.study import database
from mgpu_slurm.sweeps.study import trial_queue as studies
from tests import postgresql as databases
from tests.forks import FORKS
from tests.on_slurm.packages import DATABASE_PASSWORD
from tests.postgresql import Server
from tests.support import stderr_as, wait_until
from tests.sweeps.study.test_storage import VARIABLE, Place, in_processes, suggest, take_all

NOWHERE = Path("/unused")


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, DATABASE_PASSWORD)


@pytest.fixture
def own_server(postgresql: Server, tmp_path: Path) -> Iterator[Server]:
    """One to stop, besides that of all tests, which says whether there can be any."""
    with databases.server(tmp_path / "server") as server:
        yield server


def place(server: Server) -> Place:
    return Place(server.url(server.new_database(), f"${{{VARIABLE}}}"), server.folder)


def tables(server: Server, made: Sweep) -> int:
    assert made.storage is not None
    name = made.storage.partition("@/")[2].partition("?")[0]
    ((count,),) = server.query("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'", name)
    assert isinstance(count, int)
    return count


def test_worker_creates_no_tables_in_an_empty_database(postgresql: Server) -> None:
    own = place(postgresql)
    with pytest.raises(UserError, match=r"^storage '.*': it has no study: `mgpu-slurm sweep` creates it .*$"):
        own.load(own.sweep())
    assert tables(postgresql, own.sweep()) == 0
    assert tables(postgresql, own.create()) > 0


def test_creating_a_study_in_tables_of_another_version_is_rejected(postgresql: Server) -> None:
    own = place(postgresql)
    made = own.create()
    postgresql.query(
        "UPDATE alembic_version SET version_num = 'v9.9.9.a'", own.url.partition("@/")[2].partition("?")[0]
    )
    with pytest.raises(UserError, match=r"^storage '.*': its tables are of another version of Optuna \(v9.9.9.a; "):
        own.create(study="other")
    # a worker does not look: whoever made the study did
    assert own.begin(own.load(made), made).number == 0


class TestConnections:
    def test_connection_is_reused_and_soon_closed_when_idle(self, postgresql: Server) -> None:
        own = place(postgresql)
        study = own.load(own.create())
        seen: set[object] = set()
        for count in range(20):
            study._storage.set_study_system_attr(study._study_id, "count", count)
            seen |= set(connections(postgresql, own))
        assert len(seen) < 20
        wait_until(lambda: not connections(postgresql, own))
        assert studies.notes(study)["count"] == 19
        study._storage.remove_session()
        wait_until(lambda: not connections(postgresql, own), seconds=database.CONNECTION_SECONDS / 2, pause=0.005)

    def test_workers_beyond_the_connection_limit_wait_their_turn(self, own_server: Server) -> None:
        own_server.stop()
        own_server.start("max_connections=3", "superuser_reserved_connections=0", "max_wal_senders=0")
        own = place(own_server)
        made = own.create(trials=12, sampler="random")
        together, taken = FORKS.Barrier(6), FORKS.Array("i", 12)
        in_processes(take_all, [(own, made, worker, together, taken) for worker in range(6)])
        assert list(taken) == [1] * 12
        assert {trial.state for trial in own.load(made).trials} == {TrialState.COMPLETE}
        assert "too many clients already" in (own_server.folder / "log").read_text()


def connections(server: Server, own: Place) -> list[object]:
    assert own.url is not None
    name = own.url.partition("@/")[2].partition("?")[0]
    return [pid for (pid,) in server.query(f"SELECT pid FROM pg_stat_activity WHERE datname = '{name}'")]


def taken(own: Place, study: optuna.Study, made: Sweep) -> Trial | None:
    """As by a worker that comes back each time when a connection was lost over a trial's beginning."""
    while True:
        try:
            return own.take(study, made)
        except ClusterError as error:
            if "it is unknown whether it is stored" not in str(error):
                raise


class TestServerOutages:
    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["restart", "crash"])
    def test_worker_waits_for_a_server_that_comes_back(
        self,
        own_server: Server,
        how: signal.Signals,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        monkeypatch.setattr(retry, "SLOW_SECONDS", 0.0)
        own = place(own_server)
        made = own.create()
        study = own.load(made)
        trial = own.begin(study, made)
        trial.report(1.0, 1)
        own_server.stop(how)
        done = threading.Thread(target=lambda: trial.report(2.0, 2))
        with stderr_as(tmp_path / "stderr") as stderr:
            done.start()
            wait_until(lambda: "; trying again until " in stderr.read_text())
        said = stderr.read_text()
        assert f"mgpu_slurm: storage {own.url!r}: the database does not answer (" in said
        assert DATABASE_PASSWORD not in said
        own_server.start()
        done.join()
        study.tell(trial, 2.0)
        assert study.trials[0].intermediate_values == {1: 1.0, 2: 2.0}
        assert study.trials[0].value == 2.0

    @pytest.mark.long
    def test_broken_connections_lose_no_data(self, postgresql: Server) -> None:
        own = place(postgresql)
        made = own.create(trials=2)
        over, broken = threading.Event(), [0]

        def break_them() -> None:
            while not over.is_set():
                pids = connections(postgresql, own)
                for pid in pids:
                    postgresql.query(f"SELECT pg_terminate_backend({pid})")
                broken[0] += len(pids)

        breaking = threading.Thread(target=break_them)
        breaking.start()
        try:
            study = own.load(made)
            numbers = []
            while (trial := taken(own, study, made)) is not None:
                suggest(made, trial)
                for step in range(1, 4):
                    trial.report(float(step), step)
                    trial.set_user_attr("step", step)
                study.tell(trial, float(trial.number))
                numbers.append(trial.number)
        finally:
            over.set()
            breaking.join()
        assert broken[0] > 10
        # one whose taking was cut off may be left, and counts as somebody's
        left = study.get_trials(states=(TrialState.RUNNING,))
        assert sorted(numbers + [trial.number for trial in left]) == [0, 1]
        assert all(claiming.claims(trial) == {0: 1} for trial in left)
        for number in numbers:
            trial = study.trials[number]
            assert (trial.value, trial.user_attrs, len(trial.params)) == (float(number), {"step": 3}, 2)
            assert trial.intermediate_values == {step: float(step) for step in range(1, 4)}

    def test_admin_shutdown_during_commit_is_retried(self, postgresql: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        own = place(postgresql)
        made = own.create()
        trial = own.begin(own.load(made), made)
        real, ended = psycopg.Connection.commit, []

        def commit(self: psycopg.Connection[object]) -> None:
            if not ended:
                ended.append(True)
                raise psycopg.errors.AdminShutdown("terminating connection due to administrator command")
            real(self)

        monkeypatch.setattr(psycopg.Connection, "commit", commit)
        trial.report(1.0, 1)
        assert ended
        assert own.load(made).trials[0].intermediate_values == {1: 1.0}

    def test_outage_beyond_the_deadline_is_a_one_line_error(
        self, own_server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = place(own_server)
        made = own.create()
        study = own.load(made)
        own_server.stop()
        monkeypatch.setattr(study._storage, "_seconds", 0.0)
        with pytest.raises(ClusterError, match=r"^storage '.*': the database does not answer: .*$") as told:
            own.take(study, made)
        assert_silent_about(DATABASE_PASSWORD, told.value)
        own_server.start()
        assert own.begin(study, made).number == 0


class TestLostCommitReplies:
    """The commit succeeds but its reply is lost, which a worker cannot tell from a commit that failed."""

    @pytest.fixture
    def own(self, postgresql: Server) -> Place:
        return place(postgresql)

    @pytest.fixture
    def made(self, own: Place) -> Sweep:
        return own.create()

    @pytest.fixture
    def study(self, own: Place, made: Sweep) -> optuna.Study:
        return own.load(made)

    @pytest.fixture
    def trial(self, own: Place, made: Sweep, study: optuna.Study) -> Trial:
        return own.begin(study, made)

    @pytest.fixture
    def lose_next(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
        losing, real = threading.Event(), psycopg.Connection.commit

        def commit(self: psycopg.Connection[object]) -> None:
            real(self)
            if losing.is_set():
                losing.clear()
                self.close()
                raise psycopg.OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(psycopg.Connection, "commit", commit)
        yield losing
        assert not losing.is_set()

    def test_idempotent_change_is_repeated(self, study: optuna.Study, trial: Trial, lose_next: threading.Event) -> None:
        lose_next.set()
        trial.report(1.0, 1)
        lose_next.set()
        trial.suggest_float("x", 0, 1)
        lose_next.set()
        study.tell(trial, 1.0)
        assert (study.trials[0].value, study.trials[0].intermediate_values) == (1.0, {1: 1.0})
        with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
            study._storage.set_trial_state_values(trial._trial_id, TrialState.COMPLETE, [1.0])

    def test_trial_that_may_be_another_workers_counts_as_not_taken(
        self, own: Place, made: Sweep, study: optuna.Study, lose_next: threading.Event
    ) -> None:
        studies.queue(study, [{}, {}])
        first = study.trials[0]
        lose_next.set()
        assert study._storage.set_trial_state_values(first._trial_id, TrialState.RUNNING) is False
        assert own.begin(study, made).number == 1

    def test_trial_that_may_have_begun_is_claimed_and_not_begun_twice(
        self,
        own: Place,
        made: Sweep,
        study: optuna.Study,
        lose_next: threading.Event,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        real = study._storage.create_new_trial

        def create_and_lose(*given: Any, **named: Any) -> int:
            lose_next.set()
            return real(*given, **named)

        monkeypatch.setattr(study._storage, "create_new_trial", create_and_lose)
        # whether it is told or found out
        with suppress(ClusterError):
            own.take(study, made)
        monkeypatch.setattr(study._storage, "create_new_trial", real)
        (begun,) = study.trials
        assert (begun.state, claiming.claims(begun)) == (TrialState.RUNNING, {0: 1})
        assert [own.begin(study, made).number for _ in range(2)] == [1, 2]
        assert own.take(study, made) is None

    def test_non_idempotent_change_is_not_repeated(
        self, study: optuna.Study, trial: Trial, lose_next: threading.Event
    ) -> None:
        lose_next.set()
        with pytest.raises(ClusterError, match=r"the connection was lost during a change, and it is unknown whether"):
            study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)


class TestPasswords:
    def test_password_may_be_any_text(self, postgresql: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        secret = "p@ss/w:o%rd {}?&#é'\"\\"
        quoted = secret.replace("'", "''")
        postgresql.query(f"CREATE ROLE \"me@lab\" SUPERUSER LOGIN PASSWORD '{quoted}'")
        monkeypatch.setenv("DATABASE_USER", "me@lab")
        monkeypatch.setenv("DATABASE_PASSWORD", secret)
        url = postgresql.url(postgresql.new_database(), "x").replace(
            "postgres:x", "${DATABASE_USER}:${DATABASE_PASSWORD}"
        )
        own = Place(url, postgresql.folder)
        made = own.create()
        assert own.begin(own.load(made), made).number == 0

    def test_wrong_password_is_reported_in_one_line_and_not_shown(
        self, postgresql: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = place(postgresql)
        monkeypatch.setenv("WRONG_PASSWORD", "not the right one")
        assert own.url is not None
        wrong = Place(own.url.replace(VARIABLE, "WRONG_PASSWORD"), NOWHERE)
        with pytest.raises(ClusterError, match=r"the database refused: .*password authentication failed") as told:
            wrong.load(wrong.sweep())
        assert_silent_about("not the right one", told.value)
        assert "\n" not in str(told.value)
        assert "${WRONG_PASSWORD}" in str(told.value)

    def test_empty_password_is_reported_as_refused(self, postgresql: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        """Such as that of an empty variable: not the server but the driver refuses it."""
        own = place(postgresql)
        monkeypatch.setenv("NO_PASSWORD", "")
        monkeypatch.setattr(retry, "SECONDS", 3.0)
        assert own.url is not None
        nothing = Place(own.url.replace(VARIABLE, "NO_PASSWORD"), NOWHERE)
        with pytest.raises(ClusterError, match=r"the database refused: .*no password supplied"):
            nothing.load(nothing.sweep())

    @pytest.mark.parametrize(
        ("told", "has_asked", "refuses"),
        [
            ('failed: FATAL:  password authentication failed for user "me"', True, True),
            ('failed: FATAL:  role "me" does not exist', False, True),
            ("failed: ВАЖНО:  пользователь «me» не прошёл проверку подлинности (по паролю)", True, True),
            ("failed: ВАЖНО:  система баз данных запускается", False, False),
            ("failed: FATAL:  the database system is starting up", False, False),
            (
                "failed: FATAL:  remaining connection slots are reserved for roles with the SUPERUSER attribute",
                True,
                False,
            ),
            ("failed: server closed the connection unexpectedly", True, False),
            ("failed: Connection refused\n\tIs the server running on that host?", False, False),
            ("failed: server does not support SSL, but SSL was required", False, True),
        ],
    )
    def test_refused_login_is_recognized_in_any_language(self, told: str, has_asked: bool, refuses: bool) -> None:
        class Connection:
            used_password = has_asked

        error = psycopg.OperationalError(f'connection to server at "127.0.0.1", port 5432 {told}')
        error._pgconn = Connection()  # type: ignore[assignment]
        assert database._is_refusal(error) is refuses

    def test_password_is_in_no_command_line_and_cwd_stays_empty(
        self, postgresql: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        own = place(postgresql)
        made = own.create()
        own.begin(own.load(made), made)
        assert list(tmp_path.rglob("*")) == []
        for mine in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                assert DATABASE_PASSWORD.encode() not in mine.read_bytes()
            except OSError:
                continue

    def test_unset_variable_is_named_and_other_values_are_not_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("USER_NAME", "somebody")
        monkeypatch.delenv("PASSWORD", raising=False)
        own = Place("postgresql://${USER_NAME}:${PASSWORD}@db/optuna", NOWHERE)
        with pytest.raises(UserError, match=r"\$\{PASSWORD\} is not set") as refused:
            own.create()
        assert_silent_about("somebody", refused.value)

    def test_values_that_do_not_form_a_url_are_not_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PORT", "no-port")
        with pytest.raises(UserError, match="it is not a URL after its variables are replaced") as refused:
            Place("postgresql://db:${PORT}/optuna", NOWHERE).create()
        assert_silent_about("no-port", refused.value)


def assert_silent_about(secret: str, error: BaseException) -> None:
    assert secret not in "".join(traceback.format_exception(error))


class TestUnavailable:
    def test_unreachable_postgresql_server_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(database, "LOGIN_SECONDS", 0.2)
        begun = time.monotonic()
        # nobody may listen on the first port
        with pytest.raises(ClusterError, match=r"^storage '.*': the database does not answer: .*refused.*$") as told:
            Place(f"postgresql://me:${{{VARIABLE}}}@127.0.0.1:1/optuna", NOWHERE).create()
        assert time.monotonic() - begun < 5
        assert_silent_about(DATABASE_PASSWORD, told.value)

    def test_unreachable_mysql_server_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(database, "LOGIN_SECONDS", 0.2)
        for scheme in ("mysql", "mariadb", "mysql+pymysql"):
            with pytest.raises(ClusterError, match=r"the database does not answer: .*Can't connect to MySQL") as told:
                Place(f"{scheme}://me:${{{VARIABLE}}}@127.0.0.1:1/optuna", NOWHERE).create()
            assert_silent_about(DATABASE_PASSWORD, told.value)

    def test_missing_database_is_reported(self, postgresql: Server) -> None:
        with pytest.raises(ClusterError, match=r'the database refused: .*database "nowhere" does not exist'):
            Place(postgresql.url("nowhere"), NOWHERE).create()

    @pytest.mark.parametrize(
        ("scheme", "driver", "extra"), [("postgresql", "psycopg", "postgresql"), ("mysql", "pymysql", "mysql")]
    )
    def test_missing_driver_is_reported_with_the_pip_command(
        self, scheme: str, driver: str, extra: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, driver, None)
        with pytest.raises(UserError, match=rf"^storage '.*': .*{driver}.*: pip install 'mgpu-slurm\[{extra}\]'$"):
            Place(f"{scheme}://db/optuna", NOWHERE).create()

    def test_unknown_driver_is_rejected(self) -> None:
        with pytest.raises(UserError, match=r"unknown driver: remove what follows the \+"):
            Place("postgresql+nothing://db/optuna", NOWHERE).create()


def test_server_has_fsync_passwords_and_a_private_folder(postgresql: Server) -> None:
    """Writes reach the disk, a wrong password is refused, and others cannot read the folder."""
    assert postgresql.query("SHOW fsync") == [("on",)]
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(host=str(postgresql.folder), user="postgres", password="no", dbname="postgres")
    assert os.stat(postgresql.folder).st_mode & 0o077 == 0


def test_a_server_ends_with_the_process_that_started_it(postgresql: Server, tmp_path: Path) -> None:
    starter = FORKS.Process(target=start_and_die, args=(tmp_path / "server",))
    starter.start()
    starter.join()
    assert starter.exitcode == -signal.SIGKILL
    folder = str(tmp_path / "server").encode()
    wait_until(lambda: not any(folder in words for words in command_lines()))


def start_and_die(folder: Path) -> None:
    Server(folder).start()
    os.kill(os.getpid(), signal.SIGKILL)


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            continue
