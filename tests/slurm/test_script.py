from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgpu_slurm.core import interpreter
from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.resources import Resources
from mgpu_slurm.request.spec import Spec, Target
from mgpu_slurm.run_folder.layout import RunFolder
from mgpu_slurm.slurm.script import Array, render

PLAIN = """\
#!/bin/bash
#SBATCH --job-name=digits-20240501-100000-ab12
#SBATCH --nodes=1
#SBATCH --output=/runs/digits-20240501-100000-ab12/logs/launch-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --comment=mgpu-0123

mgpu_token=${1:-mgpu-0123}
set --
run=/runs/digits-20240501-100000-ab12
exec START_BATCH "$run" --token "$mgpu_token" -- srun \
--job-name=digits-20240501-100000-ab12 --export=ALL --kill-on-bad-exit=1 \
--nodes=1 --ntasks-per-node=1 --unbuffered START_RANK "$run"
"""

EVERYTHING = """\
#!/bin/bash
#SBATCH --job-name=digits-20240501-100000-ab12
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --time=1-12
#SBATCH --partition=gpu,big
#SBATCH --account=abc
#SBATCH --qos=high
#SBATCH --constraint=a100&nvlink
#SBATCH --exclude=gpu[1-2]
#SBATCH --nodelist=gpu7
#SBATCH --reservation=course
#SBATCH --mail-type=END
#SBATCH --exclusive
#SBATCH --output=/runs/digits-20240501-100000-ab12/logs/launch-%j.log
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=USR1@90
#SBATCH --comment="project 7 mgpu-0123"

mgpu_token=${1:-mgpu-0123}
set --
export SRUN_CPUS_PER_TASK=8
trap '(( ${#BASH_SOURCE[@]} > 1 )) || : ${MGPU_SETUP_FAILED:="$BASH_COMMAND"}' ERR
module load cuda
ulimit -n 4096
trap - ERR; export MGPU_SETUP_FAILED
export NCCL_DEBUG=WARN
export MESSAGE='it'"'"'s $HOME'
run=/runs/digits-20240501-100000-ab12
exec START_BATCH "$run" --token "$mgpu_token" -- srun \
--job-name=digits-20240501-100000-ab12 --export=ALL --kill-on-bad-exit=1 \
--nodes=2 --ntasks-per-node=4 --unbuffered START_RANK "$run"
"""


ARRAY = """\
#!/bin/bash
#SBATCH --job-name=digits-20240501-100000-ab12
#SBATCH --array=0-2,7%2
#SBATCH --dependency=afterok:41
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --nodes=1
#SBATCH --output=/runs/digits-20240501-100000-ab12/logs/launch-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --comment=mgpu-0123

mgpu_token=${1:-mgpu-0123}
set --
run=/runs/digits-20240501-100000-ab12/tasks/$((1001 + SLURM_ARRAY_TASK_ID))
exec START_BATCH "$run" --token "$mgpu_token" -- srun \
--job-name=digits-20240501-100000-ab12 --export=ALL --kill-on-bad-exit=1 \
--nodes=1 --ntasks-per-node=1 --unbuffered START_RANK "$run"
"""


def make(python: str = "/venv/bin/python", **values: Any) -> Spec:
    resources = Resources(**values.pop("resources", {}))
    target = Target(function="jobs.digits:train")
    return Spec("digits-20240501-100000-ab12", target, "slurm", resources, python=python, **values)


def with_python(script: str, python: str = "/venv/bin/python") -> str:
    """A script with the words that start the batch step and the ranks."""
    for name, part in (("START_BATCH", "batch"), ("START_RANK", "rank")):
        script = script.replace(name, shlex.join(interpreter.command(python, "mgpu_slurm.job", part)))
    return script


def rendered(spec: Spec, runs: Path = Path("/runs")) -> str:
    return render(spec, RunFolder(runs / spec.run), "mgpu-0123")


def as_sbatch_reads(script: str) -> list[str]:
    """The arguments in the `#SBATCH` lines, by the rules of sbatch(1): quotes, backslashes, comments."""
    return [_unquoted(line.removeprefix("#SBATCH ")) for line in script.splitlines() if line.startswith("#SBATCH ")]


def _unquoted(text: str) -> str:
    argument, quote, characters = "", "", iter(text)
    for character in characters:
        if character == "\\":
            argument += next(characters)
        elif character == quote:
            quote = ""
        elif not quote and character in "\"'":
            quote = character
        elif not quote and (character.isspace() or character == "#"):
            break
        else:
            argument += character
    assert not quote, text
    return argument


def test_plain_run_sends_only_the_requested_options() -> None:
    assert rendered(make()) == with_python(PLAIN)


def test_group_is_rendered_as_an_array() -> None:
    spec = make(tasks=2000, at_once=2)
    array = Array(1001, (1001, 1002, 1003, 1008))
    assert render(spec, RunFolder(Path("/runs") / spec.run), "mgpu-0123", array, "afterok:41") == with_python(ARRAY)


def test_all_options_are_rendered() -> None:
    spec = make(
        resources={
            "nodes": 2,
            "gpus_per_node": 4,
            "cpus_per_task": 8,
            "mem": "100G",
            "time": "1-12",
            "partition": "gpu,big",
            "account": "abc",
            "qos": "high",
            "constraint": "a100&nvlink",
            "exclude": "gpu[1-2]",
            "nodelist": "gpu7",
            "reservation": "course",
            "sbatch": {"mail-type": "END", "comment": "project 7", "exclusive": ""},
        },
        signal="USR1",
        lead=90,
        max_requeues=0,
        setup=("module load cuda", "ulimit -n 4096"),
        rename={"gpus-per-node": "gres=gpu:{}", "mem": None},
        environment={"NCCL_DEBUG": "WARN", "MESSAGE": "it's $HOME"},
    )
    assert rendered(spec) == with_python(EVERYTHING)


def test_zero_gpus_sends_no_gpu_flag() -> None:
    assert "gpus" not in rendered(make(resources={"gpus_per_node": 0}))


def test_type_of_gpus_is_sent() -> None:
    asked = {"gpus_per_node": 4, "gpu_type": "a100"}
    assert "#SBATCH --gpus-per-node=a100:4\n" in rendered(make(resources=asked))
    renamed = make(rename={"gpus-per-node": "gres=gpu:{}"}, resources=asked)
    assert "#SBATCH --gres=gpu:a100:4\n" in rendered(renamed)


def test_explicit_single_task_per_node_is_sent() -> None:
    script = rendered(make(resources={"gpus_per_node": 4, "ntasks_per_node": 1}))
    assert "#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n" in script
    assert " --ntasks-per-node=1 " in script.splitlines()[-1]


def test_site_can_drop_or_rename_any_flag() -> None:
    spec = make(resources={"sbatch": {"mail-type": "END"}}, rename={"requeue": None, "mail-type": "mail={}"})
    script = rendered(spec)
    assert "requeue" not in script
    assert "#SBATCH --mail=END\n" in script


HOSTILE = [
    "two words",
    "$(touch pwned)",
    'say "hi"',
    "it's",
    "a\\b",
    "`id`",
    "x # y",
    "ends\\",
    "ünïcode",
    ";|&",
]


@pytest.mark.parametrize("value", HOSTILE)
def test_sbatch_reads_hostile_values_unchanged(value: str) -> None:
    spec = make(resources={"account": value, "sbatch": {"mail-user": value}})
    arguments = as_sbatch_reads(rendered(spec))
    assert f"--account={value}" in arguments
    assert f"--mail-user={value}" in arguments


def test_percent_sign_in_the_folder_is_escaped() -> None:
    arguments = as_sbatch_reads(rendered(make(), Path("/a %j/100%")))
    assert "--output=/a %%j/100%%/digits-20240501-100000-ab12/logs/launch-%j.log" in arguments


@pytest.mark.parametrize(
    "name", ["two words", "$(touch pwned)", 'a "b"', "it's", "`id`", "new\nline", "a;b&c", "*", "~"]
)
def test_bash_starts_the_intended_command(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    place.mkdir()
    python = place / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "print(json.dumps([sys.argv, os.environ['VALUE'], os.environ['SRUN_CPUS_PER_TASK'], os.environ['SET_UP']]))\n"
    )
    python.chmod(0o755)
    spec = make(
        str(python),
        resources={"nodes": 2, "cpus_per_task": 3},
        environment={"VALUE": name},
        setup=("export SET_UP=yes", "set -- of its own"),
    )
    # sbatch's own line about the log cannot hold a line break, the commands can
    folder = RunFolder(tmp_path / name.replace("\n", " ") / spec.run)
    script = render(spec, folder, "mgpu-0123")

    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, cwd=tmp_path, check=False)
    assert done.stderr == ""
    argv, value, cpus, set_up = json.loads(done.stdout)
    assert argv == [
        *interpreter.command(str(python), "mgpu_slurm.job", "batch"),
        *(str(folder.path), "--token", "mgpu-0123", "--"),
        *("srun", f"--job-name={spec.run}", "--export=ALL", "--kill-on-bad-exit=1"),
        *("--nodes=2", "--ntasks-per-node=1", "--unbuffered"),
        *interpreter.command(str(python), "mgpu_slurm.job", "rank", str(folder.path)),
    ]
    assert (value, cpus, set_up) == (name, "3", "yes")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (make(resources={"account": "a\n#SBATCH --uid=0"}), "--account 'a.*line break"),
        (make(resources={"account": "a\tb"}), "--account .a.*control character"),
        (make(resources={"sbatch": {"mail-user": "a\rb"}}), "--mail-user 'a.*line break"),
        (make(resources={"sbatch": {"array": "0-3"}}), "--sbatch array: use --seeds"),
        (make(resources={"sbatch": {"requeue": ""}}), "--sbatch requeue: use --max-requeues"),
        (make(resources={"sbatch": {"nodes": "3"}}), "--sbatch nodes: use --nodes"),
        (make(resources={"sbatch": {"mail type": "END"}}), "--sbatch 'mail type': expected a long option"),
        (make(environment={"A B": "x"}), "environment 'A B'"),
    ],
)
def test_value_that_a_script_cannot_express_is_rejected(spec: Spec, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        rendered(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a\\b", "a\nb"])
def test_folder_that_sbatch_cannot_log_to_is_rejected(name: str) -> None:
    with pytest.raises(UserError):
        rendered(make(), Path("/runs") / name)


def test_script_is_the_same_after_the_spec_is_written_and_read(tmp_path: Path) -> None:
    from mgpu_slurm.request.spec import read_spec

    spec = make(rename={"mem": None, "gpus-per-node": "gres=gpu:{}"}, resources={"mem": "1G", "gpus_per_node": 2})
    folder = RunFolder(tmp_path)
    spec.write(folder)
    assert rendered(read_spec(folder)) == rendered(spec) != rendered(replace(spec, rename={}))
