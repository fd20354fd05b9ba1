from __future__ import annotations

from mgpu_slurm.slurm.script import Array, split


def test_a_small_group_is_one_array() -> None:
    assert split(range(5), 1001) == [Array(0, (0, 1, 2, 3, 4))]


def test_array_indices_stay_below_the_limit() -> None:
    arrays = split(range(2500), 1001)
    assert [array.first for array in arrays] == [0, 1001, 2002]
    assert [array.option(None) for array in arrays] == ["0-1000", "0-1000", "0-497"]
    assert [task for array in arrays for task in array.tasks] == list(range(2500))


def test_selected_runs_of_a_group_keep_their_numbers() -> None:
    first, second = split([1, 3, 4, 5, 1002], 1001)
    assert first.option(2) == "1,3-5%2"
    assert (second.first, second.option(None)) == (1001, "1")
