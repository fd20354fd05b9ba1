"""A compilation by torch's compiler, as the watchdog of its rank and those of others see it."""

from __future__ import annotations

import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_slurm.rank import compiling
from mgpu_slurm.rank.compiling import Compilation, OtherCompilations, compiling_frame
from tests.support import wait_until


class Backend:
    """Compiles for as long as a test wants, and in the way it wants."""

    def __init__(self) -> None:
        self.computes = self.starts_process = False
        self.is_over = threading.Event()

    def __deepcopy__(self, memo: object) -> Backend:
        # Lightning, once a test has imported it, copies what torch.compile is given
        return self

    def __call__(self, graph: Any, inputs: Any) -> Any:
        while not self.is_over.is_set():
            if self.computes:
                sum(range(1000))
            elif self.starts_process:
                self.run_process()
            else:
                self.is_over.wait(0.01)
        return graph

    def run_process(self) -> None:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
            self.is_over.wait()
            process.kill()


def increment(inputs: torch.Tensor) -> torch.Tensor:
    """Compiled here only: torch compiles a function a limited number of times in a process."""
    return inputs + 1


@contextmanager
def compilation() -> Iterator[Backend]:
    backend = Backend()
    compiled = torch.compile(increment, backend=backend)
    thread = threading.Thread(target=lambda: compiled(torch.zeros(1, 2)))
    thread.start()
    try:
        wait_until(lambda: compiling_frame(threading.get_ident()) is not None)
        yield backend
    finally:
        backend.is_over.set()
        thread.join()


@pytest.mark.parametrize("how", ["computes", "starts_process"])
def test_compilation_makes_progress_while_something_computes(how: str, tmp_path: Path) -> None:
    mark = tmp_path / "2-10.compiling"
    others = OtherCompilations(tmp_path / "2-1.compiling", rank=1)
    (tmp_path / "1-3.compiling").write_text("of an earlier attempt")
    seen = Compilation(mark, mark_every=0.0)
    assert not seen.makes_progress()
    assert not others.make_progress()
    with compilation() as backend:
        assert not others.make_progress()
        seen.makes_progress()
        setattr(backend, how, True)
        wait_until(seen.makes_progress, pause=0.3)
        assert others.make_progress()
        # nothing new
        assert not others.make_progress()
        wait_until(lambda: seen.makes_progress() and others.make_progress(), pause=0.3)
    assert not seen.makes_progress()
    assert not mark.exists()
    assert not others.make_progress()


def test_compilation_that_waits_makes_no_progress_and_its_place_is_known(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "SAID_AFTER", 0.0)
    seen = Compilation(None, mark_every=0.0)
    with compilation():
        seen.makes_progress()
        # the thread may just have come there
        wait_until(lambda: not seen.makes_progress(), pause=0.3)
        seen.makes_progress()
        frame = compiling_frame(threading.get_ident())
        assert frame is not None
        assert any(each.name == "__call__" for each in traceback.StackSummary.extract(traceback.walk_stack(frame)))
    assert compiling_frame(threading.get_ident()) is None
    told = capfd.readouterr().out.splitlines()
    assert [line.startswith("mgpu_slurm: compiling the model: ") for line in told] == [True]
