"""A tokenizer for the tiny models: a token for each printable character, in the format of tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<s>", "</s>")
EOS = 2
CHARACTERS = [" ", *map(chr, range(33, 126))]  # 97 tokens with the special ones
ID_OF = {character: len(SPECIAL) + place for place, character in enumerate(CHARACTERS)}


def characters_json() -> str:
    """The tokenizer."""
    vocabulary = {name: place for place, name in enumerate(SPECIAL)}
    vocabulary |= {"Ġ" if character == " " else character: place for character, place in ID_OF.items()}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(SPECIAL))
    return library.to_str()


def write_characters(folder: Path) -> None:
    """Write this tokenizer to a model's folder."""
    (folder / "tokenizer.json").write_text(characters_json())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def encoded(text: str) -> list[int]:
    return [ID_OF[character] for character in text]


def text_of(tokens: list[int]) -> str:
    """Return the text without the end token."""
    return "".join(CHARACTERS[token - len(SPECIAL)] for token in tokens if token != EOS)
