"""Nothing of a spec reaches a shell as anything but itself, whatever it holds."""

from __future__ import annotations

import string
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mgpu_slurm.core import interpreter
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm.script import render
from tests.slurm.test_script import as_sbatch_reads, make

SPECIAL = " \t\n\r\\\"'`$(){}[]<>|&;#!*?~=%^-,:@\x01\x7f"
TEXT = st.text(st.sampled_from(string.ascii_letters + SPECIAL + SPECIAL + "ü€"), max_size=30)
"""Of characters that mean something to a shell or to sbatch, mostly."""

PROBE = '#!/bin/sh\nprintf "%s\\0" "$@" "$VALUE"\n'
"""In the place of Python: tells what it was started with."""


def words(script: str, folder: Path) -> list[str]:
    """What bash makes of the last line of a script, run in a folder in which nothing may appear."""
    before = sorted(folder.rglob("*"))
    done = subprocess.run(["bash"], input=script.encode(), capture_output=True, cwd=folder)
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(folder.rglob("*")) == before
    return done.stdout.decode().split("\0")[:-1]


@settings(max_examples=60)
@given(value=TEXT, name=TEXT.filter(lambda name: name.strip(".") != "" and "\0" not in name))
@example(value="$(touch pwned)", name="$(touch pwned)")
@example(value="'; touch pwned; '", name="x\ntouch pwned\n")
@example(value="\\", name="-n")
def test_bash_receives_values_and_paths_unchanged(value: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        here = Path(made)
        python = here / f"python{name}"
        python.write_text(PROBE)
        python.chmod(0o755)
        spec = make(str(python), environment={"VALUE": value})
        # sbatch cannot log to a folder with some of them, which is refused
        script = render(spec, RunFolder(here / "runs" / spec.run), "mgpu-0123")
        told = words(script, here)
        started = interpreter.command(str(python), "mgpu_slurm.job", "batch")[1:]
        assert told[: len(started)] == started
        rank = interpreter.command(str(python), "mgpu_slurm.job", "rank")
        assert told[-2 - len(rank) : -2] == rank
        assert told[-1] == value


@settings(max_examples=300)
@given(value=TEXT, option=TEXT)
@example(value="a\n#SBATCH --uid=0", option="mail-user")
@example(value='" --uid=0 "', option="mail-user")
def test_sbatch_values_are_unchanged_or_rejected(value: str, option: str) -> None:
    if not value:
        return
    plain = _options(make())
    assert plain is not None
    for spec in (make(resources={"account": value}), make(resources={"sbatch": {"comment": value}})):
        options = _options(spec)
        assert options is not None or not value.isprintable()
        if options is not None:
            (more,) = set(options) - set(plain)
            assert more in (f"--account={value}", f"--comment={value} mgpu-0123")
    options = _options(make(resources={"sbatch": {option: value}}))
    if options is not None and option != "comment":
        assert set(options) - set(plain) == {f"--{option}={value}"}


def _options(spec: Spec) -> list[str] | None:
    """As sbatch reads them; None where they are refused."""
    try:
        return as_sbatch_reads(_rendered(spec))
    except UserError:
        return None


@settings(max_examples=100)
@given(name=TEXT)
def test_invalid_variable_name_is_rejected(name: str) -> None:
    if name.isidentifier() and name.isascii():
        return
    with pytest.raises(UserError):
        _rendered(make(environment={name: "x"}))


def _rendered(spec: Spec) -> str:
    return render(spec, RunFolder(Path("/runs") / spec.run), "mgpu-0123")
