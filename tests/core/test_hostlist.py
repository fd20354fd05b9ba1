from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.core.hostlist import MAX_HOSTS, compress, expand, expand_counts
from mgpu_slurm.core.hostlist import ranges as number_ranges


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("gpu5", ["gpu5"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("a[1-2]-ib", ["a1-ib", "a2-ib"]),
        ("node-a.example.org,node_b", ["node-a.example.org", "node_b"]),
        ("r[1-2]c[0-1]s[3]", ["r1c0s3", "r1c1s3", "r2c0s3", "r2c1s3"]),
        ("[1-2]x", ["1x", "2x"]),
        ("n[2,1]", ["n2", "n1"]),
        (
            "rack[1-2]n[01-03,7],gpu5,a[1-2]-ib",
            [f"rack{rack}n{node}" for rack in (1, 2) for node in ("01", "02", "03", "7")] + ["gpu5", "a1-ib", "a2-ib"],
        ),
    ],
)
def test_expand_reads_every_form_of_a_host_list(text: str, names: list[str]) -> None:
    assert expand(text) == names


def test_expand_reads_a_range_of_a_large_cluster() -> None:
    names = expand("n[00001-40000]")
    assert (len(names), names[0], names[-1]) == (40000, "n00001", "n40000")


@pytest.mark.parametrize(
    "text",
    [
        "n[1-3",
        "n1-3]",
        "n[]",
        "n[1-]",
        "n[-3]",
        "n[3-1]",
        "n[a-b]",
        "n[1,,2]",
        "n[1[2]]",
        "a,",
        ",a",
        "a,,b",
        "a b",
        "(null)",
    ],
)
def test_expand_rejects_malformed_host_list(text: str) -> None:
    with pytest.raises(UserError, match="host list") as caught:
        expand(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "n[0-999999999]",
        "n[0-99999999999999]",
        f"n[0-{'9' * 5000}]",
        f"n[0-{MAX_HOSTS}]",
        "a[1-60000]b[1-60000]",
        "a[1-60000],b[1-60000]",
        # each range is short enough, and the text short
        f"n[{'0-65535,' * 20_000}1]",
        "[1-9]" * 10_000,
    ],
    ids=lambda text: text[:20],
)
def test_expand_rejects_more_hosts_than_slurm_can_have(text: str) -> None:
    with pytest.raises(UserError, match="host list") as caught:
        expand(text)
    assert len(str(caught.value)) < 1000


words = st.text("abcxyz0123456789-_.", min_size=1, max_size=4)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    low, count, width = draw(st.integers(0, 120)), draw(st.integers(1, 12)), draw(st.integers(1, 4))
    if count == 1:
        return f"{low:0{width}}", [f"{low:0{width}}"]
    high = low + count - 1
    # a padded range has all its numbers at the width of the first
    first = f"{low:0{width}}"
    return f"{first}-{high}", [str(number).rjust(len(first), "0") for number in range(low, high + 1)]


@st.composite
def brackets(draw: st.DrawFn) -> tuple[str, list[str]]:
    parts = draw(st.lists(ranges(), min_size=1, max_size=3))
    return f"[{','.join(text for text, _ in parts)}]", [name for _, names in parts for name in names]


@st.composite
def hosts(draw: st.DrawFn) -> tuple[str, list[str]]:
    pieces = draw(st.lists(st.one_of(words.map(lambda word: (word, [word])), brackets()), min_size=1, max_size=3))
    text = "".join(piece for piece, _ in pieces)
    return text, ["".join(parts) for parts in product(*(names for _, names in pieces))]


@given(st.lists(hosts(), min_size=1, max_size=3))
def test_expand_returns_the_names_a_list_was_written_from(written: list[tuple[str, list[str]]]) -> None:
    expected = [name for _, names in written for name in names]
    if len(expected) <= MAX_HOSTS:
        assert expand(",".join(text for text, _ in written)) == expected


HOST_NAMES = st.text("abcxyz0123456789-_.", min_size=1, max_size=25)
COUNTED = st.tuples(words, st.integers(0, 2000), st.integers(1, 6), st.integers(1, 20)).map(
    lambda made: [f"{made[0]}{number:0{made[2]}}" for number in range(made[1], made[1] + made[3])]
)


@settings(derandomize=True, database=None)
@given(
    st.one_of(
        st.lists(HOST_NAMES, max_size=6), COUNTED, st.tuples(COUNTED, COUNTED).map(lambda both: both[0] + both[1])
    )
)
@example(["n" + "9" * 5000, "n1"])
@example(["n099999999999999999", "n100000000000000000"])
def test_expand_returns_the_names_that_were_compressed(names: list[str]) -> None:
    assert expand(compress(names)) == names


@settings(derandomize=True, database=None)
@given(st.lists(st.text(max_size=5), max_size=4))
def test_names_that_are_none_of_hosts_are_compressed_to_some_text(names: list[str]) -> None:
    assert isinstance(compress(names), str)


@given(st.text("n[]0-9,a ", max_size=12))
def test_expand_of_any_text_returns_names_or_raises_user_error(text: str) -> None:
    try:
        names = expand(text)
    except UserError:
        return
    assert all(name and not set(name) & set("[], ") for name in names)


@pytest.mark.parametrize(
    ("text", "counts"), [("1", [1]), ("4,2", [4, 2]), ("2(x3),1", [2, 2, 2, 1]), ("1,8(x2)", [1, 8, 8])]
)
def test_expand_counts_reads_repetitions(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize(
    "text", ["", "x", "2(3)", "2(x3", "2,", "2(x3)1", "2(x99999999999)", "1(x65536),1", "9" * 5000]
)
def test_expand_counts_rejects_other_forms(text: str) -> None:
    with pytest.raises(UserError, match="counts"):
        expand_counts(text)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["local1"], "local1"),
        (["local1", "local2", "local3"], "local[1-3]"),
        ([f"local{number}" for number in range(8, 12)], "local[8-11]"),
        (["n09", "n10"], "n[09-10]"),
        (["a1", "b2"], "a1,b2"),
        (["a1", "a3"], "a1,a3"),
        (["n3", "n5", "n6", "n7", "gpu"], "n3,n[5-7],gpu"),
        (["n9", "n010", "n10"], "n9,n010,n10"),
        (["n08", "n09", "n10", "n1", "n2"], "n[08-10],n[1-2]"),
        (["a1", "gpu"], "a1,gpu"),
        (["a", "b"], "a,b"),
    ],
)
def test_compressed_names_are_read_back_by_expand(names: list[str], text: str) -> None:
    assert compress(names) == text
    assert expand(text) == names


@given(st.sets(st.integers(min_value=0, max_value=5000), min_size=1))
def test_ranges_are_read_back_by_expand(numbers: set[int]) -> None:
    assert expand(f"[{number_ranges(sorted(numbers))}]") == [str(number) for number in sorted(numbers)]


def test_ranges_join_consecutive_numbers() -> None:
    assert number_ranges([0, 1, 2, 3, 4, 7, 9, 10]) == "0-4,7,9-10"
