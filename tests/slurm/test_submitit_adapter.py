from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from submitit import SlurmExecutor
from submitit.core.utils import CommandFunction, FailedJobError

from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm import sbatch, submitit_adapter
from mgpu_slurm.slurm.commands import LOST, SlurmUnavailable, scrubbed_environment
from mgpu_slurm.slurm.submitit_adapter import submit
from tests.support import REPOSITORY

VERSION = "1.5.4"

SCRIPT = "#!/bin/bash\n#SBATCH --job-name=digits\n\necho it\\'s $HOME\n"
RECORD = 'printf "%s\\n" "$@" > "$RECORDS/argv"; cat "$2" > "$RECORDS/script"; env > "$RECORDS/env"'

FakeSbatch = Callable[[str], dict[str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs of mine" / "digits-1")
    folder.create()
    return folder


@pytest.fixture
def fake_sbatch(tmp_path: Path) -> FakeSbatch:
    """Writes an sbatch; the environment in which it is on PATH. There is no srun."""

    def write(body: str) -> dict[str, str]:
        commands = tmp_path / "bin"
        commands.mkdir()
        (commands / "sbatch").write_text(f"#!/bin/sh\n{body}\n")
        (commands / "sbatch").chmod(0o755)
        return {"PATH": f"{commands}:/usr/bin:/bin", "RECORDS": str(tmp_path), "HOME": "/home/me"}

    return write


def test_sbatch_gets_the_script_unchanged(folder: RunFolder, fake_sbatch: FakeSbatch, tmp_path: Path) -> None:
    environ = fake_sbatch(f"{RECORD}; echo 42")
    assert submit(SCRIPT, folder, environ) == "42"
    option, argument = (tmp_path / "argv").read_text().splitlines()
    assert option == "--parsable"
    assert Path(argument).parent == folder.path / "submitit"
    assert (tmp_path / "script").read_text() == SCRIPT


def test_submitit_files_stay_in_the_run_folder(
    folder: RunFolder, fake_sbatch: FakeSbatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    submit(SCRIPT, folder, fake_sbatch("echo 42"))
    assert list(elsewhere.iterdir()) == []
    assert {path.name for path in folder.path.iterdir()} == {"logs", "submitit"}
    assert (folder.path / "submitit" / "42_submission.sh").read_text() == SCRIPT


def test_sbatch_inherits_only_the_given_environment(
    folder: RunFolder, fake_sbatch: FakeSbatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPU_BIND", "mask")
    monkeypatch.setenv("RANK", "3")
    environ = fake_sbatch(f"{RECORD}; echo 42")
    before = dict(os.environ)
    submit(SCRIPT, folder, scrubbed_environment({**before, **environ, "SLURM_CONF": "/etc/slurm.conf"}))
    assert dict(os.environ) == before
    lines = (tmp_path / "env").read_text().splitlines()
    assert "SLURM_CONF=/etc/slurm.conf" in lines
    assert "HOME=/home/me" in lines
    assert [line for line in lines if line.startswith(("SLURM_CPU_BIND", "RANK="))] == []


def test_other_threads_keep_their_path_during_a_submission(
    folder: RunFolder, fake_sbatch: FakeSbatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch waits at a named pipe until this thread has looked."""
    os.mkfifo(tmp_path / "gate")
    environ = fake_sbatch('read line < "$RECORDS/gate"; echo 42')
    monkeypatch.setenv("PATH", environ["PATH"])
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("RECORDS", str(tmp_path))
    thread = threading.Thread(target=submit, args=(SCRIPT, folder, scrubbed_environment(os.environ)))
    thread.start()
    with open(tmp_path / "gate", "w") as gate:
        during = dict(os.environ)
        gate.write("go\n")
    thread.join()
    assert during == {name: value for name, value in os.environ.items() if name != "RANK"}


def test_missing_sbatch_error_suggests_the_local_executor(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"^no sbatch on PATH: .* --executor local$"):
        submit(SCRIPT, folder, {"PATH": str(tmp_path)})


def test_refusal_is_a_one_line_error_and_prints_nothing(
    folder: RunFolder, fake_sbatch: FakeSbatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environ = fake_sbatch(
        'echo "Welcome to HPC" >&2; echo "sbatch: error: invalid partition specified: gpux" >&2;'
        ' echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2; exit 1'
    )
    before = dict(os.environ)
    with pytest.raises(
        ClusterError, match=r"^sbatch refused the job: sbatch: error: invalid partition specified: gpux$"
    ):
        submit(SCRIPT, folder, environ)
    assert capfd.readouterr() == ("", "")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("body", "limit", "problem"),
    [
        ("echo Welcome to job 500", sbatch.TIME_LIMIT, "sbatch printed no job id: Welcome to job 500"),
        ("kill -KILL $$", sbatch.TIME_LIMIT, "sbatch was killed by SIGKILL"),
        ("echo half; exec sleep 600", 0.2, r"sbatch did not answer within 0\.2 s"),
        (
            'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1',
            sbatch.TIME_LIMIT,
            "sbatch got no answer: .* Socket timed out on send/recv operation",
        ),
    ],
)
def test_job_may_be_queued_if_sbatch_gave_no_answer(
    folder: RunFolder, fake_sbatch: FakeSbatch, monkeypatch: pytest.MonkeyPatch, body: str, limit: float, problem: str
) -> None:
    monkeypatch.setattr(sbatch, "TIME_LIMIT", limit)
    with pytest.raises(SlurmUnavailable, match=f"^{problem}$") as caught:
        submit(SCRIPT, folder, fake_sbatch(body))
    assert caught.value.request == LOST


def test_job_id_is_found_among_banners(folder: RunFolder, fake_sbatch: FakeSbatch) -> None:
    environ = fake_sbatch('echo "Your last job 500 has ended."; echo "2 jobs" >&2; echo "42;alpha"; echo "Bye 7"')
    assert submit(SCRIPT, folder, environ) == "42"


def test_folder_name_that_submitit_would_change_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set MGPU_RUNS"):
        submit(SCRIPT, RunFolder(tmp_path / "100%job" / "digits"), {})


def test_documented_submitit_version_matches_the_project() -> None:
    words = " ".join((submitit_adapter.__doc__ or "").split())
    assert f"written for submitit {VERSION}, which is also the oldest supported version" in words
    assert f"\nsubmitit=={VERSION}\n" in (REPOSITORY / "constraints.txt").read_text()
    assert f'"submitit>={VERSION}"' in (REPOSITORY / "pyproject.toml").read_text()


def test_only_checked_private_names_are_used() -> None:
    tree = ast.parse(Path(submitit_adapter.__file__).read_text())
    (executor,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    used = {node.name for node in executor.body if isinstance(node, ast.FunctionDef)}
    used |= {node.attr for node in ast.walk(executor) if isinstance(node, ast.Attribute)}
    private = {name for name in used if re.match(r"_[a-z]", name)}
    assert private - {"_script"} == {
        "_make_submission_file_text",
        "_make_submission_command",
        "_get_job_id_from_submission_command",
    }


def test_installed_submitit_has_the_overridden_members() -> None:
    assert not hasattr(SlurmExecutor, "_script")
    assert list(inspect.signature(SlurmExecutor._make_submission_file_text).parameters) == ["self", "command", "uid"]
    assert isinstance(inspect.getattr_static(SlurmExecutor, "affinity"), classmethod)
    assert list(inspect.signature(SlurmExecutor.affinity).parameters) == []
    assert list(inspect.signature(SlurmExecutor.__init__).parameters)[:2] == ["self", "folder"]
    assert list(inspect.signature(SlurmExecutor._make_submission_command).parameters) == [
        "self",
        "submission_file_path",
    ]
    parse = inspect.getattr_static(SlurmExecutor, "_get_job_id_from_submission_command")
    assert isinstance(parse, staticmethod)
    assert list(inspect.signature(parse.__func__).parameters) == ["string"]


def test_installed_submitit_reports_how_a_command_failed() -> None:
    with pytest.raises(FailedJobError) as caught:
        CommandFunction(["sh", "-c", "echo said; exit 3"], verbose=False)()
    cause = caught.value.__cause__
    assert isinstance(cause, subprocess.CalledProcessError)
    assert (cause.returncode, cause.output) == (3, "said")
