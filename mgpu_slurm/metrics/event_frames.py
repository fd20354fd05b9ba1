"""The framing of TensorBoard's event files: TensorFlow records, each with two checksums.

A record is its length (8 bytes, little endian), the masked CRC-32C of that (4), the data, and the masked CRC-32C of the
data (4); see `tensorflow/core/lib/io/record_writer.h`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import google_crc32c
import numpy as np
from numpy.typing import NDArray

HEADER = 12
FOOTER = 4

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_OFFSET = 0xA282EAD8
"""Added to a rotated checksum."""
_POLYNOMIAL = 0x82F63B78
"""Of CRC-32C (Castagnoli), lowest bit first."""


LONGEST = 512
"""Maximum bytes of records whose checksums are computed side by side; longer ones are no plain scalars, and rare."""


@dataclass
class Records:
    """Positions of the complete records in a file."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    damaged: int = 0
    """Places at which one or more records could not be read."""

    @staticmethod
    def at(starts: Sequence[int], lengths: Sequence[int], damaged: int = 0) -> Records:
        return Records(np.asarray(starts, np.int64), np.asarray(lengths, np.int64), damaged)


def find_records(contents: Sequence[bytes]) -> list[Records]:
    """Return the records of each file's bytes whose checksums match.

    Damaged data is skipped up to the next place that looks like a record. An incomplete last record is not damage: its
    writer is still writing, or was killed.
    """
    if not contents:
        return []
    found = [_chain(data) for data in contents]
    is_whole = _have_matching_checksums(contents, found)
    return [
        records if records is not None and whole else _find_past_damage(data)
        for data, records, whole in zip(contents, found, is_whole, strict=True)
    ]


def _chain(data: bytes) -> Records | None:
    """Return the records from header to header, their data unchecked; None if the chain breaks."""
    starts: list[int] = []
    found_lengths: list[int] = []
    add_start, add_length = starts.append, found_lengths.append
    # most records of a file have one of a few lengths
    lengths: dict[bytes, int] = {}
    place, end = 0, len(data)
    while place + HEADER <= end:
        header = data[place : place + HEADER]
        length = lengths.get(header)
        if length is None:
            length = _length(header)
            if length is None:
                return None
            lengths[header] = length
        stop = place + HEADER + length + FOOTER
        if stop > end:
            if _next_header(data, place + 1) != end:
                return None
            break
        add_start(place + HEADER)
        add_length(length)
        place = stop
    return Records.at(starts, found_lengths)


def _find_past_damage(data: bytes) -> Records:
    starts: list[int] = []
    lengths: list[int] = []
    damaged = 0
    place, end = 0, len(data)
    while place + HEADER <= end:
        start = place + HEADER
        length = _length(data[place:start])
        if length is not None:
            stop = start + length
            if stop + FOOTER > end and _next_header(data, place + 1) == end:
                break
            if stop + FOOTER <= end and masked_checksum(data[start:stop]) == _CHECKSUM.unpack_from(data, stop)[0]:
                starts.append(start)
                lengths.append(length)
                place = stop + FOOTER
                continue
        damaged += 1
        place = _next_header(data, place + 1)
    return Records.at(starts, lengths, damaged)


# -- checksums of many records


def _have_matching_checksums(contents: Sequence[bytes], found: Sequence[Records | None]) -> list[bool]:
    """Return for each file whether the checksums of all its records match; False for a file without records."""
    data = np.frombuffer(b"".join(contents), np.uint8)
    bases = np.cumsum([0, *map(len, contents)])[:-1]
    chains = [Records.at((), ()) if records is None else records for records in found]
    file = np.repeat(np.arange(len(chains)), [len(records.starts) for records in chains])
    starts = np.concatenate([records.starts + base for records, base in zip(chains, bases, strict=True)])
    lengths = np.concatenate([records.lengths for records in chains])
    is_whole = np.asarray([records is not None for records in found])
    order = np.argsort(lengths, kind="stable")
    bounds = np.flatnonzero(np.diff(lengths[order])) + 1
    for places in np.split(order, bounds) if len(order) else ():
        match = _checksums_match(data, starts[places], int(lengths[places[0]]))
        is_whole[file[places[~match]]] = False
    found_whole: list[bool] = is_whole.tolist()
    return found_whole


def _checksums_match(data: NDArray[np.uint8], starts: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    """Return which records of one length have the checksum that follows them.

    A CRC is affine over GF(2): that of a record is that of as many zeros, exclusive-or what each byte at its place
    contributes. So one look-up in a table serves a byte of all records.
    """
    if length > LONGEST:
        return np.asarray([_matches(data, start, length) for start in starts.tolist()])
    rows = np.lib.stride_tricks.sliding_window_view(data, length + FOOTER)[starts]
    columns = np.ascontiguousarray(rows.T)
    crc = np.full(len(starts), google_crc32c.value(bytes(length)), np.uint32)
    table = _contributions()
    for place in range(length):
        crc ^= table[length - 1 - place].take(columns[place])
    stored = np.ascontiguousarray(rows[:, length:]).view("<u4")[:, 0]
    match: NDArray[np.bool_] = ((crc >> 15 | crc << 17) + np.uint32(_OFFSET)) == stored
    return match


def _matches(data: NDArray[np.uint8], start: int, length: int) -> bool:
    record = data[start : start + length + FOOTER].tobytes()
    return masked_checksum(record[:length]) == int(_CHECKSUM.unpack_from(record, length)[0])


@functools.cache
def _contributions() -> NDArray[np.uint32]:
    """Return what a byte contributes to a CRC-32C; row n is for a byte that n others follow."""
    table = np.zeros((LONGEST, 256), np.uint32)
    row = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = np.where(row & 1, row >> 1 ^ np.uint32(_POLYNOMIAL), row >> 1)
    table[0] = row
    for place in range(1, LONGEST):
        table[place] = row[table[place - 1] & 0xFF] ^ table[place - 1] >> 8
    return table


def masked_checksum(data: bytes) -> int:
    """Return the CRC-32C as stored in records: rotated and offset, because data may itself contain checksums."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _OFFSET) & 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    """Return a record with this data."""
    length = _LENGTH.pack(len(data))
    return b"".join(
        (length, _CHECKSUM.pack(masked_checksum(length)), data, _CHECKSUM.pack(masked_checksum(data))),
    )


def _length(header: bytes) -> int | None:
    """Return the length in a record's header; None if its checksum does not match."""
    if _CHECKSUM.unpack_from(header, 8)[0] != masked_checksum(header[:8]):
        return None
    length: int = _LENGTH.unpack_from(header)[0]
    return length


def _next_header(data: bytes, start: int) -> int:
    """Return the first place from `start` on with a length whose checksum matches; the end of the data if none."""
    left = np.frombuffer(data, np.uint8)[start:]
    if len(left) < HEADER:
        return len(data)
    # lengths are below 4 GB and checksums are not 0, unlike holes in files: this leaves few candidates
    byte = [left[offset : len(left) - HEADER + 1 + offset] for offset in range(HEADER)]
    is_short = (byte[4] | byte[5] | byte[6] | byte[7]) == 0
    has_checksum = (byte[8] | byte[9] | byte[10] | byte[11]) != 0
    for offset in np.flatnonzero(is_short & has_checksum):
        place = start + int(offset)
        if _length(data[place : place + HEADER]) is not None:
            return place
    return len(data)
