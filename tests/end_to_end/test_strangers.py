"""A stranger who writes to the rendezvous of a run ends the attempt, and `why` says so; nobody reads its secret."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.support import Project, log, processes_of, wait_until

JOB = """
    import os, time
    from pathlib import Path

    import torch
    from torch.utils.data import TensorDataset


    def train(run, config):
        data = run.loader(TensorDataset(torch.zeros(4, 1)), batch_size=2)
        for _ in run.restore(data=data).epochs(100_000):
            for batch in data:
                time.sleep(0.01)
                if run.is_main and not Path(run.folder, "port").exists():
                    Path(run.folder, ".port").write_text(os.environ["MASTER_PORT"])
                    Path(run.folder, ".port").rename(Path(run.folder, "port"))
"""


def forge(port: Path, *names: str) -> str:
    """Write to a run's rendezvous as a process does that knows its port, and nothing else.

    Returns:
        What names there begin with.
    """
    stranger = TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    prefix = "mgpu/default/0//mgpu_slurm 0/"
    for name in names:
        stranger.set(prefix + name, "ring")
    return prefix


def secret_is_in(folder: Path, secret: bytes) -> list[str]:
    """The files of a run and the command lines and environments of its processes that have it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    files += [Path(f"/proc/{pid}/{name}") for pid in processes_of(folder) for name in ("cmdline", "environ")]
    return [str(path) for path in files if path.exists() and secret in path.read_bytes()]


def test_forged_rendezvous_value_fails_the_run_and_is_reported_by_why(project: Project) -> None:
    project.write("job.py", JOB)
    project.write("mgpu.yaml", "clusters: {local: {readable-by: group}}\n")
    folder = project.submit("job.py", "--nodes", "2")
    wait_until(lambda: (folder / "port").exists())
    # also where the group may read a run, it may not read this
    secret = folder / ".secret-1"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert (folder / "spec.yaml").stat().st_mode & 0o040
    assert secret_is_in(folder, secret.read_bytes()) == [str(secret)]
    prefix = forge(folder / "port", "bell/0/1")
    facts = project.finish(folder)
    assert (facts["state"], facts["attempts"]) == ("FAILED", 1)
    forged = f"the rendezvous has a value of '{prefix}bell/0/1' that no rank of this attempt wrote"
    assert forged in facts["reason"]
    assert forged in log(folder, 1)
    told = project.call("why", folder.name).stdout
    assert "a process that is not a rank of the run wrote to its rendezvous" in told
    assert "docs/security.md" in told
    assert not secret.exists()


@pytest.mark.long
def test_forged_rendezvous_value_is_not_counted_against_the_trial(project: Project) -> None:
    """Its worker ends and is not restarted, and the sampler learns nothing from the trial."""
    project.write("job.py", JOB)
    sweep = "{study: s, job: job.py, metric: score, trials: 1, workers: 1, resources: {nodes: 2},"
    project.write("sweep.yaml", f"{sweep} space: {{lr: {{float: [0.0, 1.0]}}}}}}")
    assert project.call("sweep", "sweep.yaml", "--executor", "local", "--no-follow").returncode == 0
    trial = project.runs / "s" / "trials" / "0"
    wait_until(lambda: (trial / "port").exists())
    # what rank 0 reads itself in the job function, when a checkpoint is written
    forge(trial / "port", *(f"saves 1/{number}/{rank}" for number in range(1, 1000) for rank in range(2)))
    assert project.call("wait", "s", "--timeout", "90").returncode == 1
    (worker,) = project.json("status", "s/0")
    assert (worker["state"], worker["attempts"]) == ("FAILED", 1)
    assert "that no rank of this attempt wrote" in worker["reason"]
    assert "a process that is not a rank of the run wrote to its rendezvous" in project.call("why", "s").stdout
    # it can be trained again
    assert project.call("resume", "s", "--no-follow").returncode == 0
    wait_until(lambda: (trial / "logs" / "2-0.log").exists())
    project.call("cancel", "s")
    project.call("wait", "s", "--timeout", "90")
    assert "mgpu:own_fault" not in (project.runs / "s" / "study.journal").read_text()
