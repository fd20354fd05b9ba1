from __future__ import annotations

import pytest

from mgpu_slurm.run_folder.states import TERMINAL, from_slurm, is_alive

# squeue(1), JOB STATE CODES: short name, long name, the state here
CODES = [
    ("BF", "BOOT_FAIL", "NODE_FAIL"),
    ("CA", "CANCELLED", "CANCELLED"),
    ("CD", "COMPLETED", "COMPLETED"),
    ("CF", "CONFIGURING", "PENDING"),
    ("CG", "COMPLETING", "RUNNING"),
    ("DL", "DEADLINE", "TIMEOUT"),
    ("F", "FAILED", "FAILED"),
    ("NF", "NODE_FAIL", "NODE_FAIL"),
    ("OOM", "OUT_OF_MEMORY", "OUT_OF_MEMORY"),
    ("PD", "PENDING", "PENDING"),
    ("PR", "PREEMPTED", "PREEMPTED"),
    ("R", "RUNNING", "RUNNING"),
    ("RD", "RESV_DEL_HOLD", "PENDING"),
    ("RF", "REQUEUE_FED", "REQUEUED"),
    ("RH", "REQUEUE_HOLD", "REQUEUED"),
    ("RQ", "REQUEUED", "REQUEUED"),
    ("RS", "RESIZING", "RUNNING"),
    ("RV", "REVOKED", "UNKNOWN"),
    ("SI", "SIGNALING", "RUNNING"),
    ("SE", "SPECIAL_EXIT", "REQUEUED"),
    ("SO", "STAGE_OUT", "RUNNING"),
    ("ST", "STOPPED", "RUNNING"),
    ("S", "SUSPENDED", "RUNNING"),
    ("TO", "TIMEOUT", "TIMEOUT"),
]


@pytest.mark.parametrize(("short", "long", "state"), CODES)
def test_every_squeue_code_is_mapped_by_short_and_long_name(short: str, long: str, state: str) -> None:
    assert (from_slurm(short), from_slurm(long)) == (state, state)


@pytest.mark.parametrize("text", ["CANCELLED by 1000", "CANCELLED+", " CANCELLED\n"])
def test_sacct_variants_of_cancelled_are_recognized(text: str) -> None:
    assert from_slurm(text) == "CANCELLED"


@pytest.mark.parametrize("text", ["", "?", "NO_SUCH_STATE", "UPDATE_DB"])
def test_unlisted_state_is_unknown(text: str) -> None:
    assert from_slurm(text) == "UNKNOWN"


def test_only_terminal_states_are_not_alive() -> None:
    expected = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED"}
    assert expected == TERMINAL
    states = {from_slurm(text) for _, text, _ in CODES}
    assert {state for state in states if is_alive(state)} == {"PENDING", "RUNNING", "REQUEUED", "UNKNOWN"}
