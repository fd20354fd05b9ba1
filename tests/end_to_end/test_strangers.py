"""A stranger who writes to the rendezvous of a run ends the attempt, and `why` says so; nobody reads its secret."""

from __future__ import annotations

from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.support import Project, log, processes_of, wait_until

JOB = """
    import os, time
    from pathlib import Path

    import torch
    from torch.utils.data import TensorDataset


    def train(run, config):
        for _ in range(100_000):
            for batch in run.loader(TensorDataset(torch.zeros(4, 1)), batch_size=2):
                time.sleep(0.01)
                if run.is_main and not Path(run.folder, "port").exists():
                    Path(run.folder, ".port").write_text(os.environ["MASTER_PORT"])
                    Path(run.folder, ".port").rename(Path(run.folder, "port"))
"""


def secret_is_in(folder: Path, secret: bytes) -> list[str]:
    """The files of a run and the command lines and environments of its processes that have it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    files += [Path(f"/proc/{pid}/{name}") for pid in processes_of(folder) for name in ("cmdline", "environ")]
    return [str(path) for path in files if path.exists() and secret in path.read_bytes()]


def test_forgery_ends_the_attempt_and_is_told_by_why(project: Project) -> None:
    project.write("job.py", JOB)
    project.write("mgpu.yaml", "clusters: {local: {readable-by: group}}\n")
    folder = project.submit("job.py", "--nodes", "2")
    wait_until(lambda: (folder / "port").exists())
    # also where the group may read a run, it may not read this
    secret = folder / ".secret-1"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert (folder / "spec.yaml").stat().st_mode & 0o040
    assert secret_is_in(folder, secret.read_bytes()) == [str(secret)]
    # a process that knows the port, and nothing else
    stranger = TCPStore("127.0.0.1", int((folder / "port").read_text()), is_master=False)
    prefix = "mgpu/default/0//mgpu_slurm 1/"
    stranger.set(f"{prefix}bell/0/1", "ring")
    facts = project.finish(folder)
    assert (facts["state"], facts["attempts"]) == ("FAILED", 1)
    forged = f"the rendezvous has a value of '{prefix}bell/0/1' that no rank of this attempt has written"
    assert forged in facts["reason"]
    assert forged in log(folder, 1)
    told = project.call("why", folder.name).stdout
    assert "a process that is no rank of the run wrote to its rendezvous" in told
    assert "docs/security.md" in told
    assert not secret.exists()
