"""The framing of TensorBoard's event files: TensorFlow records, each with two checksums.

A record is its length (8 bytes, little endian), the masked CRC-32C of that (4), the data, and the masked CRC-32C of the
data (4); see `tensorflow/core/lib/io/record_writer.h`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import google_crc32c
import numpy as np

HEADER = 12
FOOTER = 4

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")


@dataclass
class Records:
    """Positions of the complete records in a file."""

    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    damaged: int = 0
    """Places at which one or more records could not be read."""


def find_records(data: bytes) -> Records:
    """Return the records of a file's bytes whose checksums match.

    Damaged data is skipped up to the next place that looks like a record. An incomplete last record is not damage: its
    writer is still writing, or was killed.
    """
    found = Records()
    # most records of a file have one of a few lengths
    lengths: dict[bytes, int | None] = {}
    checksum_of = google_crc32c.value
    stored_at = _CHECKSUM.unpack_from
    place, end = 0, len(data)
    while place + HEADER <= end:
        header = data[place : place + HEADER]
        length = lengths.get(header, -1)
        if length == -1:
            length = lengths[header] = _length(header)
        if length is not None:
            start = place + HEADER
            stop = start + length
            if stop + FOOTER > end and _next_header(data, place + 1) == end:
                break
            crc = checksum_of(data[start:stop])
            # inlined masked_checksum: calling it for each record makes this 50% slower
            if stop + FOOTER <= end and ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == stored_at(data, stop)[0]:
                found.starts.append(start)
                found.lengths.append(length)
                place = stop + FOOTER
                continue
        found.damaged += 1
        place = _next_header(data, place + 1)
    return found


def masked_checksum(data: bytes) -> int:
    """Return the CRC-32C as stored in records: rotated and offset, because data may itself contain checksums."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


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
