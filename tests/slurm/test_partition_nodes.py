"""Nodes as sinfo lists them, and the commands that tie tasks to them; recorded on SLURM 22.05 and 24.11."""

from __future__ import annotations

import pytest

from mgpu_slurm.core.errors import ClusterError
from mgpu_slurm.slurm import partition_nodes
from mgpu_slurm.slurm.partition_nodes import Node
from tests.slurm.conftest import FakeCommand

LISTED = """\
Welcome to the cluster!
n1|main*|mixed|Unknown|Unknown|none
n1|high|mixed|Unknown|Unknown|none
n2|main*|idle|root|Unknown|none
n3|main*|draining|root|2026-11-29T12:43:55|bad | fan of=it
n4|high|down*|root|2026-11-29T12:44:02|Not responding
"""


def test_nodes_are_listed_once_with_the_reason_and_who_gave_it() -> None:
    assert partition_nodes.parse_nodes(LISTED, "main,high") == [
        Node("n1", "mixed"),
        Node("n2", "idle"),
        Node("n3", "draining", "bad | fan of=it (root, 2026-11-29T12:43:55)"),
        Node("n4", "down*", "Not responding (root, 2026-11-29T12:44:02)"),
    ]
    assert [node.name for node in partition_nodes.parse_nodes(LISTED, None)] == ["n1", "n2", "n3"]
    assert [node.is_unusable for node in partition_nodes.parse_nodes(LISTED, "main,high")] == [False, False, True, True]


def test_missing_partition_is_an_error_that_says_what_to_do(fake_command: FakeCommand) -> None:
    fake_command(
        "sinfo", 'case "$*" in *--partition=*) ;; *%N*) echo "n1|cpu|idle|root|Unknown|none";; *) echo cpu;; esac'
    )
    with pytest.raises(ClusterError, match=r"^--partition gpuu: no such partition; there are cpu$"):
        partition_nodes.nodes_of("gpuu")
    with pytest.raises(ClusterError, match=r"^there is no default partition: pass --partition"):
        partition_nodes.nodes_of(None)
