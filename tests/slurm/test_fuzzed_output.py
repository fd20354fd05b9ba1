"""What a parser makes of any output of SLURM: a value of its form, or the documented error.

Outputs are those of a SLURM 22.05.8, cut, repeated and mixed with text that no SLURM writes.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mgpu_slurm.cli import output
from mgpu_slurm.core.errors import ClusterError, UserError
from mgpu_slurm.core.hostlist import MAX_HOSTS
from mgpu_slurm.executors import held_allocation
from mgpu_slurm.request.spec import check_run_name
from mgpu_slurm.run_folder import states
from mgpu_slurm.run_folder.layout import RUN_NAME
from mgpu_slurm.slurm import accounting, commands, jobs, sbatch, site, step_accounting, steps
from mgpu_slurm.slurm.accounting import AccountedStart
from mgpu_slurm.slurm.jobs import QueuedJob
from mgpu_slurm.slurm.pending import limits, wait_reasons
from tests.slurm.conftest import FakeCommand

NOW = "2026-11-29T12:42:06"
JOB = (
    f"JobId=42 ArrayJobId=42 ArrayTaskId=3-5%2 JobName=one UserId=ann(20003) Account=lab QOS=short JobState=PENDING"
    f" Reason=QOSMaxGRESPerUser Requeue=1 Restarts=0 TimeLimit=00:50:00 SubmitTime={NOW} StartTime={NOW} EndTime={NOW}"
    f" NumNodes=1 TRES=cpu=1,mem=1.5G,node=1,gres/gpu=2 TresPerNode=gres:gpu:2\n"
)
DETAILS = f"""\
JobId=42 JobName=interactive
   JobState=RUNNING Reason=None Dependency=(null)
   StartTime={NOW} EndTime={NOW} Deadline=N/A
   NumNodes=2 NumCPUs=8 NumTasks=2 CPUs/Task=2 ReqB:S:C:T=0:0:*:*
   Socks/Node=* NtasksPerN:B:S:C=2:0:*:* CoreSpec=*
     Nodes=n[1-2] CPU_IDs=0-3 Mem=2000 GRES=gpu:a100:2(IDX:0-1)
"""
RECORDED = Path(__file__).parent / "recorded"

PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "squeue": (jobs.parse_squeue, f"42_[3-4%2]|PENDING|{NOW}|0|{NOW}|N/A|one|Resources|\n"),
    "squeue lines": (jobs.unread_lines, f"42.new|PENDING|{NOW}|0|{NOW}|N/A|one|Resources|\n"),
    "running": (jobs.parse_running, "42_3|short|lab|1-00:10:00|one|\n"),
    "place": (jobs.parse_place, "42|n[1-4],gpu5\n"),
    "show job": (jobs.parse_shown, JOB),
    "job fields": (lambda text: limits.asked_of(commands.pairs_in(text)), JOB),
    "details": (lambda text: held_allocation.parse("42", text), DETAILS),
    "sacct": (accounting.parse_sacct, f"42_3|CANCELLED by 1000|{NOW}|{NOW}|{NOW}|one\n"),
    "began": (lambda text: accounting.parse_began(text, datetime.fromisoformat(NOW)), f"42|ann|main|{NOW}\n"),
    "sacct steps": (step_accounting.parse_steps, f"42.0|{NOW}|2|600|1-00:10:00.5|512.5M|cpu=00:10:00,mem=600M\n"),
    "squeue steps": (steps.parse_steps, "42.0|n[1-2]|one\n42.batch|n1|batch\n"),
    "show step": (steps.parse_shown, "StepId=42.0 UserId=0 NodeList=n[1-2] Name=one State=RUNNING\n"),
    "config": (site.parse_config, "MaxArraySize            = 1001\nSrunPortRange = 60001-63000\n"),
    "array size": (site.array_size_in, "MaxArraySize            = 1001\n"),
    "ports": (site.parse_ports, "60001-63000"),
    "sinfo": (site.parse_sinfo, "main*|3|gpu:a100:2(S:0-1),nvme:1\nhigh|1|(null)\n"),
    "nodes": (
        lambda text: site.parse_partitions("PartitionName=main MaxNodes=4 GraceTime=60", text),
        "main|3|idle|gpu:2\n",
    ),
    "partitions": (
        lambda text: site.parse_partitions(text, ""),
        "PartitionName=main Default=YES MaxNodes=4 GraceTime=9\n",
    ),
    "version": (site.parse_version, "slurm-wlm 22.05.8\n"),
    "associations": (site.parse_associations, "lab|normal,short\n"),
    "reservations": (site.parse_reservations, (RECORDED / "reservation-22.05.txt").read_text()),
    "limits": (lambda text: limits.parse_shown(text, "ann", "20003"), (RECORDED / "assoc_mgr-22.05.txt").read_text()),
    "qos": (limits.parse_qos, "tiny|||||gres/gpu=1,mem=4G|cpu=1|cpu=30|1-00:00:00|||1|cpu=9|||cpu=1\n"),
    "reason": (wait_reasons.explained, "ReqNodeNotAvail, UnavailableNodes:n[1-2]"),
    "time left": (commands.parse_time_left, "1-02:03:04\n"),
    "marked": (lambda text: commands.parse_marked(text, "mgpu-1"), "42|project 7 mgpu-1\n"),
    "dependants": (
        lambda text: commands.parse_dependants(text, "42_3", "77"),
        "43|afterok:42_*(unfulfilled),afterany:9\n",
    ),
    "submitted": (sbatch.job_id_in, "42;testbed\n"),
    "start": (
        lambda text: sbatch.start_in(text).sentence,
        f"sbatch: Job 42 to start at {NOW} using 4 processors on nodes n[1-2] in partition main\n",
    ),
}
"""Each parser, and what it is written for."""

STRANGE = st.one_of(
    st.sampled_from(["9" * 30, "9" * 5000, "-1", "1e999", "²", "٣", "0-999999999", "[0-999999999]", "0-65535," * 99]),
    st.sampled_from(
        ["\x1b[2J", "\x1b]0;title\x07", "\r", "\n", "\n\n", "\x85", "\u2028", "\x00", "\ufffd", "|", "=", " "]
    ),
    st.sampled_from(["9999-12-31T23:59:59", "0001-01-01T00:00:00", "2026-11-29T12:42:06+09:00", "29 Nov 12:42"]),
    st.text(max_size=8),
)


@st.composite
def spoilt(draw: st.DrawFn, text: str) -> str:
    """A text of which parts are replaced, missing, repeated or cut off."""
    for _ in range(draw(st.integers(1, 3))):
        low = draw(st.integers(0, len(text)))
        high = draw(st.integers(low, min(len(text), low + 30)))
        text = text[:low] + draw(st.one_of(STRANGE, st.just(""), st.just(text[low:high] * 2))) + text[high:]
    return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


@pytest.mark.parametrize("name", PARSERS)
def test_any_output_gives_a_value_or_the_documented_error(name: str) -> None:
    parse, written = PARSERS[name]
    assert parse(written), "it parses what it is written for"

    @settings(max_examples=60, derandomize=True, database=None)
    @given(text=st.one_of(spoilt(written), st.text(max_size=60)))
    @example(text="")
    def any_text_can_be_parsed(text: str) -> None:
        began = time.process_time()
        check(parse, text)
        assert time.process_time() - began < 2

    any_text_can_be_parsed()


@pytest.mark.parametrize("field", ["9" * 30, "9" * 5000, "²", "٣", "", "-1", "1e9", "(null)", "\x1b[2J"])
@pytest.mark.parametrize("name", PARSERS)
def test_no_number_of_an_output_can_be_one_that_breaks_its_parser(name: str, field: str) -> None:
    """Each number in its turn, which random changes hit too rarely."""
    parse, written = PARSERS[name]
    for number in re.finditer(r"[0-9]+", written[:600]):
        check(parse, written[: number.start()] + field + written[number.end() :])


def check(parse: Callable[[str], Any], text: str) -> None:
    """Parse a text; the value has the documented form, or the error is a documented one, in a line of some words."""
    message = ""
    try:
        found = parse(text)
    except (ClusterError, UserError) as error:
        message = str(error)
    else:
        # bounded by the text, or by one host list
        assert len(repr(found)) < len(text) + 1000 * MAX_HOSTS
        check_form(found)
    assert len(message) < 1000


def check_form(value: Any) -> None:
    """Check the states, ids and times in what a parser has found."""
    if isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            check_form(each)
    elif isinstance(value, (QueuedJob, AccountedStart)):
        assert value.state in states.ALL
        assert re.fullmatch(r"[0-9]+(_[0-9]+)?", value.job_id)
        for time_of in (value.end, value.submit):
            # what others make of it
            assert time_of is None or datetime.fromisoformat(time_of).astimezone().isoformat()


ESCAPES = "a\x1b[2J\x1b]0;title\x07b\x85c\u2028d\u202ee\rf"


def test_controls_of_a_name_reach_neither_parsers_nor_the_terminal(fake_command: FakeCommand) -> None:
    fake_command("squeue", f"printf '%s|\\n' '42|PENDING|N/A|0|N/A|N/A|{ESCAPES}|{ESCAPES}'")
    found = jobs.queued(["42"])
    assert found is not None
    # one line still
    shown = "a\ufffd[2J\ufffd]0;title\ufffdb\ufffdc\ufffdd\ufffde\ufffdf"
    assert (found["42"].name, found["42"].reason) == (shown, shown)
    fake_command("sacct", f"printf 'sacct: error: {ESCAPES}' >&2; exit 1")
    with pytest.raises(ClusterError) as failed:
        commands.run(["sacct"])
    assert str(failed.value) == f"sacct failed (exit code 1): sacct: error: {shown}"
    assert str(sbatch.failure(1, f"sbatch: error: {ESCAPES}")) == f"sbatch refused the job: sbatch: error: {shown}"


def test_printed_lines_have_no_controls_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_lines([f"one {ESCAPES}", "two\tü €"])
    output.print_note(ESCAPES)
    with pytest.raises(SystemExit):
        output.fail(ESCAPES, 2)
    told = capsys.readouterr()
    assert set(filter(lambda char: not char.isprintable(), told.out + told.err)) == {"\n", "\t"}
    assert told.out.endswith("\ntwo\tü €\n")


@settings(max_examples=200, derandomize=True, database=None)
@given(name=st.one_of(st.text(max_size=20), st.from_regex(RUN_NAME), st.text("ab1.-_ \n$`'\";/", max_size=9)))
@example(name="a\n")
@example(name="-rf")
@example(name="..")
def test_run_name_that_is_accepted_means_itself_to_a_shell_and_a_path(name: str) -> None:
    try:
        check_run_name(name)
    except UserError:
        return
    assert shlex.quote(name) == name
    assert name.isprintable()
    assert Path(name).name == name
    assert name[0] not in ".-"
