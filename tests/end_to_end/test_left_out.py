"""Programs and data that the run's code lacks are named at submission, and by `why`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import Project, log, make_project

READS = """
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser()
    parser.add_argument("--data")
    Path(parser.parse_args().data).read_text()
"""

JOB = """
    from dataclasses import dataclass
    from pathlib import Path

    @dataclass
    class Config:
        text: str = ""
        path: Path = Path("nowhere")

    def train(run, config: Config):
        (Path(__file__).parent / config.text).read_text()
"""

ADVICE = "data/ is not in the snapshot: use its absolute path or $MGPU_PROJECT"
DRY_RUN = ("submit", "--executor", "slurm", "--gpus-per-node", "0", "--dry-run")
PLAIN = ("--cluster", "plain")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A git repository that ignores its data and its virtual environment."""
    project = make_project(tmp_path_factory.mktemp("left_out"))
    project.write("reads.py", READS)
    project.write("job.py", JOB)
    project.write(".gitignore", "data/\n.venv/\nruns/\n")
    project.write("data/digits/train.txt", "3")
    project.write("mgpu.yaml", "clusters: {plain: {}, site: {setup: ['module load tools']}}\n")
    tool = project.folder / ".venv" / "bin" / "python"
    tool.parent.mkdir(parents=True)
    # as `python -m venv --without-pip` makes it, in less time
    tool.symlink_to(sys.executable)
    subprocess.run(["git", "init", "--quiet"], cwd=project.folder, check=True)
    return project


def test_git_ignored_program_runs_and_git_ignored_data_is_noted(project: Project) -> None:
    words = ("--", ".venv/bin/python", "reads.py", "--data=data/digits/train.txt")
    done = project.call("submit", "--executor", "local", *words)
    assert done.returncode == 1
    tool = project.folder / ".venv" / "bin" / "python"
    lines = done.stdout.splitlines()
    assert f"command   .venv/bin/python is not in the snapshot: it runs as {tool}" in lines
    assert f"target    {tool} reads.py --data=data/digits/train.txt" in lines
    assert f"note      {ADVICE}" in lines
    (facts,) = project.json("status", "reads")
    folder = project.runs / facts["run"]
    assert "FileNotFoundError" in log(folder, 0)
    (known,) = project.json("why", facts["run"])
    assert known["why"]["fix"] == ADVICE


@pytest.mark.parametrize("options", ["-c", "-euc", "-l -c", "-eu -o pipefail -c"])
def test_shell_script_text_is_searched_for_git_ignored_paths(options: str, project: Project) -> None:
    text = "cd . && .venv/bin/python reads.py --data='data/digits/train.txt' | tee reads.log"
    done = project.call(*DRY_RUN, *PLAIN, "--", "bash", *options.split(), text)
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stdout.splitlines() if line.startswith("note ")]
    assert notes == [f"note      {ADVICE.replace('data/', name)}" for name in (".venv/", "data/")]


def test_git_ignored_data_in_a_text_config_value_is_noted(project: Project) -> None:
    done = project.call("submit", "--executor", "local", "job.py", "text=data/digits/train.txt", "path=data/digits")
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("note")] == [f"note      {ADVICE}"]
    # the job looked for it next to its own file
    assert f"fix       {ADVICE}" in project.call("why", "job").stdout
    absolute = project.folder / "data" / "digits" / "train.txt"
    quiet = project.call(*DRY_RUN, *PLAIN, "job.py", f"text={absolute}", "path=data")
    assert (quiet.returncode, "note " in quiet.stdout) == (0, False)


@pytest.mark.parametrize("flags", [("--cluster", "site"), ("--cluster", "plain", "--sbatch", "container-image=ubuntu")])
@pytest.mark.parametrize(
    ("program", "problem"), [("no-such-tool", "is not on PATH"), ("/opt/no/such/tool", "does not exist")]
)
def test_missing_program_is_only_a_warning_if_the_job_may_provide_it(
    project: Project, flags: tuple[str, ...], program: str, problem: str
) -> None:
    done = project.call(*DRY_RUN, *flags, "--", program, "x")
    assert done.returncode == 0, done.stderr
    assert f"command   {program} {problem}" in done.stdout
    assert "unless the job's setup or container provides it" in done.stdout


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("no-such-tool", "command no-such-tool is not on PATH: install it, or give its path"),
        ("reads.py", "command reads.py is not on PATH: write ./reads.py for the file here"),
        ("./no/such/tool", "command ./no/such/tool does not exist: check the path"),
        ("/opt/no/such/tool", "command /opt/no/such/tool does not exist: check the path"),
        ("./reads.py", "command ./reads.py is not executable: chmod +x, or name its interpreter"),
        ("./data", "command ./data is a folder: name the program in it"),
    ],
)
@pytest.mark.parametrize("executor", ["local", "slurm"])
def test_program_that_cannot_run_is_refused_with_advice(
    project: Project, executor: str, program: str, says: str
) -> None:
    before = set(project.runs.glob("*"))
    done = project.call("submit", "--executor", executor, *PLAIN, "--gpus-per-node", "0", "--dry-run", "--", program)
    assert (done.returncode, done.stderr) == (2, f"mgpu-slurm: {says}\n")
    assert set(project.runs.glob("*")) == before


def test_existing_programs_are_left_unchanged(project: Project) -> None:
    runs = project.write("tool.sh", "#!/bin/sh\ntrue\n")
    runs.chmod(0o755)
    for program in ("./tool.sh", "sh", "/bin/sh", "python", str(Path(sys.executable)), "tool-{seed}"):
        done = project.call(*DRY_RUN, *PLAIN, "--seeds", "2", "--", program, "{seed}")
        assert done.returncode == 0, done.stderr
        assert f"target    {program} '{{seed}}'" in done.stdout.replace("'tool-{seed}'", "tool-{seed}")
        assert "command " not in done.stdout
