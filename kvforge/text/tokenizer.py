"""Tokenizers for the extra `text`: transformers' tokenizers, from a GGUF file or a Hugging Face folder.

kvforge's additions: they load without torch, the split into single digits that transformers omits for some GGUF files
is restored, and `TextStream` decodes incrementally.
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
from .token_table import TokenTable, table_of
from .transformers_index import quick_import

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["TextStream", "Tokenizer"]

# Values of tokenizer.ggml.pre for which llama.cpp first splits every digit off (regex \p{N}) and then applies GPT-2's
# split: llama-vocab.cpp, case LLAMA_VOCAB_PRE_TYPE_SMOLLM and those beside it. transformers (5.23) applies the second.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}

_SPECIAL_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}

_VOCABULARIES = "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"
# Where AutoTokenizer returns the class that tokenizer_config.json names: Llama 3 and its like.
_PLAIN_FAMILIES, _PLAIN_CLASSES = {"llama"}, {"PreTrainedTokenizerFast", "TokenizersBackend"}


class Tokenizer:
    """A model's tokenizer, created by `Tokenizer.load`."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._pieces: dict[frozenset[str], Pieces | None] = {}
        self._special: Mapping[str, int] | None = None

    @classmethod
    def load(cls, source: str | Path) -> Tokenizer:
        """Load the tokenizer of a model, without using the network or torch.

        Args:
            source: A path, or a name that `models.store.find` knows.

        Raises:
            ModelNotFound: There is no such model.
            UnsupportedModel: Its tokenizer cannot be read.
            Unavailable: The extra `text` is not installed.
        """
        path = find(str(source), weights=False)
        if path.is_dir() and not any((path / name).is_file() for name in _VOCABULARIES):
            reason = "the folder holds no tokenizer (tokenizer.json or tokenizer.model)"
            raise UnsupportedModel(str(path), reason)  # a gateway serves without text: it need not import transformers
        transformers = _transformers()
        try:
            tokenizer = _from_gguf(path) if path.is_file() and is_gguf(path) else _from_folder(transformers, path)
        except (UnsupportedModel, Unavailable):
            raise
        except Exception as error:  # transformers raises many kinds for a damaged file
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UnsupportedModel(str(source), f"its tokenizer cannot be loaded ({reason})") from error
        return cls(tokenizer, str(source))

    @property
    def vocab_size(self) -> int:
        """Return the number of meaningful token ids; a model may have a few more, which decode to nothing."""
        return len(self._tokenizer)

    @property
    def vocabulary(self) -> Collection[str]:
        """Return every token as spelled in the vocabulary."""
        return self.token_ids.keys()

    @property
    def token_ids(self) -> Mapping[str, int]:
        """Return the id of every token, as spelled in the vocabulary."""
        found: Mapping[str, int] = self._tokenizer.get_vocab()
        return found

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def chat_template(self) -> str:
        """Return the Jinja text of the template, the one for tools if there are several; "" if the model has none."""
        template = self._tokenizer.chat_template or ""
        return template if isinstance(template, str) else str(template.get("tool_use") or template.get("default", ""))

    def use_chat_template(self, template: str) -> None:
        """Replace the template."""
        self._tokenizer.chat_template = template

    def spelled(self, token_id: int) -> str:
        """Return a token, including a special one, as spelled in the vocabulary; "" if the id has none."""
        name: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return name or ""

    def as_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json.

        Raises:
            UnsupportedModel: It is of another library.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedModel(self._name, "its tokenizer is not one of the library `tokenizers`")
        text: str = backend.to_str()
        return text

    def table(self) -> TokenTable:
        """Return the part that turns tokens into text, for a process without this tokenizer.

        Raises:
            NotTabularError: A table cannot hold all of that part.
        """
        return table_of(self._tokenizer, self.chat_template)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a prompt, with the start token if the model has one.

        Special tokens spelled in the text are recognised.

        Args:
            text: The text.
            special: False omits the start token, for a part of a text.

        Raises:
            InvalidRequest: The text is not valid Unicode.
        """
        return self._encode(text, special=special)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Return each special token's id by its spelling. Decoding drops these unless they are kept."""
        if self._special is None:
            known = self._tokenizer.added_tokens_decoder
            self._special = {added.content: token for token, added in known.items() if added.special}
        return self._special

    def decode(self, token_ids: Iterable[int], *, keep: frozenset[str] = frozenset()) -> str:
        """Return the text of tokens, without special ones other than those in `keep`. Invalid UTF-8 becomes U+FFFD.

        Raises:
            InvalidRequest: A number cannot be a token id.
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
        """Return `pieces_of` without any special token."""
        return self.pieces_of()

    def pieces_of(self, keep: frozenset[str] = frozenset()) -> Pieces | None:
        """Return the bytes of each token, shared by all streams that keep the same special tokens.

        Returns:
            None if the tokens of the vocabulary have no bytes of their own.
        """
        there = keep.intersection(self.special_tokens) if keep else keep
        if there not in self._pieces:
            self._pieces[there] = Pieces.of(self._tokenizer, there)
        return self._pieces[there]

    def chat(self, messages: Sequence[Mapping[str, Any]] | str) -> list[int]:
        """Return the token ids of a conversation up to the place of the model's answer.

        The model's chat template writes the prompt. Without a template, the contents of the messages, one per line, are
        encoded as `encode` does.

        Args:
            messages: The messages; a string is one message from the user.

        Raises:
            InvalidRequest: A message is malformed, or the template refuses the conversation.
            Unavailable: The extra `text` is not installed.
        """
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        for message in conversation:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise InvalidRequest("messages", f"each needs a role and a content: {message!r}")
        if not conversation:
            raise InvalidRequest("messages", "are empty")
        if not self.has_chat_template:
            return self.encode("\n".join(str(message["content"]) for message in conversation))
        return self._encode(self.render(conversation, {"add_generation_prompt": True}), special=False)

    def render(self, conversation: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Return a conversation as the chat template writes it, with the start token if the model has one.

        Args:
            conversation: The messages.
            options: Further variables of the template: `tools`, `add_generation_prompt`, `continue_final_message`, and
                others.

        Raises:
            InvalidRequest: The template refuses the conversation.
            Unavailable: The extra `text` is not installed.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(list(conversation), tokenize=False, **options)
        except ImportError as error:
            raise _missing(error) from error
        except Exception as error:  # the template is the model's own program and may raise anything
            raise InvalidRequest("messages", f"the model's chat template refuses them ({error})") from error
        return text

    def stream(self, *, continues: bool = False, keep: frozenset[str] = frozenset()) -> TextStream:
        """Return a new TextStream for one answer.

        Args:
            continues: The text continues a prompt.
            keep: Special tokens to show in its text.
        """
        return TextStream(self, continues=continues, keep=keep)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequest("prompt", f"text is expected, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest("prompt", f"is not valid Unicode ({error.reason} at {error.start})") from error
        # verbose=False: no warnings about lengths on standard error; admission checks these.
        ids = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return [int(token) for token in ids]


# ---------------------------------------------------------------------------------------------------------- loading


def _missing(error: ImportError) -> Unavailable:
    return Unavailable(f"text needs the extra `text` ({error}): {install_command('text')}")


def _transformers() -> ModuleType:
    # Without torch, transformers warns at import that models are not available, which is irrelevant for a client.
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(quiet)
    os.environ[quiet] = "1"
    try:
        with quick_import():
            import transformers
    except ImportError as error:
        raise _missing(error) from error
    finally:
        if before is None:
            del os.environ[quiet]
    module: ModuleType = transformers
    return module


def _from_folder(transformers: ModuleType, path: Path) -> Any:
    if _is_whole(path):
        return transformers.PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    # trust_remote_code is explicit, because transformers would otherwise ask on the terminal.
    return transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def _is_whole(path: Path) -> bool:
    """Return whether AutoTokenizer would read tokenizer.json and run no code of the model's family.

    AutoTokenizer imports torch where it is installed: seconds of processor time in each client.
    """
    if not (path / "tokenizer.json").is_file():
        return False
    config, settings = (_document(path / name) for name in ("config.json", "tokenizer_config.json"))
    return (
        config.get("model_type") in _PLAIN_FAMILIES
        and settings.get("tokenizer_class") in _PLAIN_CLASSES
        and "auto_map" not in settings
    )


def _document(path: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one if there is none, which AutoTokenizer explains."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _from_gguf(path: Path) -> Any:
    """Load a GGUF file's tokenizer like AutoTokenizer.from_pretrained(gguf_file=...), but without importing torch."""
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
    # As in transformers: sentencepiece files without the flag mean yes, and Gemma 4's template writes <bos> itself.
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", True if kind == "llama" else None)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token")
    flags = {"add_bos_token": False if kind == "gemma4" else add_bos, "add_eos_token": add_eos}
    settings.update({name: flag for name, flag in flags.items() if flag is not None})
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=metadata.get("tokenizer.chat_template"), **settings
    )


def _gguf_converter() -> tuple[Any, dict[str, str]]:
    """Return transformers' converter of GGUF vocabularies and its names of the metadata."""
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as module
    except ImportError:  # its place before 5.23
        try:
            from transformers.integrations import ggml as module
        except ImportError as error:
            raise Unavailable(f"this version of transformers cannot read GGUF tokenizers ({error})") from error
    return module.convert_gguf_tokenizer, module.GGUF_TOKENIZER_MAPPING["tokenizer"]


def _split_digits(backend: Any) -> None:
    """Prepend the split into single digits, unless it exists already.

    It matters where two or more spaces precede a digit. GPT-2's split alone separates the last space from the others,
    so that "  1" becomes two tokens of one space, and a digit, instead of one token of two spaces, and a digit.
    """
    from tokenizers import pre_tokenizers

    present = backend.pre_tokenizer
    described = "" if present is None else json.loads(present.__getstate__())
    if '"individual_digits": true' in json.dumps(described):
        return
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = digits if present is None else pre_tokenizers.Sequence([digits, present])
