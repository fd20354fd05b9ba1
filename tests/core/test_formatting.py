from __future__ import annotations

import pytest

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.formatting import duration, human_size, parse_size, short_value


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("12B", 12),
        ("100MB", 100_000_000),
        ("100 mb", 100_000_000),
        ("1.5GiB", 1_610_612_736),
        ("2KiB", 2048),
        ("1kb", 1000),
        ("3TB", 3_000_000_000_000),
        ("0.1GB", 100_000_000),
        (" 7 MiB ", 7 * 1024 * 1024),
    ],
)
def test_parse_size_reads_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (1e-7, "1e-07"),
        (29066.0, "29066"),
        (51400.7, "51401"),
        (999999.9, "1000000"),
        (1234567.8, "1.235e+06"),
        (1e12, "1e+12"),
        (-3.0, "-3"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (29066, "29066"),
        ("adam", "adam"),
        (True, "True"),
    ],
)
def test_counts_are_shown_whole_and_fractions_with_four_digits(value: object, text: str) -> None:
    assert short_value(value) == text


@pytest.mark.parametrize(
    "text", ["", "MB", "-1MB", "1,5GB", "10 parsecs", "1e3", "nan", "1.MB", "5M", "٣MB", "9" * 5000]
)
def test_parse_size_rejects_other_text_and_names_it(text: str) -> None:
    with pytest.raises(UserError, match="such as 100MB") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KB"),
        (1550, "1.6 KB"),
        (99_940, "99.9 KB"),
        (99_960, "100 KB"),
        (999_499, "999 KB"),
        (999_600, "1.0 MB"),
        (120_000_000, "120 MB"),
        (4_200_000_000, "4.2 GB"),
        (10**15, "1.0 PB"),
        (1234 * 10**15, "1234 PB"),
    ],
)
def test_human_size_has_three_digits_at_most(size: int, text: str) -> None:
    assert human_size(size) == text


def test_parse_size_reads_what_human_size_writes() -> None:
    for size in (0, 512, 1500, 2_500_000, 120_000_000, 7 * 10**12):
        assert parse_size(human_size(size)) == size


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (0.04, "0s"), (0.26, "0.3s"), (0.97, "1s"), (1.9, "1s"), (190, "3m10s"), (-1, "0s")],
)
def test_duration_has_one_or_two_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
