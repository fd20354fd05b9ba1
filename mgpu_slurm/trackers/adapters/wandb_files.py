"""Read the rows that W&B has written to the file of an offline run.

W&B has no public reader. The file is a LevelDB log, in blocks of 32 KiB, of W&B's own protobuf records.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_FILE_HEADER = b":W&B\xe1\xbe\x00"
_CHUNK_HEADER = struct.Struct("<IHB")
"""Checksum, length, and one of the following kinds."""
_WHOLE, _FIRST, _MIDDLE, _LAST = range(1, 5)


class WandbFile:
    """The file of an offline run, which may still grow."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = len(_FILE_HEADER)
        """The end of the last whole record."""

    def new_rows(self) -> list[dict[str, Any]]:
        """Return the rows that were added since the last call, each with its `_step`."""
        from wandb.proto import wandb_internal_pb2

        # protobuf makes the classes when it is imported
        record_class: Any = vars(wandb_internal_pb2)["Record"]
        rows = []
        for content in self._records():
            record = record_class.FromString(content)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
        return rows

    def _records(self) -> Iterator[bytes]:
        try:
            with open(self._path, "rb") as file:
                if file.read(len(_FILE_HEADER)) != _FILE_HEADER:
                    return
                # whole blocks, as headers do not cross their boundaries
                start = self._position - self._position % _BLOCK
                file.seek(start)
                data = file.read()
        except FileNotFoundError:
            return
        place, parts = self._position - start, b""
        while True:
            room = _BLOCK - place % _BLOCK
            if room < _CHUNK_HEADER.size:
                place += room
                continue
            if place + _CHUNK_HEADER.size > len(data):
                return
            _, length, kind = _CHUNK_HEADER.unpack_from(data, place)
            begin, place = place + _CHUNK_HEADER.size, place + _CHUNK_HEADER.size + length
            if kind not in range(_WHOLE, _LAST + 1) or place > len(data):
                # it is being written, or its writer was killed
                return
            parts = (b"" if kind in (_WHOLE, _FIRST) else parts) + data[begin:place]
            if kind in (_WHOLE, _LAST):
                self._position = start + place
                yield parts
