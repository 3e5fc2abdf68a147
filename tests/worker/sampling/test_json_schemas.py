"""Hundreds of real schemas: every sampled answer is valid, or the schema was refused with a keyword."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import NO_INT32, Grammar
from kvforge.text.grammar import check
from kvforge.worker.sampling.grammar import Grammars
from kvforge.worker.sampling.grammar_tokens import GrammarTokens
from tests.amount import examples

SCHEMAS = Path(__file__).parents[2] / "data" / "json_schemas" / "schemas.jsonl.xz"
EOS, BYTES = 0, 1  # token BYTES + n is byte n
VOCAB = BYTES + 256
FREE_STEPS, STEPS_MAX = 120, 800
# To end an answer: the first allowed token of these, outside strings and inside.
CLOSING, QUOTE = b'}],:ntf0123456789"', b'"'
ENFORCED_MIN, UNFINISHED_MAX = 300, 5
WHOLE = ("Invalid type", "Unsatisfiable schema", "min/maxProperties")  # refusals without a single keyword


class Real(NamedTuple):
    source: str
    name: str
    schema: dict[str, Any]

    @property
    def grammar(self) -> Grammar:
        return Grammar(kind="json_schema", text=json.dumps(self.schema))


@cache
def real_schemas() -> list[Real]:
    lines = lzma.decompress(SCHEMAS.read_bytes()).decode().splitlines()
    return [Real(**json.loads(line)) for line in lines]


@cache
def sorted_out() -> tuple[list[Real], list[tuple[Real, str]]]:
    """Return the enforceable schemas, and the reason against each of the others."""
    enforced, refused = [], []
    for real in real_schemas():
        try:
            check(real.grammar)
        except InvalidRequest as error:
            refused.append((real, error.message.removeprefix("sampling.json_schema: ")))
        else:
            enforced.append(real)
    return enforced, refused


@cache
def byte_tokens() -> GrammarTokens:
    """Return a token for each byte, and the end token."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    of_byte = {byte: letter for letter in letters for byte in _byte_of(letter)}
    vocabulary = {"<end>": EOS, **{of_byte[byte]: BYTES + byte for byte in range(256)}}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    return GrammarTokens(LLTokenizer(library.to_str(), n_vocab=VOCAB, eos_token=[EOS]))


def _byte_of(letter: str) -> bytes:
    """Decode GPT-2's alphabet: printable characters stand for themselves, the others follow the first 256."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    place = ord(letter)
    return bytes([place if place < 256 else hidden[place - 256]])


def drawn(enforced: list[Real], seed: int) -> list[bytes | None]:
    """Return for each schema an answer sampled by its masks alone; None if the answer did not end."""
    grammars, rng = Grammars(len(enforced), VOCAB, byte_tokens), np.random.default_rng(seed)
    for slot, real in enumerate(enforced):
        grammars.begin(slot, real.grammar, NO_INT32)
    assert grammars.compile() == {}
    answers: list[bytearray] = [bytearray() for _ in enforced]
    going = list(range(len(enforced)))
    weights = np.ones(VOCAB)
    weights[[BYTES + byte for byte in b" \n\r\t"]] = 1e-9
    weights[EOS] = 1e-3
    outside, inside = ([EOS, *(BYTES + byte for byte in each)] for each in (CLOSING, QUOTE))
    for step in range(STEPS_MAX):
        masks = np.zeros((len(going), grammars.words), np.int32)
        assert grammars.fill([grammars.row(slot) for slot in going], masks) == {}
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB].astype(bool)
        assert bits.any(axis=1).all()
        chances = np.cumsum(bits * weights, axis=1)
        tokens = (chances < rng.random((len(going), 1)) * chances[:, -1:]).sum(axis=1)
        for row, slot in enumerate(going if step >= FREE_STEPS else ()):
            order = inside if _in_string(answers[slot]) else outside
            tokens[row] = next((token for token in order if bits[row, token]), tokens[row])
        assert bits[np.arange(len(going)), tokens].all()
        for slot, token in zip(going, tokens.tolist(), strict=True):
            grammars.row(slot).accept(token)
            if token != EOS:
                answers[slot].append(token - BYTES)
        going = [slot for slot, token in zip(going, tokens.tolist(), strict=True) if token != EOS]
        if not going:
            break
    return [None if slot in going else bytes(answer) for slot, answer in enumerate(answers)]


def _in_string(text: bytearray) -> bool:
    """Whether the JSON so far ends within a string."""
    whole = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return whole.count(b'"') % 2 == 1


@pytest.mark.parametrize("seed", range(1, 1 + examples(3)))
def test_whatever_is_drawn_is_valid(seed: int) -> None:
    enforced, _ = sorted_out()
    invalid, unfinished = [], []
    for real, answer in zip(enforced, drawn(enforced, seed), strict=True):
        if answer is None:
            unfinished.append(real.name)
            continue
        validator = jsonschema.validators.validator_for(real.schema)(real.schema)
        error = next(iter(validator.iter_errors(json.loads(answer))), None)
        if error is not None:
            invalid.append((real.source, real.name, error.message[:200], answer[:200]))
    assert not invalid
    assert len(unfinished) <= UNFINISHED_MAX, unfinished
    assert len(enforced) >= ENFORCED_MIN


def test_all_others_are_refused_by_a_keyword_that_they_hold() -> None:
    enforced, refused = sorted_out()
    assert len(enforced) + len(refused) == len(real_schemas()) == 500
    for real, problem in refused:
        if not problem.startswith(WHOLE):
            keywords = problem.partition(": ")[0].split(", ")
            assert all(f'"{keyword}' in json.dumps(real.schema) for keyword in keywords), (real.name, problem)
    unknown = [problem for _, problem in refused if problem.startswith(WHOLE)]
    assert len(unknown) <= len(refused) // 20, "too many refusals without the name of a keyword"
