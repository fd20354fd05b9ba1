"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal

from mgpu_slurm.errors import UserError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", start=1)},
}
_FACTORS = {unit.lower(): factor for unit, factor in _UNITS.items()}
_SIZE = re.compile(r"\s*(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Whole bytes of `100MB` (decimal), `1.5 GiB` (binary) or a bare number of bytes; case does not matter.

    Raises:
        UserError: where the text is no size.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match["unit"].lower()) if match else None
    if match is None or factor is None:
        raise UserError(f"size {text!r}: expected a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 100MB")
    return int(Decimal(match["number"]) * factor)


def human_size(size: int) -> str:
    """`999 B`, `1.5 MB`, `120 MB`: decimal units and three digits at most."""
    value = float(size)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        shown = _three_digits(value) if unit != "B" else str(size)
        # what rounds to 1000 belongs to the next unit
        if float(shown) < 1000:
            return f"{shown} {unit}"
        value /= 1000
    return f"{_three_digits(value)} PB"


def _three_digits(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
