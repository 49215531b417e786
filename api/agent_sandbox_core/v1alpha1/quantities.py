"""Kubernetes quantities: as much as comparing and adding takes."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Final

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)|e([0-9]+))?\Z")
_FACTORS: Final = {"m": Decimal("0.001"), "k": Decimal(10**3)}
_DECIMAL: Final = "MGTPE"
_BINARY: Final = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
MEBIBYTE: Final = 1 << 20


def parse_quantity(text: str) -> Decimal:
    """500m, 1.5, 512Mi, 1e9 as a number. ValueError for anything else."""
    found = _QUANTITY.match(text)
    if found is None:
        raise ValueError(f"{text!r} is no quantity")
    number, unit, exponent = Decimal(found[1]), found[2], found[3]
    if exponent is not None:
        return number * Decimal(10) ** int(exponent)
    if unit is None:
        return number
    if unit in _BINARY:
        return number * Decimal(2) ** (10 * (_BINARY.index(unit) + 1))
    if unit in _FACTORS:
        return number * _FACTORS[unit]
    return number * Decimal(10) ** (6 + 3 * _DECIMAL.index(unit))


def format_bytes(number: Decimal) -> str:
    """A number of bytes, rounded up, in the largest binary unit that shows it exactly."""
    whole = int(number.to_integral_value(ROUND_CEILING))
    for power in range(len(_BINARY), 0, -1):
        if whole and whole % (1 << (10 * power)) == 0:
            return f"{whole >> (10 * power)}{_BINARY[power - 1]}"
    return str(whole)
