"""Which steps and ranks are recorded, and what is refused."""

from __future__ import annotations

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.request.profile_window import ProfileWindow


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("10-13", ProfileWindow(10, 13)),
        ("7", ProfileWindow(7, 7)),
        ("10-13@0,8", ProfileWindow(10, 13, (0, 8))),
        ("10-13@all", ProfileWindow(10, 13, None)),
        ("1-100", ProfileWindow(1, 100)),
    ],
)
def test_window_is_read(text: str, window: ProfileWindow) -> None:
    assert ProfileWindow.parse(text) == window


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected STEPS or STEPS@RANKS"),
        ("0-3", "expected STEPS or STEPS@RANKS"),
        ("10-13@", "expected STEPS or STEPS@RANKS"),
        ("10-13@first", "expected STEPS or STEPS@RANKS"),
        ("10:13", "expected STEPS or STEPS@RANKS"),
        ("13-10", "step 10 comes before step 13: write 10-13"),
        ("1-101", "101 steps are too many to look at: use 100"),
    ],
)
def test_other_text_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ProfileWindow.parse(text)


def test_rank_that_does_not_exist_is_refused() -> None:
    ProfileWindow.parse("1-2@0,3").check(ranks=4)
    with pytest.raises(UserError, match="there is no rank 4: the run has ranks 0 to 3"):
        ProfileWindow.parse("1-2@0,4").check(ranks=4)


@pytest.mark.parametrize(("ranks", "recorded"), [("", [0, 1]), ("@all", [0, 1, 2, 3]), ("@1,2", [1, 2])])
def test_ranks_of_the_first_node_record_unless_others_are_named(ranks: str, recorded: list[int]) -> None:
    window = ProfileWindow.parse(f"5{ranks}")
    assert [rank for rank in range(4) if window.records(rank, node=rank // 2)] == recorded
