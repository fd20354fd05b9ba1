"""Every wrong call or file gets one line that names the value and the fix, the right exit code, and no run folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import Project, make_project

LOCAL = ("submit", "--executor", "local", "--no-follow")
ASK_ONLY = ("submit", "--executor", "slurm", "--gpus-per-node", "0", "--dry-run")
"""The same checks where no local ranks are wanted."""

TRAIN = """
    from dataclasses import dataclass, field
    from pathlib import Path

    number = 3

    @dataclass
    class Model:
        width: int = 8

    @dataclass
    class Config:
        lr: float = 0.1
        steps: int = 3
        model: Model = field(default_factory=Model)

        def __post_init__(self):
            if self.lr < 0:
                raise ValueError(f"lr={self.lr} is negative: give one above 0")
            if self.steps == 13:
                raise KeyError("thirteen")

    @dataclass
    class Needs:
        data: Path

    def train(run, config: Config): pass
    def needs(run, config: Needs): pass
    def alone(run): pass
    def odd(run, config: int): pass
"""

FILES: dict[str, str | bytes] = {
    "train.py": TRAIN,
    "lacks.py": "import os\nimport nothing_of_that_name\ndef train(run, config): pass\n",
    "syntax.py": "def train(run, config):\n    return 1 +\n",
    "exits.py": "import sys\nsys.exit(3)\ndef train(run, config): pass\n",
    "dies.py": "import os\nos._exit(0)\ndef train(run, config): pass\n",
    "outer.py": "import sibling\ndef train(run, config): pass\n",
    "sibling.py": "zero = 0\nratio = 1 / zero\n",
    "two_lines.py": "raise RuntimeError('first line\\nsecond line')\ndef train(run, config): pass\n",
    "broken.yaml": "lr: 0.1\nmodel: {width: 3\nsteps: 2\n",
    "twice.yaml": "lr: 1\nlr: 2\n",
    "list.yaml": "- 1\n",
    "latin1.yaml": "name: caf\xe9\n".encode("latin-1"),
    "mistake.yaml": "lrr: 1\n",
}


@dataclass(frozen=True)
class Bad:
    """A wrong call."""

    words: tuple[str, ...]
    says: tuple[str, ...]
    """What the one line has to contain: the value, and the fix."""
    code: int = 2
    files: dict[str, str | bytes] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)


def local(words: str, *says: str, **more: object) -> Bad:
    return Bad((*LOCAL, *words.split()), says, **more)  # type: ignore[arg-type]


def asked(words: str, *says: str, **more: object) -> Bad:
    return Bad((*ASK_ONLY, *words.split()), says, **more)  # type: ignore[arg-type]


def imported(words: str, *says: str, **more: object) -> Bad:
    """What the job's source does not tell."""
    return asked(f"--check {words}", *says, **more)


def call(words: str, *says: str, **more: object) -> Bad:
    return Bad(tuple(words.split()), says, **more)  # type: ignore[arg-type]


def cluster_file(text: str, *says: str) -> Bad:
    return local("train", "mgpu.yaml", *says, files={"mgpu.yaml": text})


BAD = {
    # the target
    "unknown target": local("trainn", "'trainn'", "did you mean 'train'"),
    "unknown target in a package": asked("pack.module", "'pack.module'", "known: ", "train"),
    "unknown function": asked("train:traim", "'traim'", "did you mean 'train'"),
    "missing job file": local("trian.py", "'trian.py'", "did you mean 'train.py'"),
    "no function name": local("train:", "'train:'", "package.module:function"),
    "not a function": imported("train:number", "'train:number'", "int", "train(run, config)"),
    "not callable with run and config": local("train:alone", "'train:alone'", "alone(run)", "(run, config)"),
    "required value missing": asked("train:odd", "'config' has no default", "add config=VALUE"),
    "missing import": imported("lacks", "'lacks'", "lacks.py:2", "nothing_of_that_name"),
    "syntax error": asked("syntax", "'syntax'", "syntax.py:2", "SyntaxError"),
    "error in a sibling module": imported("outer", "'outer'", "sibling.py:2", "ZeroDivisionError: division by zero"),
    "error message of two lines": imported("two_lines", "two_lines.py:1", "RuntimeError: first line"),
    "sys.exit on import": imported("exits", "'exits'", "exits.py:2", "SystemExit: 3"),
    "process exits on import": imported("dies", "'dies:train'", "import it by hand"),
    "file that is not a Python module": local(
        "notes", "'notes'", "neither a Python file", "after --", files={"notes": ""}
    ),
    "missing script": local("-- python trian.py", "python trian.py", "has no trian.py", "git-ignored"),
    "command as one word": Bad((*ASK_ONLY, "--", "python -V"), ("'python -V'", "quotes")),
    "two targets": local("train other", "'train'", "'other'", "other=VALUE", "put a command after"),
    "target and command": local("train -- echo", "(train)", "give only one"),
    "no target": local("", "no target", "mgpu_slurm init"),
    "no command after --": local("--", "no target", "mgpu_slurm init"),
    # its config
    "config as a flag": local("--lr 0.1", "--lr", "lr=VALUE"),
    "misspelled option": local("--node 2", "--node", "did you mean '--nodes'", "node=VALUE"),
    "command without options and --": local("python train.py", "'python' is a command", "submit -- python train.py"),
    "unknown key": local("train lrr=1", "'lrr'", "did you mean 'lr'"),
    "unknown nested key": asked("train model.widht=1", "'model.widht'", "did you mean 'width'"),
    "wrong type": asked("train lr=fast", "lr='fast'", "valid number"),
    "fraction for an integer": asked("train steps=1.5", "steps=1.5", "valid integer"),
    "value for a nested config": asked("train model=3", "model=3", "Model"),
    "missing required key": asked("train:needs", "'data'", "add data=VALUE"),
    "refused by __post_init__": imported("train lr=-1", "lr=-1.0 is negative", "give one above 0"),
    "crash in __post_init__": imported("train steps=13", "config of train:train", "train.py:", "KeyError: 'thirteen'"),
    "value that is not YAML": local("train lr=[1", "'lr=[1'", "quote it for the shell"),
    "override without a key": local("train =1", "'=1'", "key=value"),
    "config for a command": local("lr=1 -- echo", "'lr'", "after `--`"),
    "broken config file": local("train --config broken.yaml", "broken.yaml:3:6", "fix the YAML"),
    "duplicate key in the config file": local("train --config twice.yaml", "twice.yaml:2:1", "'lr'", "fix the YAML"),
    "list as config file": local("train --config list.yaml", "list.yaml", "expected `key: value` lines"),
    "config file not in UTF-8": local("train --config latin1.yaml", "'latin1.yaml'", "save it as UTF-8"),
    "missing config file": local("train --config none.yaml", "'none.yaml'", "check the path"),
    "folder as config file": local("train --config .", "'.'", "check the path"),
    "unknown key in the config file": asked("train --config mistake.yaml", "'lrr'", "did you mean 'lr'"),
    # the resources
    "zero nodes": local("train --nodes 0", "--nodes 0", "at least 1"),
    "nodes that are not a number": local("train --nodes two", "--nodes", "'two'", "submit --help"),
    "zero ranks per node": local("train --ntasks-per-node 0", "--ntasks-per-node 0", "at least 1"),
    "type of GPUs without a number": local("train --gpus-per-node a100", "--gpus-per-node a100", "as in a100:2"),
    "negative GPUs": local("train --gpus-per-node -1", "--gpus-per-node -1", "at least 0"),
    "more GPUs than available": local(
        "train --gpus-per-node 3", "--gpus-per-node 3", "this machine has 0", "0", environ={"CUDA_VISIBLE_DEVICES": ""}
    ),
    "negative time": local("train --time -5", "--time '-5'", "expected minutes or one of M:S"),
    "zero time": local("train --time 0", "--time '0'", "must be greater than 0"),
    "lead as long as the limit": local("train --time 2 --signal USR2@120", "120 s", "must be shorter"),
    "lead longer than the limit": local("train --time 1 --signal USR2@120", "120 s", "60 s", "must be shorter"),
    "lead without a limit": local("train --signal USR2@60", "'USR2@60'", "need a --time"),
    "unknown signal": local("train --signal HELLO", "'HELLO'", "use USR1 or USR2"),
    "signal that cannot be caught": local("train --signal KILL", "'KILL'", "use USR1 or USR2"),
    "lead that is not a number": local("train --time 5 --signal USR2@soon", "'USR2@soon'", "USR2@120"),
    "negative stuck-after": local("train --stuck-after -1", "--stuck-after -1", "0 for never"),
    "negative retries": local("train --retries -1", "--retries -1", "0 or more"),
    "negative requeues": local("train --max-requeues -1", "--max-requeues -1", "0 or more"),
    "own flag as an sbatch option": local("train --sbatch nodes=3", "'nodes=3'", "write --nodes 3 instead"),
    "sbatch option without a key": local("train --sbatch =3", "'=3'", "KEY=VALUE"),
    "slash in the name": local("train --name a/b", "'a/b'", "use letters"),
    "space in the name": Bad((*LOCAL, "train", "--name", "a b"), ("'a b'", "use letters")),
    "empty name": Bad((*LOCAL, "train", "--name", ""), ("''", "use letters")),
    "name with a parent folder": local("train --name ../a", "'../a'", "use letters"),
    "name too long": local(f"train --name {'x' * 101}", "x" * 101, "at most 100"),
    "unknown executor": local("train --executor moon", "'moon'", "auto, slurm, allocation or local"),
    "sbatch not on PATH": call(
        "submit --executor slurm train", "no sbatch", "--executor local", code=3, environ={"PATH": "/no-such-folder"}
    ),
    "unknown flag": local("train --nodez 2", "--nodez", "--nodes"),
    "command without --": local("python train.py --lr 0.1", "'--lr'", "a command goes after"),
    "script without a job function": local(
        "script.py", "no 'train'", "-- python script.py", files={"script.py": b"x = 1"}
    ),
    # the folders
    "runs folder below a file": local(
        "train", "train.py/runs'", "Not a directory", "set MGPU_RUNS", environ={"MGPU_RUNS": "train.py/runs"}
    ),
    "runs folder that cannot be created": local(
        "train", "'/proc/runs'", "cannot be written", "set MGPU_RUNS", environ={"MGPU_RUNS": "/proc/runs"}
    ),
    "snapshot over the limit": local(
        "train",
        "limit is 6.0 KB",
        "'large.bin' 9.0 KB, 'middle.bin' 2.0 KB",
        "raise snapshot-limit",
        files={
            "large.bin": b"x" * 9000,
            "middle.bin": b"x" * 2000,
            "mgpu.yaml": "clusters: {local: {snapshot-limit: 6KB}}\n",
        },
    ),
    # the cluster file
    "no cluster file": local("train --cluster hpc", "'hpc'", "mgpu.yaml"),
    "unknown cluster": local(
        "train --cluster hcp", "'hcp'", "did you mean 'hpc'", files={"mgpu.yaml": "clusters: {hpc: {}}\n"}
    ),
    "broken cluster file": cluster_file("clusters: [\n", "mgpu.yaml:2:1", "fix the YAML"),
    "unknown key in the cluster file": cluster_file("jobb: x\n", "'jobb'", "did you mean 'job'"),
    "unknown key of a cluster": cluster_file("clusters: {hpc: {flagz: {}}}\n", "'flagz'", "did you mean 'flags'"),
    "unknown flag of a cluster": cluster_file("clusters: {hpc: {flags: {nodez: 2}}}\n", "'nodez'", "'nodes'"),
    "negative time of a cluster": cluster_file("clusters: {hpc: {flags: {time: -5}}}\n", "'-5'", "minutes"),
    "snapshot limit that is not a size": cluster_file(
        "clusters: {hpc: {snapshot-limit: lots}}\n", "'lots'", "such as 100MB"
    ),
    "unknown readers": cluster_file("clusters: {hpc: {readable-by: all}}\n", "'all'", "'owner' or 'group'"),
    "setup that is not a list": cluster_file("clusters: {hpc: {setup: module load x}}\n", "setup", "expected a list"),
    "cluster that is a number": cluster_file("clusters: {hpc: 3}\n", "clusters.hpc=3", "expected a mapping"),
    # the other commands
    "status of an unknown run": call("status nope-1", "'nope-1'", "-m mgpu_slurm status"),
    "logs of an unknown run": call("logs nope-1", "'nope-1'", "-m mgpu_slurm status"),
    "logs without a run": call("logs", "missing RUN|TRIAL, such as @last", "logs --help"),
    "best without a study": call("best", "missing STUDY: ", "best --help"),
    "cancel of an unknown run": call("cancel nope-1", "'nope-1'", "-m mgpu_slurm status"),
    "wait for an unknown run": call("wait nope-1", "'nope-1'", "-m mgpu_slurm status"),
    "wait with an invalid timeout": call("wait nope-1 --timeout soon", "'soon'", "wait --help"),
    "resume of an unknown run": call("resume nope-1", "'nope-1'", "-m mgpu_slurm status"),
    "clean of an unknown run": call("clean nope-1", "'nope-1'", "-m mgpu_slurm status"),
    "init over existing files": call("init .", "train.py", "already exist", "choose another folder"),
    "unknown command": call("submitt", "'submitt'", "'submit'"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_project(tmp_path_factory.mktemp("bad"))
    _write(project, FILES)
    return project


@pytest.fixture
def prepared(base: Project) -> Iterator[Project]:
    """The project, with the files that a test adds taken away again."""
    before = set(base.folder.iterdir())
    yield base
    for path in set(base.folder.iterdir()) - before - {base.runs}:
        path.unlink()


def _write(project: Project, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        if isinstance(content, bytes):
            (project.folder / name).write_bytes(content)
        else:
            project.write(name, content)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_input_prints_a_one_line_error_and_creates_no_run(prepared: Project, bad: Bad) -> None:
    _write(prepared, bad.files)
    project = Project(prepared.folder, prepared.environ | bad.environ)
    done = project.call(*bad.words)
    assert done.returncode == bad.code, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("mgpu-slurm: ")
    for part in bad.says:
        assert part in line
    assert done.stdout == ""
    assert _entries(project.runs) == []


def _entries(runs: Path) -> list[Path]:
    return list(runs.iterdir()) if runs.exists() else []


def test_debug_flag_prints_the_traceback_and_the_error(base: Project) -> None:
    done = base.call("submit", "--debug", "--executor", "local", "train", "--nodes", "0")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "--nodes 0: expected a whole number of at least 1" in done.stderr.splitlines()[-1]


def test_no_arguments_print_the_help(base: Project) -> None:
    done = base.call()
    assert (done.returncode, done.stderr) == (0, "")
    assert "submit" in done.stdout
    assert done.stdout == base.call("--help").stdout
