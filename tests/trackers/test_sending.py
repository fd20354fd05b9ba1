"""What becomes of a run whose tracker fails, and who sends it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from mgpu_slurm.core import files
from mgpu_slurm.request.spec import read_spec
from mgpu_slurm.run_folder import records
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.record_types import Report
from mgpu_slurm.trackers import outcome, sending
from mgpu_slurm.trackers.adapters.mlflow_tracker import _keys
from mgpu_slurm.trackers.destinations import Destination
from mgpu_slurm.trackers.outcome import Sent, lock_of, read_sent
from mgpu_slurm.trackers.sending import Sender
from mgpu_slurm.trackers.tracker import PROGRESS, Status, TrackedRun, Tracker
from tests.support import REPOSITORY
from tests.trackers.run_files import add, make_run, report, save

SINK = "mlflow=http://server#project"


class Memory(Tracker):
    """A tracker that keeps what it is told, and fails when asked to."""

    has: list[Report]
    fails: set[str]
    told: list[tuple[str, Mapping[str, str]]]
    runs: list[TrackedRun]

    def __init__(self, destination: Destination, run: TrackedRun) -> None:
        self._try("connect")
        self.runs.append(run)

    def _try(self, what: str) -> None:
        if what in self.fails:
            raise ConnectionError(f"cannot {what}\nat all")

    @property
    def id(self) -> str:
        return "id"

    @property
    def address(self) -> str:
        return "http://server/run"

    def missing(self, reports: Sequence[Report]) -> list[Report]:
        self._try("ask")
        has = max((each.progress for each in self.has), default=0)
        return [each for each in reports if each.progress > has]

    def send(self, reports: Sequence[Report]) -> None:
        for each in reports:
            self._try("send")
            self.has.append(each)
            self._try("answer")

    def finish(self, status: Status, tags: Mapping[str, str], ended: str | None) -> None:
        self._try("finish")
        self.told.append((status, tags))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> type[Memory]:
    Memory.has, Memory.fails, Memory.told, Memory.runs = [], set(), [], []
    monkeypatch.setattr(sending, "connect", Memory)
    monkeypatch.setattr(sending, "FIRST_PAUSE", 0.0)
    return Memory


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = make_run(tmp_path / "run-1", [SINK], lr=0.1, model={"width": 32})
    add(run, *map(report, range(1, 6)))
    save(run, 3)
    return run


def sender(run: RunFolder) -> Sender:
    return Sender(run, read_spec(run), [Destination.parse(SINK)])


def progress(memory: type[Memory]) -> list[int]:
    return [each.progress for each in memory.has]


def test_settled_reports_are_sent_while_it_runs_and_all_at_its_end(run: RunFolder, memory: type[Memory]) -> None:
    one = sender(run)
    assert not one.look(is_job_over=False)
    assert progress(memory) == [1, 2, 3]
    save(run, 4)
    one.look(is_job_over=False)
    assert progress(memory) == [1, 2, 3, 4]
    assert memory.told == []
    records.update_state(run, state="COMPLETED")
    assert one.look(is_job_over=True)
    assert progress(memory) == [1, 2, 3, 4, 5]
    assert memory.told == [("completed", {"mgpu.state": "COMPLETED", "mgpu.attempts": "1"})]
    assert len(memory.runs) == 1
    assert memory.runs[0].config == {"lr": 0.1, "model.width": 32}
    assert outcome.lines(run, [SINK]) == ["mlflow    http://server/run"]


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("FAILED", "failed"),
        ("OUT_OF_MEMORY", "failed"),
        ("CANCELLED", "stopped"),
        ("TIMEOUT", "stopped"),
        ("RUNNING", "stopped"),
        ("REQUEUED", "waiting"),
    ],
)
def test_what_a_resume_would_repeat_is_not_sent(run: RunFolder, memory: type[Memory], state: str, status: str) -> None:
    records.update_state(run, state=state)
    sender(run).look(is_job_over=True)
    assert progress(memory) == [1, 2, 3]
    assert [told for told, _ in memory.told] == [status]
    (line,) = outcome.lines(run, [SINK])
    assert line.startswith("mlflow    3 of 5 reports sent (a resume would repeat the others); send all: ")
    assert line.endswith("export run-1 --to mlflow")
    # of the end of the next attempt, it has not been told
    records.record_event(run, "started", attempt=2)
    assert "(it took longer than 30 s)" in outcome.lines(run, [SINK])[0]


@pytest.mark.parametrize("fails", ["connect", "ask", "send", "answer", "finish"])
def test_a_tracker_that_fails_is_tried_again(
    run: RunFolder, memory: type[Memory], fails: str, capsys: pytest.CaptureFixture[str]
) -> None:
    records.update_state(run, state="COMPLETED")
    memory.fails = {fails}
    one = sender(run)
    for _ in range(2):
        assert not one.look(is_job_over=True)
    (sent,) = read_sent(run)
    assert sent.problem == f"ConnectionError: cannot {fails}"
    assert capsys.readouterr().out == f"mgpu_slurm: WARNING: mlflow: ConnectionError: cannot {fails}\n"
    (line,) = outcome.lines(run, [SINK])
    assert f"(ConnectionError: cannot {fails}); send all: " in line
    memory.fails = set()
    assert one.look(is_job_over=True)
    assert progress(memory) == [1, 2, 3, 4, 5]
    assert outcome.lines(run, [SINK]) == ["mlflow    http://server/run"]


def test_a_tracker_that_has_failed_is_left_alone_for_a_while(
    run: RunFolder, memory: type[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "FIRST_PAUSE", 1000.0)
    memory.fails = {"connect"}
    one = sender(run)
    one.look(is_job_over=False)
    memory.fails = set()
    one.look(is_job_over=False)
    assert memory.runs == []
    # but not at the end
    one.look(is_job_over=True)
    assert len(memory.runs) == 1


def test_a_run_that_was_exported_whole_and_then_resumed(run: RunFolder, memory: type[Memory]) -> None:
    records.update_state(run, state="FAILED")
    sender(run).look(is_job_over=True, everything=True)
    assert progress(memory) == [1, 2, 3, 4, 5]
    records.update_state(run, state="RUNNING", attempts=2)
    again = sender(run)
    again.look(is_job_over=False)
    add(run, *(report(each, attempt=2) for each in (4, 5, 6)))
    for saved in (4, 6):
        save(run, saved)
        again.look(is_job_over=False)
    assert progress(memory) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_record_is_replaced(run: RunFolder, memory: type[Memory], content: str) -> None:
    run.sinks.write_text(content)
    sender(run).look(is_job_over=False)
    assert progress(memory) == [1, 2, 3]
    assert [sent.reports for sent in read_sent(run)] == [3]


def test_a_folder_that_cannot_be_read_for_a_moment(
    run: RunFolder, memory: type[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(folder: RunFolder) -> list[Sent]:
        raise OSError(116, "Stale file handle")

    one = sender(run)
    with monkeypatch.context() as patch:
        patch.setattr(sending, "read_sent", stale)
        with pytest.raises(OSError, match="Stale file handle"):
            one.look(is_job_over=False)
    assert not one.look(is_job_over=False)
    assert progress(memory) == [1, 2, 3]


def test_a_tracker_is_told_of_the_end_once_while_another_one_fails(
    run: RunFolder, memory: type[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(destination: Destination, described: TrackedRun) -> Tracker:
        if destination.tracker == "wandb":
            raise ConnectionError("it is down")
        return Memory(destination, described)

    monkeypatch.setattr(sending, "connect", connect)
    records.update_state(run, state="FAILED")
    one = Sender(run, read_spec(run), [Destination.parse(SINK), Destination.parse("wandb=project")])
    for _ in range(3):
        assert not one.look(is_job_over=True)
    assert [status for status, _ in memory.told] == ["failed"]
    assert len(memory.runs) == 1
    assert one.problems == ["wandb=project: ConnectionError: it is down"]


def test_a_run_that_is_called_trials_is_no_trial(tmp_path: Path, memory: type[Memory]) -> None:
    run = make_run(tmp_path / "trials", [SINK])
    add(run, report(1), report(2))
    records.update_state(run, state="FAILED")
    sender(run).look(is_job_over=True)
    assert progress(memory) == []
    assert [status for status, _ in memory.told] == ["failed"]
    assert not memory.runs[0].is_trial


def test_a_run_that_slurm_has_ended_without_a_word_is_stopped(run: RunFolder, memory: type[Memory]) -> None:
    sender(run).look(is_job_over=True)
    assert memory.told == [("stopped", {"mgpu.state": "STOPPED", "mgpu.attempts": "1"})]


def test_names_become_those_that_mlflow_takes() -> None:
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    names = ["loss", "train//loss", "/loss", "loss/", "./loss", "../loss", "a@b", "a#b", "", "..", "mgpu/progress", "é"]
    keys = _keys(names)
    assert keys["loss"] == "loss"
    assert len({*keys.values(), PROGRESS}) == len(names) + 1
    for key in keys.values():
        _validate_metric_name(key)
        _validate_param_name(key)


@contextmanager
def sent_elsewhere(run: RunFolder) -> Iterator[None]:
    """Another process is the one that sends the reports of a run."""
    script = (
        "import sys; from pathlib import Path; from mgpu_slurm.core import files;"
        " assert files.hold_if_free(Path(sys.argv[1])) is not None; print(1, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(lock_of(run))]
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        yield
        other.stdin.close()


def test_one_process_sends_a_run(run: RunFolder, memory: type[Memory]) -> None:
    one = sender(run)
    with sent_elsewhere(run):
        one.look(is_job_over=False)
        assert memory.runs == []
    one.look(is_job_over=False)
    assert progress(memory) == [1, 2, 3]


def test_end_is_awaited_only_while_a_process_sends(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome.write_sent(run, [Sent(SINK, problem="ConnectionError: cannot connect")])
    monkeypatch.setattr(outcome, "FINISH_SECONDS", 3600)
    a_while_ago = (datetime.now(timezone.utc) - timedelta(seconds=outcome.GIVING_UP_SECONDS)).isoformat()
    waiting = threading.Thread(target=outcome.await_end, args=([run], [SINK], a_while_ago), daemon=True)
    with sent_elsewhere(run):
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()


def test_process_that_starts_at_the_end_of_a_run_is_awaited(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome.write_sent(run, [Sent(SINK, problem="ConnectionError: of an earlier process")])
    monkeypatch.setattr(outcome, "GIVING_UP_SECONDS", 3600)
    waiting = threading.Thread(target=outcome.await_end, args=([run], [SINK], records.now()), daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    outcome.write_sent(run, [Sent(SINK, ended=records.now(), attempt=records.attempts_started(run))])
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_full_disk_of_the_run_loses_only_the_record(
    run: RunFolder, memory: type[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_whole", full)
    sender(run).look(is_job_over=False)
    assert progress(memory) == [1, 2, 3]
    assert read_sent(run) == []


def test_a_full_disk_of_the_tracker(mlflow_file: Path) -> None:
    """A limit of the size of files fails writes as a full disk does."""
    run = make_run(mlflow_file.with_name("run-1"), [f"mlflow=sqlite:///{mlflow_file}#project"])
    reports = [report(progress, **{f"metric{number}": number for number in range(300)}) for progress in range(1, 4)]
    add(run, *reports)
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, __file__, str(run.path)]
    done = subprocess.run(command, env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problem"]
    assert found["last"] == [[each.step, 299.0] for each in reports]


def fill_disk_and_free_it(run: RunFolder) -> None:
    from tests.trackers import reading

    spec = read_spec(run)
    one = Sender(run, spec, [Destination.parse(text) for text in spec.sinks])
    assert not one.look(is_job_over=False)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (run.path.with_name("mlflow.db").stat().st_size, hard))
    records.update_state(run, state="COMPLETED")
    assert not one.look(is_job_over=True)
    (problem,) = one.problems
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert one.look(is_job_over=True), one.problems
    print(json.dumps({"problem": problem, "last": reading.read(run, "mlflow")["metric299"]}))


if __name__ == "__main__":
    fill_disk_and_free_it(RunFolder(Path(sys.argv[1])))
