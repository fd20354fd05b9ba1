"""TensorBoard on exactly the runs that are named: real servers, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import tensorboard_data_server

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.processes import descendants, started_at
from mgpu_slurm.reports import tensorboard_server
from mgpu_slurm.reports.aggregation.run_sources import Source
from mgpu_slurm.reports.tensorboard_server import Choice, linked
from tests.metrics.event_files import ended_run, scalar, write
from tests.support import Project, wait_until

MANY = 2500
"""Points, of which TensorBoard by itself shows 1,000."""


def curves(folder: Path, points: int = 3, name: str = "events.out.tfevents.1.h") -> None:
    write(folder / "tensorboard" / name, [scalar("loss", step, step / 2, step) for step in range(points)])


class Shown:
    """A `mgpu-slurm tensorboard` that serves."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = process.stdout.readline()
            assert line, process.communicate()
            text += line
        self.facts: dict[str, Any] = json.loads(text)

    def get(self, path: str, **query: str) -> Any:
        address = f"{self.facts['address']}data/{path}?{urlencode(query)}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            return json.load(answer)

    def points(self, run: str) -> int:
        """How many there are of its loss."""
        try:
            return len(self.get("plugin/scalars/scalars", run=run, tag="loss"))
        except urllib.error.HTTPError:
            return 0


@contextlib.contextmanager
def shown(project: Project, *words: str, **options: Any) -> Iterator[Shown]:
    process = project.start("tensorboard", "--json", *words, **options)
    try:
        yield Shown(process)
    finally:
        process.kill()
        process.communicate()


def without_data_server(project: Project) -> None:
    """As on machines for which there is none."""
    folder = project.folder / "stubs"
    folder.mkdir()
    (folder / "tensorboard_data_server.py").write_text("__version__ = '0.7.2'\ndef server_binary():\n    return None\n")
    project.environ["PYTHONPATH"] = str(folder)


@pytest.mark.parametrize("loader", ["fast", "slow"])
def test_only_named_runs_are_shown_in_full_and_late_ones_appear(project: Project, loader: str) -> None:
    if loader == "slow":
        without_data_server(project)
    group = ended_run(project.runs / "digits-20260101-000000-abcd", tasks=3, config={"seed": 0})
    curves(group / "tasks" / "0", MANY)
    curves(ended_run(project.runs / "alone"))
    curves(ended_run(project.runs / "unnamed"))
    with shown(project, "digits", "alone") as server:
        assert server.facts["runs"] == [*(f"{group.name}/{task}" for task in range(3)), "alone"]
        assert server.facts["tunnel"].startswith(f"ssh -N -L {server.facts['port']}:127.0.0.1:{server.facts['port']} ")
        wait_until(lambda: server.points(f"{group.name}/0") == MANY and server.points("alone") == 3, pause=0.2)
        assert sorted(server.get("runs")) == ["alone", f"{group.name}/0"]
        assert server.get("plugin/scalars/tags").keys() == {"alone", f"{group.name}/0"}
        # it listens here only
        with socket.socket() as outside, pytest.raises(ConnectionRefusedError):
            outside.connect((own_address(), server.facts["port"]))
        curves(group / "tasks" / "2")
        # a requeue: the run goes on in another file
        curves(ended_run(project.runs / "ignored"))
        write(project.runs / "alone" / "tensorboard" / "events.out.tfevents.2.h", [scalar("loss", 9, 1.0, 9.0)])
        wait_until(lambda: server.points(f"{group.name}/2") == 3 and server.points("alone") == 4, pause=0.2)
        assert sorted(server.get("runs")) == ["alone", f"{group.name}/0", f"{group.name}/2"]
        words = [Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(server.process.pid)]
        is_fast = loader == "fast" and tensorboard_data_server.server_binary() is not None
        assert any("tensorboard_data_server" in command for command in words) == is_fast


def own_address() -> str:
    """One of this machine that is not its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            # of a documentation network: nothing is sent
            way.connect(("192.0.2.1", 9))
        except OSError:
            return "127.1.2.3"
        return str(way.getsockname()[0])


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "term", "kill"])
def test_no_process_or_link_is_left_when_it_ends(project: Project, end: signal.Signals) -> None:
    curves(ended_run(project.runs / "alone"))
    links = Path(project.environ["XDG_STATE_HOME"]) / "mgpu_slurm" / "tensorboard"
    with shown(project, "alone") as server:
        assert len(list(links.iterdir())) == 1
        family = {pid: started_at(pid) for pid in descendants(server.process.pid)}
        assert family
        server.process.send_signal(end)
        out, err = server.process.communicate(timeout=30)
        assert (server.process.returncode, out, err) == (-9 if end == signal.SIGKILL else 0, "", "")
    wait_until(lambda: not any(started_at(pid) == start for pid, start in family.items()))
    if end == signal.SIGKILL:
        # the next one clears up after it
        with linked_in(project, []):
            assert len(list(links.iterdir())) == 1
    assert list(links.iterdir()) == []
    assert (project.runs / "alone" / "tensorboard" / "events.out.tfevents.1.h").exists()


def test_output_names_shown_runs_address_and_tunnel(project: Project) -> None:
    for number in range(22):
        curves(ended_run(project.runs / f"run-{number:02d}"))
    process = project.start("tensorboard")
    try:
        assert process.stdout is not None
        said = [process.stdout.readline().rstrip() for _ in range(6)]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert said[0] == "runs      20 runs; the newest 20 of 22 runs and groups, name others to see them"
    assert said[2].startswith("address   http://127.0.0.1:")
    assert said[3].startswith("tunnel    ssh -N -L ")
    assert said[5] == "-- Ctrl-C ends it"
    assert process.returncode == 0


def test_port_that_is_taken_meanwhile_is_skipped(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, linked_in(project, []) as links:
        monkeypatch.setattr(tensorboard_server, "FIRST_PORT", taken.getsockname()[1])
        # as it looked a moment before
        monkeypatch.setattr(tensorboard_server, "_is_free", lambda port: True)
        server = tensorboard_server.Server(links)
        try:
            assert server.port > tensorboard_server.FIRST_PORT
        finally:
            server.stop()


def test_server_survives_hangup_if_sighup_is_ignored(project: Project) -> None:
    curves(ended_run(project.runs / "alone"))
    with shown(project, "alone", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.get("runs") is not None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=30) == 0


# -- what does not start


def refused(project: Project, *words: str) -> tuple[int, str]:
    done = project.call("tensorboard", *words)
    assert done.stderr.count("\n") == 1, done.stderr
    return done.returncode, done.stderr


def test_requested_port_in_use_is_an_error(project: Project) -> None:
    curves(ended_run(project.runs / "alone"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = refused(project, "alone", "--port", str(port))
    assert (code, f"--port {port}: it is in use on this machine: leave --port out" in said) == (2, True)


def test_failed_start_of_tensorboard_is_explained(project: Project) -> None:
    curves(ended_run(project.runs / "alone"))
    broken = project.write("broken/tensorboard/__init__.py", "raise ImportError('no module named pkg_resources')")
    project.environ["PYTHONPATH"] = str(broken.parent.parent)
    code, said = refused(project, "alone")
    assert code == 1
    assert "TensorBoard did not start: ImportError: no module named pkg_resources: try `" in said


def test_server_that_ends_by_itself_is_an_error(project: Project) -> None:
    curves(ended_run(project.runs / "alone"))
    with shown(project, "alone") as server:
        (pid,) = [pid for pid in descendants(server.process.pid) if "tensorboard.main" in command(pid)]
        os.kill(pid, signal.SIGKILL)
        _, err = server.process.communicate(timeout=30)
    assert server.process.returncode == 1
    assert "TensorBoard ended with exit code -9" in err


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_no_runs_and_unknown_runs_are_errors(project: Project) -> None:
    code, said = refused(project)
    assert (code, "there are no runs yet: submit one" in said) == (2, True)
    code, said = refused(project, "nothing")
    assert (code, "there is no run 'nothing'" in said) == (2, True)


# -- links


@contextlib.contextmanager
def linked_in(project: Project, sources: list[Source]) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", project.environ["XDG_STATE_HOME"])
        with linked(Choice(sources, 0)) as links:
            yield links.folder


def test_clashing_names_get_distinct_links_and_runs_stay_untouched(project: Project) -> None:
    folders = [project.folder / name for name in ("one", "two", "three", "three/below")]
    for folder in folders:
        folder.mkdir()
    sources = [
        Source(name, "place", folder) for name, folder in zip(["x", "x", "x/y", "x/y/below"], folders, strict=True)
    ]
    with linked_in(project, sources) as links:
        found = {str(path.relative_to(links)): path.resolve() for path in links.iterdir()}
    # what is below another one is seen with it
    assert found == {"x": folders[0], "x-2": folders[1], "x-y": folders[2]}
    assert [list(folder.iterdir()) for folder in folders[:2]] == [[], []]


def test_unwritable_state_home_is_an_error(project: Project) -> None:
    project.environ["XDG_STATE_HOME"] = str(project.write("file", ""))
    with pytest.raises(UserError, match="set XDG_STATE_HOME to a folder of your own"), linked_in(project, []):
        pass
