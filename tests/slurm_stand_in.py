"""What tests do to sbatch: a wrapper that takes jobs and loses answers; and a SLURM of shell scripts for it.

Each call of the wrapper takes the next line of what was planned for it; without one it does what sbatch does.
"""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass
from pathlib import Path

SBATCH = """\
state='{state}'
real='{real}'
# for sbatch, and for its job
PATH=${{PATH#$state/bin:}}
fail() {{ echo "sbatch: error: Batch job submission failed: $1" >&2; exit 1; }}
plan=$(head -n 1 "$state/planned")
sed -i 1d "$state/planned"
echo "${{plan:-take}}" >> "$state/calls"
case $plan in
    refuse) fail 'Invalid partition name specified' ;;
    unreached) fail 'Unable to contact slurm controller (connect failure)' ;;
    busy) fail 'Slurm temporarily unable to accept job, sleeping and retrying' ;;
    time-out) fail 'Socket timed out on send/recv operation' ;;
    take-and-time-out) "$real" "$@" > /dev/null; fail 'Socket timed out on send/recv operation' ;;
    take-later)
        touch "$state/late"
        (until [ -e "$state/looked" ]; do sleep 0.01; done; "$real" "$@"; rm "$state/late") > /dev/null 2>&1 &
        fail 'Socket timed out on send/recv operation' ;;
    hang) exec sleep 600 ;;
    take-wait-and-time-out)
        "$real" "$@" > /dev/null; touch "$state/here"; until [ -e "$state/go" ]; do sleep 0.01; done
        fail 'Socket timed out on send/recv operation' ;;
    take-and-hang) "$real" "$@" > /dev/null; exec sleep 600 ;;
    take-and-die) "$real" "$@" > /dev/null; kill -KILL $$ ;;
    take-and-say-nothing) "$real" "$@" > /dev/null ;;
    take-with-banners) echo 'Your job 500 has ended.'; "$real" "$@"; echo '3 new messages' ;;
    wait-and-fail)
        touch "$state/here"; until [ -e "$state/go" ]; do sleep 0.01; done
        fail 'Unable to contact slurm controller (connect failure)' ;;
    # the end of its job is not its end
    wait-and-take)
        trap '' TERM; touch "$state/here"; until [ -e "$state/go" ]; do sleep 0.01; done
        exec "$real" "$@" ;;
    take-and-wait) "$real" "$@"; touch "$state/here"; until [ -e "$state/go" ]; do sleep 0.01; done ;;
    *) exec "$real" "$@" ;;
esac
"""

CONTROLLER = """\
state='{state}'
if [ -e "$state/down" ]; then
    echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2
    exit 1
fi
"""

REAL_SBATCH = """\
comment= script=
for word; do
    case $word in
        --comment=*) comment=${{word#--comment=}} ;;
        -*) ;;
        *) script=${{script:-$word}} ;;
    esac
done
comment=${{comment:-$(sed -n 's/^#SBATCH --comment=//p' "$script" | tr -d '"')}}
id=$((42 + $(wc -l < "$state/queue")))
echo "$id|$comment" >> "$state/queue"
array=$(sed -n 's/^#SBATCH --array=//p' "$script")
for task in ${{array:+$(seq "${{array%-*}}" "${{array#*-}}")}}; do echo "${{id}}_$task" >> "$state/jobs"; done
[ "$array" ] || echo "$id" >> "$state/jobs"
echo "$id"
"""

SQUEUE = """\
case "$*" in
    *%k*)
        # one that is taken late is there at the second look, however slow this machine is
        [ ! -e "$state/looked" ] || while [ -e "$state/late" ]; do sleep 0.01; done
        cat "$state/queue"; touch "$state/looked" ;;
    *) sed 's/$/|PENDING|N\\/A|0|N\\/A|N\\/A||Priority|/' "$state/jobs" ;;
esac
"""


@dataclass(frozen=True)
class Sbatch:
    """An sbatch on PATH that does as planned."""

    state: Path

    @property
    def environ(self) -> dict[str, str]:
        return {"PATH": f"{self.state / 'bin'}:{os.environ['PATH']}"}

    def plan(self, *calls: str) -> None:
        (self.state / "planned").write_text("".join(f"{call}\n" for call in calls))

    @property
    def calls(self) -> list[str]:
        """What was done, call by call."""
        path = self.state / "calls"
        return path.read_text().split() if path.exists() else []

    @property
    def is_waiting(self) -> bool:
        return (self.state / "here").exists()

    def go(self) -> None:
        """Lets a call that waits go on."""
        (self.state / "go").touch()

    def write(self, name: str, text: str) -> None:
        path = self.state / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)


class StandIn(Sbatch):
    """A SLURM whose jobs pend for ever."""

    @property
    def environ(self) -> dict[str, str]:
        return super().environ | {"SLURM_CONF": str(self.state / "slurm.conf")}

    @property
    def queue(self) -> list[str]:
        """Job id and comment, such as `42|mgpu-0123`."""
        return (self.state / "queue").read_text().splitlines()

    def go_down(self) -> None:
        (self.state / "down").touch()

    def come_back(self) -> None:
        (self.state / "down").unlink()


def wrap(state: Path, real: Path) -> Sbatch:
    """An sbatch in a folder of its own that calls the real one."""
    (state / "bin").mkdir(parents=True)
    sbatch = Sbatch(state)
    sbatch.plan()
    sbatch.write("sbatch", SBATCH.format(state=state, real=real))
    return sbatch


def stand_in(state: Path) -> StandIn:
    slurm = StandIn(wrap(state, state / "bin" / "real-sbatch").state)
    (state / "slurm.conf").write_text("ClusterName=stand-in\n")
    (state / "queue").touch()
    (state / "jobs").touch()
    controller = CONTROLLER.format(state=state)
    slurm.write("real-sbatch", controller + REAL_SBATCH.format())
    slurm.write("squeue", controller + SQUEUE)
    slurm.write("sacct", "")
    slurm.write("sinfo", controller + "echo 'main*|4|(null)'\n")
    slurm.write("scancel", controller + textwrap.dedent(f"""echo "$*" >> '{state}/cancelled'\n"""))
    slurm.write("scontrol", controller + "echo 'MaxArraySize = 1001'\n")
    return slurm
