"""What docs/security.md says of other users, by another user."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from mgpu_slurm.run_folder.layout import RunFolder
from tests.on_slurm.users import NO_GPUS, User
from tests.support import environment_in, log, processes_of, wait_until

TRAIN = """
import time
from pathlib import Path

def train(run, gate: str):
    print("joined", flush=True)
    while not Path(gate).exists():
        run.mean(1, 1)
        time.sleep(0.05)
"""

STRANGER = """
import faulthandler, os, pickle, sys, time
from torch.distributed import TCPStore

class Payload:
    def __reduce__(self):
        return os.mkdir, (sys.argv[3],)

faulthandler.dump_traceback_later(30, exit=True)
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False)
keys = store.list_keys()
assert keys, "nothing to read"
for key in keys:
    store.set(key, pickle.dumps(Payload()))
# by which ranks are asked to agree
prefix = next(key.partition("control 0/")[0] for key in keys if "control 0/" in key)
for rank in range(2):
    store.set(f"{prefix}bell/0/{rank}", "RING")
print("done", flush=True)
# the store may be gone before it answers
time.sleep(1)
os._exit(0)
"""


def process_of(student: User, run: Path) -> tuple[int, dict[str, str]]:
    """A process that starts ranks, and its environment, as root reads it; forked ranks do not show theirs."""
    for pid in processes_of(student.cluster.home(student.name) / "project/runs" / run.name):
        with suppress(OSError):  # it ended meanwhile
            found = environment_in(Path(f"/proc/{pid}/environ").read_text(errors="replace"))
            if "MASTER_PORT" in found:
                return pid, found
    raise AssertionError(f"no rank of {run} runs")


def start(student: User) -> tuple[Path, Path]:
    """A training of the student's on two nodes, and the file that ends it."""
    (student.folder / "train.py").write_text(TRAIN)
    gate = student.cluster.home(student.name) / "project/gate"
    name = student.submit("--nodes", "2", "train.py:train", f"gate={gate}")
    run = student.folder / "runs" / name
    wait_until(lambda: all((run / f"logs/1-{rank}.log").exists() and "joined" in log(run, rank) for rank in range(2)))
    return run, student.folder / "gate"


def test_other_user_finds_the_secret_of_a_run_nowhere(student: User, colleague: User) -> None:
    run, gate = start(student)
    inside = student.cluster.home("student") / "project/runs" / run.name
    (secret_file,) = RunFolder(run).secrets()
    secret = secret_file.read_text()
    assert len(secret) == 64
    denied = colleague.cluster.run("cat", inside / secret_file.name, user="colleague")
    assert "Permission denied" in denied.stderr
    everywhere = (
        "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ /proc/net/tcp 2>/dev/null;"
        " scontrol show job --details; sacct --format=ALL --parsable; env; ls -la /tmp"
    )
    seen = colleague.cluster.run("sh", "-c", everywhere, user="colleague").stdout
    # it sees the processes, but not what they were given
    assert "mgpu_slurm" in seen
    assert secret not in seen
    assert str(inside) + "/.secret" not in seen
    pid, environ = process_of(student, run)
    assert secret not in str(environ)
    assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    gate.touch()
    assert student.call("wait", run.name).returncode == 0
    assert RunFolder(run).secrets() == []


@pytest.mark.long
def test_other_user_who_writes_to_the_rendezvous_ends_a_run_and_has_no_code_run(
    student: User, colleague: User, tmp_path: Path
) -> None:
    run, _ = start(student)
    _, environ = process_of(student, run)
    marker = colleague.cluster.home("colleague") / "ran"
    script = colleague.folder / "stranger.py"
    script.write_text(STRANGER)
    words = (environ["MASTER_ADDR"], environ["MASTER_PORT"], str(marker))
    place = colleague.cluster.home("colleague") / "project/stranger.py"
    done = colleague.cluster.run(sys.executable, place, *words, user="colleague")
    assert done.stdout == "done\n", done.stderr
    assert student.call("wait", run.name).returncode == 1
    assert student.state(run.name) == "FAILED"
    said = student.call("why", run.name).stdout
    assert re.search(r"^error .*ForgeryError: the rendezvous has a value of '.*bell/0/", said, re.MULTILINE), said
    assert student.call("status", "--json", run.name).stdout.count('"attempts": 1') == 1
    assert not (colleague.folder.parent / "ran").exists()


def test_other_user_cannot_replace_a_run_in_a_shared_folder_with_a_sticky_bit(
    student: User, colleague: User, shared: Path
) -> None:
    """Without it, `status` would show whatever a colleague has put there; a submission says so."""
    runs = {"MGPU_RUNS": str(student.cluster.home("lab"))}
    done = student.call("submit", "--json", *NO_GPUS, "--name", "mine", "--", "false", **runs)
    warned = f"mgpu-slurm: warning: others can replace runs in {runs['MGPU_RUNS']}, and so what `status` shows of them"
    assert done.stderr.startswith(warned), done
    shared.chmod(0o3770)
    done = student.call("submit", "--json", *NO_GPUS, "--name", "mine", "--", "false", **runs)
    assert done.stderr == ""
    name = json.loads(done.stdout)["run"]
    assert student.call("wait", name, **runs).returncode == 1
    try:
        for replaces in (f"mv {name} away", f"rm -r {name}", f"rmdir {name}", f"touch {name}/state.json"):
            done = colleague.cluster.run("sh", "-c", f"cd {runs['MGPU_RUNS']} && {replaces}", user="colleague")
            assert done.returncode != 0, replaces
        assert student.state(name, **runs) == "FAILED"
    finally:
        shared.chmod(0o2770)
