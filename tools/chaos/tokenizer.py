"""Tokenizer for the tiny model: tokens are bytes, so a character often takes several tokens or is incomplete."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<unk>", "<s>", "</s>")
TOKENS = 256


def write(model: Path) -> None:
    """Write the tokenizer into the model's folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: TOKENS - len(SPECIAL)]
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(model / "tokenizer.json"))


def decode(model: Path, tokens: tuple[int, ...]) -> str:
    """Return the text of an answer."""
    return str(Tokenizer.from_file(str(model / "tokenizer.json")).decode(list(tokens)))
