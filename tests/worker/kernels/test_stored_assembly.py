"""The assembly that unpacks codes by a table, run by a model of the few instructions that it has.

Triton's interpreter runs no assembly, so that a machine without a GPU would not notice a wrong byte.
"""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from kvforge.worker.kernels import stored_unpack
from kvforge.worker.kernels.code_tables import TABLES

LINE = re.compile(r"(?P<name>[a-z0-9.]+) (?P<into>\S+), (?P<operands>.*);")


def run(text: str, words: int) -> list[int]:
    """Return the four results of a text for the two words in $4."""
    registers = {"$4": words}
    for line in text.splitlines():
        found = LINE.fullmatch(line.strip())
        if found is None or found["name"] == ".reg":
            continue
        operands = [each.strip() for each in found["operands"].split(",")]
        values = [registers[each] if each in registers else int(each, 0) for each in operands]
        registers[found["into"]] = compute(found["name"], values)
    return [registers[f"${place}"] for place in range(4)]


def compute(name: str, values: list[int]) -> int:
    if name == "mov.b32":
        return values[0]
    if name == "and.b32":
        return values[0] & values[1]
    if name == "shr.u32":
        return values[0] >> values[1]
    if name == "lop3.b32":
        assert values[3] == 0xEA
        return (values[0] & values[1]) | values[2]
    assert name == "prmt.b32", name
    both = values[0].to_bytes(4, "little") + values[1].to_bytes(4, "little")
    selectors = [values[2] >> (4 * place) & 15 for place in range(4)]
    assert max(selectors) < 8, "copies a sign"
    return int.from_bytes(bytes(both[each] for each in selectors), "little")


@pytest.mark.parametrize("code", ["nf4", "iq4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_is_the_number_of_its_table(code: str, dtype: torch.dtype) -> None:
    name = f"_{code.upper()}_{'BF16' if dtype == torch.bfloat16 else 'F16'}"
    text = getattr(stored_unpack, name).value
    bits = [each & 0xFFFF for each in torch.tensor(TABLES[code]).to(dtype).view(torch.int16).tolist()]
    random = torch.Generator().manual_seed(0)
    for _ in range(64):
        nibbles = torch.randperm(16, generator=random)[:8].tolist()
        words = sum(nibble << (4 * place) for place, nibble in enumerate(nibbles))
        for place, result in enumerate(run(text, words)):  # a number of the first word, and one of the second
            assert (result & 0xFFFF, result >> 16) == (bits[nibbles[place]], bits[nibbles[4 + place]])
