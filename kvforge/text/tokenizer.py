"""Text in and out, for the extra `text`: transformers' tokenizers, from a GGUF file or a Hugging Face folder.

The tokenizers are not ours. What is ours: they load without torch, the split into single digits that transformers
leaves out for some GGUF files is put back, and `TextStream` turns tokens into text as they come.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvforge.models.files import is_gguf
from kvforge.models.gguf_header import read_metadata
from kvforge.models.store import find
from kvforge.process.installation import install_command
from kvforge.protocol.errors import InvalidRequest, Unavailable, UnsupportedModel

from .stream import Pieces, TextStream, checked_ids

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["TextStream", "Tokenizer"]

# Values of tokenizer.ggml.pre for which llama.cpp first splits every digit off (regex \p{N}) and then applies GPT-2's
# split: llama-vocab.cpp, case LLAMA_VOCAB_PRE_TYPE_SMOLLM and those beside it. transformers (5.23) applies the second.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}

_SPECIAL_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


class Tokenizer:
    """A model's tokenizer. Made by `Tokenizer.load`."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._pieces: dict[frozenset[str], Pieces | None] = {}
        self._special: Mapping[str, int] | None = None

    @classmethod
    def load(cls, source: str | Path) -> Tokenizer:
        """Loads the tokenizer of a model: a path, or a name that `models.store.find` knows. No network, no torch.

        Raises ModelNotFound, UnsupportedModel (there is no tokenizer that can be read), or Unavailable (the extra
        `text` is not installed).
        """
        path = find(str(source), weights=False)
        transformers = _transformers()
        try:
            tokenizer = _from_gguf(path) if path.is_file() and is_gguf(path) else _from_folder(transformers, path)
        except (UnsupportedModel, Unavailable):
            raise
        except Exception as error:  # transformers raises whatever the file made it stumble over
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UnsupportedModel(str(source), f"its tokenizer cannot be loaded ({reason})") from error
        return cls(tokenizer, str(source))

    @property
    def vocab_size(self) -> int:
        """Token ids that mean something are below this; a model may have a few more, which decode to nothing."""
        return len(self._tokenizer)

    @property
    def vocabulary(self) -> Collection[str]:
        """Every token as the vocabulary spells it."""
        found: Mapping[str, int] = self._tokenizer.get_vocab()
        return found.keys()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def chat_template(self) -> str:
        """The Jinja text of it, that for tools where there are several; "" where the model has none."""
        template = self._tokenizer.chat_template or ""
        return template if isinstance(template, str) else str(template.get("tool_use") or template.get("default", ""))

    def use_chat_template(self, template: str) -> None:
        """Puts another one in its place."""
        self._tokenizer.chat_template = template

    def spelled(self, token_id: int) -> str:
        """A token by the name that the vocabulary has for it: also of a special one; "" where it has none."""
        name: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return name or ""

    def as_json(self) -> str:
        """All of it in the format of tokenizer.json. Raises UnsupportedModel where it is of another library."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedModel(self._name, "its tokenizer is not one of the library `tokenizers`")
        text: str = backend.to_str()
        return text

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a prompt, with the start token where the model wants one. Special tokens in it are read as such.

        special: False leaves the start token out: of a text that is a part of one.

        Raises InvalidRequest when it is not text that UTF-8 can hold.
        """
        return self._encode(text, special=special)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Each special token's id, by its spelling: what vanishes from text unless it is kept."""
        if self._special is None:
            known = self._tokenizer.added_tokens_decoder
            self._special = {added.content: token for token, added in known.items() if added.special}
        return self._special

    def decode(self, token_ids: Iterable[int], *, keep: frozenset[str] = frozenset()) -> str:
        """The text of tokens, without special ones other than those in `keep`. Bytes that are no UTF-8 become U+FFFD.

        Raises InvalidRequest for a number that cannot be a token id.
        """
        ids = checked_ids(token_ids)
        kept = keep.intersection(self.special_tokens) if keep else keep
        if kept:
            vanish = {token for text, token in self.special_tokens.items() if text not in kept}
            ids = [token for token in ids if token not in vanish]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=not kept, clean_up_tokenization_spaces=False)
        return text

    @property
    def pieces(self) -> Pieces | None:
        """`pieces_of` where all special tokens vanish."""
        return self.pieces_of()

    def pieces_of(self, keep: frozenset[str] = frozenset()) -> Pieces | None:
        """The bytes of each token, remembered for all streams that keep the same special tokens. None: the vocabulary
        is of a family whose tokens have no bytes of their own."""
        there = keep.intersection(self.special_tokens) if keep else keep
        if there not in self._pieces:
            self._pieces[there] = Pieces.of(self._tokenizer, there)
        return self._pieces[there]

    def chat(self, messages: Sequence[Mapping[str, Any]] | str) -> list[int]:
        """Token ids of a conversation up to where the model is to answer. A string is one message from the user.

        The model's chat template writes the prompt. A model without one is given the contents of the messages, one
        a line, encoded as `encode` does. Raises InvalidRequest where a message is malformed or the template refuses
        the conversation, Unavailable without the extra `text`.
        """
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        for message in conversation:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise InvalidRequest("messages", f"each needs a role and a content; this has not: {message!r}")
        if not conversation:
            raise InvalidRequest("messages", "are empty")
        if not self.has_chat_template:
            return self.encode("\n".join(str(message["content"]) for message in conversation))
        return self._encode(self.render(conversation, {"add_generation_prompt": True}), special=False)

    def render(self, conversation: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """A conversation as the chat template writes it, with the start token in it where the model wants one.

        options: what the template is told besides: `tools`, `add_generation_prompt`, `continue_final_message`, and
        whatever it reads. Raises InvalidRequest where the template refuses it, Unavailable without the extra `text`.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(list(conversation), tokenize=False, **options)
        except ImportError as error:
            raise _missing(error) from error
        except Exception as error:  # the template is the model's own program: it raises what it likes
            raise InvalidRequest("messages", f"the model's chat template refuses them ({error})") from error
        return text

    def stream(self, *, continues: bool = False, keep: frozenset[str] = frozenset()) -> TextStream:
        """A new TextStream for one answer. keep: special tokens that are to be seen in its text."""
        return TextStream(self, continues=continues, keep=keep)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequest("prompt", f"text is expected, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest("prompt", f"is not valid Unicode ({error.reason} at {error.start})") from error
        # verbose: the tokenizer should not warn of lengths on standard error; admission checks them.
        ids = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return [int(token) for token in ids]


# ---------------------------------------------------------------------------------------------------------- loading


def _missing(error: ImportError) -> Unavailable:
    return Unavailable(f"text in and out needs the extra `text` ({error}): {install_command('text')}")


def _transformers() -> ModuleType:
    # Without torch, transformers says at import that models are not available, which a client does not want to read.
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(quiet)
    os.environ[quiet] = "1"
    try:
        import transformers
    except ImportError as error:
        raise _missing(error) from error
    finally:
        if before is None:
            del os.environ[quiet]
    module: ModuleType = transformers
    return module


def _from_folder(transformers: ModuleType, path: Path) -> Any:
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        raise UnsupportedModel(str(path), "the folder holds no tokenizer (tokenizer.json or tokenizer.model)")
    # trust_remote_code is given explicitly, since transformers asks on the terminal where it is left out.
    return transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def _from_gguf(path: Path) -> Any:
    """What AutoTokenizer.from_pretrained(gguf_file=...) does, without the torch that it imports on the way."""
    from transformers import PreTrainedTokenizerFast

    metadata = read_metadata(path)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise UnsupportedModel(str(path), "the GGUF file carries no tokenizer")
    convert, names = _gguf_converter()
    values = {name: metadata[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in metadata}
    backend, settings = convert(metadata["general.architecture"], values)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2" and metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        _split_digits(backend)
    for name, key in _SPECIAL_TOKENS.items():
        token = metadata.get(f"tokenizer.ggml.{key}")
        settings[f"{name}_token"] = None if token is None else tokens[token]
    # Sentencepiece files without the flag mean yes; Gemma 4's template writes <bos> itself. As transformers has it.
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", True if kind == "llama" else None)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token")
    flags = {"add_bos_token": False if kind == "gemma4" else add_bos, "add_eos_token": add_eos}
    settings.update({name: flag for name, flag in flags.items() if flag is not None})
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=metadata.get("tokenizer.chat_template"), **settings
    )


def _gguf_converter() -> tuple[Any, dict[str, str]]:
    """transformers' converter of GGUF vocabularies and the names it wants the metadata under."""
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as module
    except ImportError:  # its place before 5.23
        try:
            from transformers.integrations import ggml as module
        except ImportError as error:
            raise Unavailable(f"this version of transformers cannot read GGUF tokenizers ({error})") from error
    return module.convert_gguf_tokenizer, module.GGUF_TOKENIZER_MAPPING["tokenizer"]


def _split_digits(backend: Any) -> None:
    """Puts the split into single digits before what is there, unless it is there already.

    It matters where two or more spaces come before a digit: GPT-2's split alone keeps one of them for the digit, so
    that "  1" becomes two tokens of one space and a digit instead of one token of two spaces and a digit.
    """
    from tokenizers import pre_tokenizers

    present = backend.pre_tokenizer
    described = "" if present is None else json.loads(present.__getstate__())
    if '"individual_digits": true' in json.dumps(described):
        return
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = digits if present is None else pre_tokenizers.Sequence([digits, present])
