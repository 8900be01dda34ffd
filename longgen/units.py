"""How sizes, lengths and times are written for people, and how they are read from them."""

from __future__ import annotations

import re
from decimal import Decimal
from types import MappingProxyType

from longgen.errors import UsageError

_BYTE_UNITS = MappingProxyType(
    {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
)
_BYTES = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([KMGT]iB|[kMGT]B)")
_FRACTION = re.compile(r"0?\.[0-9]{1,9}|1\.0{1,9}")


def parse_bytes(value: object) -> int:
    """Bytes from "24GiB", "512MiB", "24GB" (24,000,000,000) or "1.5TiB". Raises UsageError for anything else."""
    match = _BYTES.fullmatch(value) if isinstance(value, str) else None
    if match:
        count = int(Decimal(match[1]) * _BYTE_UNITS[match[2]])
        if count > 0:
            return count
    raise UsageError(f"{value!r} is not an amount of memory; write one such as 24GiB, 512MiB or 24GB")


def parse_bytes_or_fraction(value: object) -> int | float:
    """Bytes as an int, or a fraction above 0 and up to 1 as a float: "0.5" or 0.5 is half."""
    if isinstance(value, float) and 0 < value <= 1:
        return value
    if isinstance(value, str) and _FRACTION.fullmatch(value) and float(value) > 0:
        return float(value)
    try:
        return parse_bytes(value)
    except UsageError:
        raise UsageError(
            f"{value!r} is not an amount of memory; write one such as 24GiB or 512MiB, or a fraction such as 0.5"
        ) from None


def write_bytes_or_fraction(amount: int | float) -> str:
    """What `parse_bytes_or_fraction` reads back as this very amount."""
    if isinstance(amount, float):
        return f"{amount:.9f}".rstrip("0") + ("0" if amount == 1 else "")
    for unit, size in sorted(_BYTE_UNITS.items(), key=lambda known: -known[1]):
        if amount % size == 0:
            return f"{amount // size}{unit}"
    return f"{Decimal(amount).scaleb(-9):f}GB"


def show_bytes(count: int) -> str:
    """14.2 GiB, 1.11 GiB, 896 MiB, 48 KiB, 12 B."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        size = _BYTE_UNITS[unit]
        if count >= size:
            amount = count / size
            digits = 0 if count % size == 0 or amount >= 100 else 1 if amount >= 10 else 2
            return f"{amount:,.{digits}f} {unit}"
    return f"{count} B"


def show_length(tokens: int) -> str:
    """4M, 256K, 1,000,000: as on the command line where it is a round binary number."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size:,}{unit}"
    return f"{tokens:,}"


def show_count(count: int, noun: str) -> str:
    """1 record, 1,000 records."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def show_seconds(seconds: float) -> str:
    """0.4 s, 52 s, 7.5 min, 2.3 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
