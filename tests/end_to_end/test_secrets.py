"""A password of the environment goes to the database, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.postgresql import Server
from tests.support import Project

SECRET = "correct-horse-battery-staple"
JOB = """
    from pathlib import Path

    def train(run, config: dict):
        run.report(1, score=config["x"])
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if b"correct-horse" in path.read_bytes():
                    raise RuntimeError(f"{path} shows the password")
            except OSError:
                pass
"""


def test_database_password_is_in_no_file_output_or_command_line(project: Project, postgresql: Server) -> None:
    postgresql.query(f"CREATE ROLE secretive SUPERUSER LOGIN PASSWORD '{SECRET}'")
    url = postgresql.url(postgresql.new_database(), "x").replace("postgres:x", "secretive:${DATABASE_PASSWORD}")
    project.environ["DATABASE_PASSWORD"] = SECRET
    project.write("job.py", JOB)
    sweep = {
        "study": "study",
        "job": "job.py",
        "metric": "score",
        "storage": url,
        "trials": 3,
        "space": {"x": {"float": [0.0, 1.0]}},
    }
    project.write("sweep.yaml", yaml.safe_dump(sweep))
    shown = project.call("sweep", "sweep.yaml", "--executor", "local", "--dry-run")
    done = project.call("sweep", "sweep.yaml", "--executor", "local")
    assert done.returncode == 0, done.stdout + done.stderr
    looks = [project.call(*words) for words in (("status", "study"), ("best", "study"), ("why", "study"))]
    for each in (shown, done, *looks):
        assert SECRET not in each.stdout + each.stderr
    places = [project.folder, Path(project.environ["XDG_STATE_HOME"]), Path(project.environ["XDG_CONFIG_HOME"])]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert project.runs / "study" / "sweep.yaml" in files
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
