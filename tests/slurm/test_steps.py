"""Steps of a job, as squeue lists them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.slurm import steps
from tests.support import UNKNOWN_JOB, shows

NO_STEPS = "echo 'Job step 42. not found'; exit 1"


def test_internal_steps_of_slurm_are_ignored() -> None:
    listed = "42.extern|n[1-2]|extern\n42.0|n[1-2]|a|b\n42.12|n2|digits-1/3\n42.interactive|n1|interactive\n"
    found = steps.parse_steps(listed)
    assert [(step.step_id, step.name, step.nodes) for step in found] == [
        ("42.0", "a|b", ("n1", "n2")),
        ("42.12", "digits-1/3", ("n2",)),
    ]


SHOWN = """\
StepId=42.extern UserId=0 State=RUNNING NodeList=n[1-2] Name=extern Network=(null)
StepId=42.3 UserId=0 StartTime=2026-05-01T12:00:00 NodeList=n[1-2] Nodes=2 CPUs=2 Tasks=2 Name=mine Network=(null)
"""


def test_steps_hidden_from_squeue_are_found_with_scontrol(answers: Callable[[str, str], None]) -> None:
    answers("squeue", shows("42.batch|n1|batch\n42.extern|n[1-2]|extern\n"))
    answers("scontrol", shows(SHOWN))
    assert steps.steps("42") == [steps.Step("42.3", "mine", ("n1", "n2"))]
    for said in ("Job step 42. not found", "No job steps in the system"):
        answers("scontrol", f"echo '{said}'; exit 1")
        assert steps.steps("42") == []
    # one that does not answer does not say that there are none
    answers("scontrol", "exit 1")
    with pytest.raises(ClusterError):
        steps.steps("42")


def test_signal_goes_to_the_step_of_the_run(answers: Callable[[str, str], None], tmp_path: Path) -> None:
    answers("scontrol", NO_STEPS)
    answers("squeue", shows("42.0|n1|other\n42.3|n2|mine\n"))
    answers("scancel", f'echo "$@" >> {tmp_path}/sent')
    assert steps.signal_ranks("42", "mine", "TERM")
    assert (tmp_path / "sent").read_text() == "--signal=TERM 42.3\n"
    assert not steps.signal_ranks("42", "gone", "TERM")
    assert steps.busy("42") == {"n1": 1, "n2": 1}
    answers("squeue", UNKNOWN_JOB)
    assert not steps.signal_ranks("42", "mine", "TERM")


LEFT = "42_3.batch|n1|batch\n42_3.0|n[1-2]|mine\n42_3.1|n1|bash\n"


def test_leftover_step_is_killed_and_waited_for(answers: Callable[[str, str], None], tmp_path: Path) -> None:
    """The signal goes to the step: with the job's id it would end the job, in which others have steps."""
    answers("squeue", f"test $(wc -l < {tmp_path}/sent) = 2 || {{ {shows(LEFT)}\n}}")
    answers("scontrol", NO_STEPS)
    answers("scancel", f'echo "$@" >> {tmp_path}/sent; exit 1')
    (tmp_path / "sent").touch()
    steps.end("42_3", "mine")
    assert (tmp_path / "sent").read_text() == 2 * "--signal=KILL 42_3.0\n"


def test_step_that_cannot_be_ended_is_an_error(
    answers: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "END_SECONDS", 0.1)
    answers("squeue", shows(LEFT))
    answers("scancel", "exit 0")
    with pytest.raises(ClusterError, match=r"step 42_3\.0 is still there"):
        steps.end("42_3", "mine")
