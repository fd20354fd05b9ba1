"""Names, values and paths that a shell would take for something else, on a real SLURM."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.on_slurm.cluster import Cluster
from tests.support import Project, log, make_project

HOSTILE = "it's $(touch pwned) `touch pwned` \"; touch pwned; # \\ * ~"
SCRIPT = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['VALUE'], os.getcwd()]))"


def test_shell_metacharacters_reach_the_job_unchanged(cluster: Cluster, tmp_path: Path) -> None:
    # a folder whose name sbatch can log to: it takes no backslash
    base = tmp_path / HOSTILE.replace("\\", "").replace("/", "")
    base.mkdir()
    project: Project = make_project(base)
    project.environ |= cluster.environ
    project.executor = "slurm"
    project.write("mgpu.yaml", yaml.safe_dump({"clusters": {"testbed": {"environment": {"VALUE": HOSTILE}}}}))
    words = ("--gpus-per-node", "0", "--sbatch", f"comment={HOSTILE}")
    run, facts = project.run(*words, "--", "python", "-c", SCRIPT, HOSTILE, "$VALUE")
    assert facts["state"] == "COMPLETED", log(run, 0)
    arguments, value, place = json.loads(log(run, 0))
    assert (arguments, value) == ([HOSTILE, "$VALUE"], HOSTILE)
    assert place == str(run / "code")
    assert cluster.job(facts["job_id"])["Comment"].startswith(HOSTILE)
    assert not list(tmp_path.rglob("pwned"))
