"""Steps of jobs in the words of sacct."""

from __future__ import annotations

from mgpu_slurm.slurm import step_accounting
from mgpu_slurm.slurm.step_accounting import AccountedStep

OUTPUT = """\
7|2026-11-28T12:00:00|2|98|00:46.125|||
7.batch|2026-11-28T12:00:00|1|98|00:01.000|20.5M|cpu=00:00:01,mem=20.5M
7.0|2026-11-28T12:00:01|2|96|00:45.125|341.80M|cpu=00:00:45,energy=0,fs/disk=1,mem=683.95M,pages=0,vmem=9G
7.1|2026-11-28T12:02:00|2|4|1-02:03:04|400M|mem=600M
8_3.0|2026-11-28T13:00:00|1|10|02:03:04|3G|mem=5.5G
9.0|Unknown|1||||
9.extern|2026-11-28T13:00:00|1|10|00:00.001||
"""


def test_memory_of_a_node_is_the_sum_of_its_ranks_and_at_least_that_of_the_largest() -> None:
    megabyte = 1 << 20
    assert step_accounting.parse_steps(OUTPUT) == [
        AccountedStep("7", "2026-11-28T12:00:01", 96, 45.125, round(683.95 * megabyte) // 2),
        AccountedStep("7", "2026-11-28T12:02:00", 4, 26 * 3600 + 184.0, 400 * megabyte),
        AccountedStep("8_3", "2026-11-28T13:00:00", 10, 2 * 3600 + 184.0, round(5.5 * (1 << 30))),
    ]


def test_command_asks_for_steps_of_all_starts() -> None:
    fields = "JobID,Start,NNodes,ElapsedRaw,TotalCPU,MaxRSS,TRESUsageInTot"
    assert step_accounting.steps_command(["7", "8_3"]) == [
        *("sacct", "--noheader", "-P", "-D", "-o", fields, "-j", "7,8_3")
    ]
