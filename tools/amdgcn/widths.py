"""Width of a load or store, and the position of its values in a register, by the instruction's name."""

from __future__ import annotations

from dataclasses import dataclass

from .values import HIGH, LOW, U32, Array
from .wave import Wave


@dataclass(frozen=True)
class Width:
    """The width of a memory access.

    Attributes:
        size: bytes of one value.
        count: values, in as many registers.
        is_signed: whether loads sign-extend.
        upper: loads go to the upper half of the register, stores come from it; the lower half stays.
        lower: loads go to the lower half; the upper half stays.
    """

    size: int
    count: int = 1
    is_signed: bool = False
    upper: bool = False
    lower: bool = False

    @property
    def bytes(self) -> int:
        """Return the bytes of the whole access."""
        return self.size * self.count

    def registers(self, w: Wave, first: int) -> list[Array]:
        """Return the values to store, each in the lowest bits."""
        held = w.v[first : first + self.count]
        return list(held >> HIGH if self.upper else held)

    def place(self, w: Wave, first: int, loaded: Array) -> None:
        """Write loaded values ([count, lanes] uint32) to registers from `first` on."""
        if self.upper:
            w.put(first, (w.v[first] & LOW) | (loaded[0] << HIGH))
        elif self.lower:
            w.put(first, (w.v[first] & ~LOW) | loaded[0])
        else:
            for place, numbers in enumerate(loaded):
                w.put(first + place, numbers)

    def extended(self, numbers: Array) -> Array:
        """Sign-extend the loaded values if the instruction does."""
        if not self.is_signed:
            return numbers
        sign = U32(1 << (8 * self.size - 1))
        return (numbers ^ sign) - sign


_WORDS = {**dict.fromkeys(("dword", "b32"), 1), **dict.fromkeys(("dwordx2", "b64"), 2)}
_WORDS |= {**dict.fromkeys(("dwordx3", "b96"), 3), **dict.fromkeys(("dwordx4", "b128"), 4)}
WIDTHS: dict[str, Width] = {
    **{name: Width(4, count) for name, count in _WORDS.items()},
    **dict.fromkeys(("ushort", "u16", "short", "b16"), Width(2)),
    **dict.fromkeys(("sshort", "i16"), Width(2, is_signed=True)),
    **dict.fromkeys(("ubyte", "u8", "byte", "b8"), Width(1)),
    **dict.fromkeys(("sbyte", "i8"), Width(1, is_signed=True)),
    **dict.fromkeys(("short_d16", "d16_b16", "u16_d16"), Width(2, lower=True)),
    **dict.fromkeys(("short_d16_hi", "d16_hi_b16", "u16_d16_hi", "b16_d16_hi"), Width(2, upper=True)),
    **dict.fromkeys(("ubyte_d16", "d16_u8", "u8_d16"), Width(1, lower=True)),
    **dict.fromkeys(("ubyte_d16_hi", "d16_hi_u8", "u8_d16_hi"), Width(1, upper=True)),
    **dict.fromkeys(("byte_d16_hi", "d16_hi_b8", "b8_d16_hi"), Width(1, upper=True)),
}
