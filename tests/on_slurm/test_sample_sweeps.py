"""The sweeps in sweeps/ as job arrays of a real SLURM, as a user starts them."""

from __future__ import annotations

import shutil

import pytest

from mgpu_slurm.run_folder.layout import RunFolder
from tests.on_slurm.test_sweeps import states, workers
from tests.support import REPOSITORY, Project


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["digits_asha", "digits_pbt", "digits_front", "digits_fsdp"])
def test_sample_sweep_runs_as_an_array(slurm_project: Project, name: str) -> None:
    project = slurm_project
    for folder in ("jobs", "sweeps"):
        shutil.copytree(REPOSITORY / folder, project.folder / folder, ignore=shutil.ignore_patterns("__pycache__"))
    # longer than `call` waits, on a machine that does something else too
    followed = project.start("sweep", f"sweeps/{name}.yaml", "resources.gpus-per-node=0", "--follow")
    shown, errors = followed.communicate(timeout=500)
    assert followed.returncode == 0, shown + errors
    sweep = RunFolder(project.runs / name.replace("_", "-"))
    (job,) = {str(state.job_id).partition("_")[0] for state in workers(sweep)}
    assert [state.job_id for state in workers(sweep)] == [f"{job}_{number}" for number in range(len(workers(sweep)))]
    assert "COMPLETE" in states(sweep)
    assert not {*states(sweep)} & {"FAIL", "RUNNING"}
    best = "front " if name == "digits_front" else "best "
    assert project.call("best", sweep.run).stdout.startswith(best)
