"""A web hook hears how a run has ended, and a run ends as it does whatever the web hook answers."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.run_folder import notification, records
from mgpu_slurm.run_folder.layout import RunFolder
from tests.support import Project, wait_until
from tests.web_hook import web_hook


@pytest.fixture(autouse=True)
def _without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def ended(tmp_path: Path, state: str = "COMPLETED") -> RunFolder:
    folder = RunFolder(tmp_path / "x")
    folder.create()
    times = {"started": "2026-11-28T12:00:00+00:00", "ended": "2026-11-28T12:03:10+00:00"}
    records.update_state(folder, state=state, metrics={"loss": float("nan")}, reason="it broke", **times)
    return folder


def test_end_of_a_run_is_posted(project: Project) -> None:
    project.write("job.py", "def train(run, bad: bool = False):\n    run.report(1, loss=0.5)\n    assert not bad\n")
    with web_hook() as (address, posted):
        # a default for all runs of the project, which the command line may change
        project.write("mgpu.yaml", "notify: $HOOK\n")
        project.environ["HOOK"] = address
        good = project.submit("job.py")
        bad = project.submit("job.py", "bad=true", "--notify", f"{address}/bad")
        project.finish(good)
        project.finish(bad)
        wait_until(lambda: len(posted) == 2)
    by_run = {each["run"]: each for each in posted}
    completed, failed = by_run[good.name], by_run[bad.name]
    assert (completed["state"], completed["result"], completed["path"]) == ("COMPLETED", {"loss": 0.5}, "/hook")
    assert completed["folder"] == str(good)
    assert completed["text"].startswith(f"COMPLETED  {good.name}  in ")
    assert completed["text"].endswith("  loss 0.5")
    assert (failed["state"], failed["result"], failed["path"]) == ("FAILED", {}, "/hook/bad")
    assert "AssertionError" in failed["reason"]
    # the address of a web hook is a password
    assert address not in (good / "spec.yaml").read_text()


def test_nan_is_null_in_what_is_posted(tmp_path: Path) -> None:
    with web_hook() as (address, posted):
        notification.send(ended(tmp_path, "TIMEOUT"), address)
    assert posted[0]["metrics"] == {"loss": None}
    assert posted[0]["text"] == "TIMEOUT  x  in 3m10s: it broke  loss nan"


@pytest.mark.parametrize("state", ["RUNNING", "REQUEUED", "PENDING", "CANCELLED"])
def test_run_that_continues_or_was_cancelled_posts_nothing(state: str, tmp_path: Path) -> None:
    with web_hook() as (address, posted):
        notification.send(ended(tmp_path, state), address)
    assert posted == []


def test_refusal_is_told_without_the_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with web_hook(status=403) as (address, _):
        notification.send(ended(tmp_path), address)
    assert capsys.readouterr().out == ("mgpu_slurm: --notify: the end of the run could not be posted: HTTPError 403\n")
    notification.send(ended(tmp_path / "unset"), "$UNSET_HOOK")
    assert capsys.readouterr().out.endswith("not posted: the job's environment has no web address in UNSET_HOOK\n")


def test_server_that_never_answers_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notification, "SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        notification.send(ended(tmp_path), f"http://127.0.0.1:{silent.getsockname()[1]}/")
        assert time.monotonic() - began < 20
    assert "could not be posted: " in capsys.readouterr().out


@pytest.mark.parametrize("address", ["example.org", "file:///etc/passwd", ""])
def test_what_is_no_web_address_is_refused_at_submission(address: str, project: Project) -> None:
    with pytest.raises(UserError, match="expected the address of a web hook"):
        notification.check_address(address)
    done = project.call("submit", "--executor", "local", "--notify", address, "--dry-run", "--", "true")
    assert done.returncode == (2 if address else 0)
