"""Changes at a resume: which are refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target, read_spec
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.run_folder.records import update_state
from mgpu_slurm.submission.resume_overrides import Change, applied


@pytest.fixture
def group(tmp_path: Path) -> RunFolder:
    """Runs of which the first has completed, and the others have done 100 and 200 steps."""
    folder = RunFolder(tmp_path / "group")
    folder.create()
    Spec("group", Target(function="train:train"), "local", Resources(), config={"seed": 0}, tasks=3).write(folder)
    update_state(folder, run="group", tasks=3)
    for task, (state, step) in enumerate([("COMPLETED", 50), ("FAILED", 100), ("FAILED", 200)]):
        member = folder.of_task(task)
        member.create_task()
        update_state(member, run=f"group/{task}", state=state, step=step)
    return folder


def test_profile_of_steps_that_every_run_has_done_is_refused(group: RunFolder) -> None:
    words = "--profile 90-99: the run has done 100 steps: name later ones, such as 110-113"
    with pytest.raises(UserError, match=words), applied(group, Change(profile="90-99")):
        pass
    assert read_spec(group).profile is None


def test_profile_of_steps_that_one_run_will_do_is_accepted(group: RunFolder) -> None:
    with applied(group, Change(profile="150-151")):
        pass
    assert read_spec(group).profile == "150-151"
