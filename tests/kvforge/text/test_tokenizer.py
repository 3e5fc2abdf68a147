"""Text in and out. Tests marked `model` use the real vocabulary, the others build small ones by hand."""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvforge.process.installation import install_command

pytest.importorskip("transformers", reason="the text extra is not installed")

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvforge.models.gguf_header import read_metadata
from kvforge.protocol.errors import InvalidRequest, ModelNotFound, Unavailable, UnsupportedModel
from kvforge.text.tokenizer import TextStream, Tokenizer

SAMPLE = json.loads((Path(__file__).parents[2] / "data" / "smollm2_sample.json").read_text())
UNICODE = "naïve café — 日本語 👩‍👩‍👧 \N{COMBINING ACUTE ACCENT} مرحبا\t\r\n  end"


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf(values: dict[str, Any]) -> bytes:
    """Write a GGUF file with metadata and no tensors."""
    out = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    for key, value in values.items():
        out += string(key)
        match value:
            case bool():
                out += struct.pack("<I?", 7, value)
            case int():
                out += struct.pack("<II", 4, value)
            case str():
                out += struct.pack("<I", 8) + string(value)
            case [int(), *_]:
                out += struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
            case _:
                out += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(string(item) for item in value)
    return out


def tiny_gguf(**changes: Any) -> bytes:
    """Byte-level vocabulary: every byte, two and three spaces, and one control token (id 0)."""
    merges = ["Ġ Ġ", "ĠĠ Ġ"]
    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "ĠĠĠ"]
    values = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
    }
    values.update({key.replace("__", "."): value for key, value in changes.items()})
    return gguf({key: value for key, value in values.items() if value is not None})


@pytest.fixture
def tiny(tmp_path: Path) -> Tokenizer:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf())
    return Tokenizer.load(path)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


def sentencepiece() -> Tokenizer:
    """Return a vocabulary like Llama 2's: a replaced space, byte fallback, a dropped first space."""
    pieces = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁",
        "▁Paris",
        "Paris",
        "▁is",
        "é",
        "!",
    ]
    backend = Backend(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>"), "by hand")


def id_of(tokenizer: Tokenizer, piece: str) -> int:
    token = tokenizer._tokenizer.convert_tokens_to_ids(piece)
    assert isinstance(token, int)
    return token


def streamed(stream: TextStream, ids: list[int], chunk: int = 1) -> str:
    parts = [stream.push(ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
    return "".join(parts) + stream.finish()


# ------------------------------------------------------------------------------------------------ the real vocabulary


@pytest.mark.model
@pytest.mark.parametrize("case", SAMPLE["cases"], ids=[case["id"] for case in SAMPLE["cases"]])
def test_prompts_get_exactly_the_reference_ids(smollm2: Tokenizer, case: dict[str, Any]) -> None:
    assert smollm2.encode(case["text"]) == case["prompt_tokens"]
    assert smollm2.decode(case["prompt_tokens"]) == case["text"].replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert streamed(smollm2.stream(), case["tokens"]) == smollm2.decode(case["tokens"])


@pytest.mark.model
@pytest.mark.parametrize("text", ["a  1", "  42", "x   2024 y", "a 1", "12345", "no digits", "²  ½  ٣", "\n\n7\t8"])
def test_digits_are_split_as_the_pre_tokenizer_name_says(smollm2: Tokenizer, smollm2_path: Path, text: str) -> None:
    """Compared with the explicit pipeline: split off each digit, then GPT-2's split, then bytes, then the merges."""
    metadata = read_metadata(smollm2_path)
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert smollm2.encode(text) == backend.encode(text).ids
    assert smollm2.decode(smollm2.encode(text)) == text


@pytest.mark.model
def test_spaces_before_a_digit_stay_together(smollm2: Tokenizer) -> None:
    """Each digit is a separate token and the spaces before it are one token: llama.cpp splits on \\p{N} first."""
    one, two, three = (id_of(smollm2, piece) for piece in ("Ġ", "ĠĠ", "ĠĠĠ"))
    digit = {character: id_of(smollm2, character) for character in "0123456789"}
    assert smollm2.encode("a  1") == [id_of(smollm2, "a"), two, digit["1"]]
    assert smollm2.encode("  42") == [two, digit["4"], digit["2"]]
    year = [digit[character] for character in "2024"]
    assert smollm2.encode("x   2024 y") == [id_of(smollm2, "x"), three, *year, id_of(smollm2, "Ġy")]
    assert smollm2.encode("a 1") == [id_of(smollm2, "a"), one, digit["1"]]


@pytest.mark.model
def test_chat_follows_the_model_s_template(smollm2: Tokenizer) -> None:
    start, end = id_of(smollm2, "<|im_start|>"), id_of(smollm2, "<|im_end|>")
    ids = smollm2.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi  1"}])
    assert ids == [
        *[start, *smollm2.encode("system\nBe brief."), end, *smollm2.encode("\n")],
        *[start, *smollm2.encode("user\nHi  1"), end, *smollm2.encode("\n")],
        *[start, *smollm2.encode("assistant\n")],
    ]
    assert smollm2.chat("Hi  1") == smollm2.chat([{"role": "user", "content": "Hi  1"}])


@pytest.mark.model
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_a_stream_says_what_decode_says(smollm2: Tokenizer, chunk: int) -> None:
    generator = random.Random(1)
    for ids in (
        smollm2.encode(UNICODE),
        [0, 1, *smollm2.encode(" special <|im_end|> inside"), 2],
        [generator.randrange(smollm2.vocab_size) for _ in range(2000)],  # mostly broken characters
    ):
        assert streamed(smollm2.stream(), ids, chunk) == smollm2.decode(ids)


@pytest.mark.model
def test_no_half_character_is_ever_shown(smollm2: Tokenizer) -> None:
    stream = smollm2.stream()
    ids = smollm2.encode("👩 é")
    shown = [stream.push([token]) for token in ids]
    assert len(ids) > len("👩 é")
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(shown)
    assert "".join(shown) == "👩 é"
    assert shown[0] == ""
    assert stream.finish() == ""


@pytest.mark.model
def test_loading_needs_no_torch(smollm2_path: Path) -> None:
    """In a process without torch, as in an environment with only the text extra."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvforge.text.tokenizer import Tokenizer\n"
        "print(Tokenizer.load(sys.argv[1]).encode('a  1'))"
    )
    done = subprocess.run([sys.executable, "-c", program, smollm2_path], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[81, 256, 33]", done.stderr
    assert done.stderr == ""


# ------------------------------------------------------------------------------------------------ small vocabularies


def test_the_split_is_mended_only_where_the_name_asks_for_it(tmp_path: Path) -> None:
    lengths = {}
    for name in ("smollm", "gpt-2"):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(tiny_gguf(tokenizer__ggml__pre=name))
        lengths[name] = [len(Tokenizer.load(path).encode(text)) for text in ("a  1", "a 1", "a  b")]
    assert lengths == {"smollm": [3, 3, 4], "gpt-2": [4, 3, 4]}


def test_a_split_that_is_there_is_not_put_in_twice(tiny: Tokenizer) -> None:
    from kvforge.text.tokenizer import _split_digits

    backend = tiny._tokenizer.backend_tokenizer
    before = backend.pre_tokenizer.__getstate__()
    _split_digits(backend)
    assert backend.pre_tokenizer.__getstate__() == before
    assert before.count(b"individual_digits") == 1


def test_encode_and_decode_are_inverse(tiny: Tokenizer) -> None:
    assert tiny.decode(tiny.encode(UNICODE)) == UNICODE
    assert tiny.encode("") == []
    assert tiny.decode([]) == ""
    assert tiny.decode([0]) == ""  # special
    assert tiny.decode([tiny.vocab_size + 5]) == ""


def test_without_a_template_the_contents_are_encoded_line_by_line(tiny: Tokenizer) -> None:
    assert not tiny.has_chat_template
    assert tiny.chat("hello") == tiny.encode("hello")
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert tiny.chat(messages) == tiny.encode("a\nb")


def test_conversations_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "strict.gguf"
    path.write_bytes(tiny_gguf(tokenizer__chat_template="{{ raise_exception('roles must alternate') }}"))
    tokenizer = Tokenizer.load(path)
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        tokenizer.chat("hello")
    for messages in ([], [{"content": "no role"}], [{"role": "user"}], ["text"]):
        with pytest.raises(InvalidRequest, match="messages"):
            tokenizer.chat(messages)  # type: ignore[arg-type]


def test_what_is_no_text_and_no_token_is_refused(tiny: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="not int"):
        tiny.encode(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="Unicode"):
        tiny.encode("half \ud83d")
    for ids in ([-1], [1 << 31], [3, -7]):
        with pytest.raises(InvalidRequest, match="token id"):
            tiny.decode(ids)
        with pytest.raises(InvalidRequest, match="token id"):
            tiny.stream().push(ids)


def test_a_finished_stream_takes_nothing_more(tiny: Tokenizer) -> None:
    stream = tiny.stream()
    assert stream.push(tiny.encode("é")[:1]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"  # its second byte is missing
    with pytest.raises(InvalidRequest, match="finished"):
        stream.push([1])


def test_sentencepiece_spaces_and_byte_fallback() -> None:
    tokenizer = sentencepiece()
    paris, is_, two = (id_of(tokenizer, piece) for piece in ("▁Paris", "▁is", "▁▁"))
    euro = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in "€".encode()]
    ids = [id_of(tokenizer, "<s>"), paris, is_, *euro, two, paris]
    assert tokenizer.decode(ids) == streamed(tokenizer.stream(), ids) == "Paris is€   Paris"
    assert streamed(tokenizer.stream(continues=True), ids) == " Paris is€   Paris"
    stream = tokenizer.stream()
    assert [stream.push([token]) for token in euro] == ["", "", "€"]
    for first in ([two, paris], [id_of(tokenizer, "▁"), two], [id_of(tokenizer, "Paris"), two]):
        assert streamed(tokenizer.stream(), first) == tokenizer.decode(first)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_decoders(scheme: str) -> None:
    tokenizer = sentencepiece()
    tokenizer._tokenizer.backend_tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = Tokenizer(tokenizer._tokenizer, "by hand")
    for pieces in (["▁▁", "▁Paris"], ["<s>", "▁Paris", "▁is", "!"], ["Paris", "▁▁"]):
        ids = [id_of(tokenizer, piece) for piece in pieces]
        assert streamed(tokenizer.stream(), ids) == tokenizer.decode(ids)


def test_a_decoder_of_another_family_is_right_if_late() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "un": 1, "##believ": 2, "##able": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"), "by hand")
    stream = tokenizer.stream()
    assert [stream.push([token]) for token in (1, 2, 3)] == ["", "", ""]
    assert stream.finish() == "unbelievable"


def test_hugging_face_folders(tiny: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    tiny._tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = Tokenizer.load(folder)
    assert loaded.encode("a  1") == tiny.encode("a  1")
    assert loaded.decode(loaded.encode(UNICODE)) == UNICODE
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match="no tokenizer"):
        Tokenizer.load(folder)


def test_files_without_a_usable_tokenizer_are_refused(tmp_path: Path) -> None:
    whole = tiny_gguf()
    path = tmp_path / "broken.gguf"
    for content, reason in [
        (tiny_gguf(tokenizer__ggml__tokens=None), "carries no tokenizer"),
        (tiny_gguf(tokenizer__ggml__model="bert"), "cannot be loaded"),
        (tiny_gguf(tokenizer__ggml__eos_token_id=99_999), "cannot be loaded"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 1), "version 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "cannot be read"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "cannot be read"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UnsupportedModel, match=reason):
            Tokenizer.load(path)
    for length in range(4, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(UnsupportedModel):
            Tokenizer.load(path)
    with pytest.raises(ModelNotFound):
        Tokenizer.load(tmp_path / "absent.gguf")


def test_hostile_metadata_ends_in_a_typed_error(tmp_path: Path) -> None:
    """Any bytes after the magic are read or refused, and no memory is allocated from an unchecked length."""
    generator = random.Random(2)
    whole = bytearray(tiny_gguf())
    path = tmp_path / "fuzzed.gguf"
    refused = 0
    for _ in range(200):
        broken = bytearray(whole)
        for _ in range(3):
            broken[generator.randrange(4, min(400, len(broken)))] = generator.randrange(256)
        path.write_bytes(broken)
        try:
            assert isinstance(read_metadata(path), dict)
        except UnsupportedModel:
            refused += 1
    assert refused > 20


def test_the_extra_is_named_when_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf())
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Unavailable, match=re.escape(install_command("text"))):
        Tokenizer.load(path)


# ---------------------------------------------------------------------------------------------- special tokens, kept


@pytest.mark.model
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_a_special_token_that_is_kept_stays_in_the_text(smollm2: Tokenizer, chunk: int) -> None:
    ids = smollm2.encode("<|im_start|>é<|im_end|> b<|endoftext|>")
    assert streamed(smollm2.stream(), ids, chunk) == "é b"
    keep = frozenset({"<|im_end|>", "<|of another model|>"})
    assert streamed(smollm2.stream(keep=keep), ids, chunk) == "é<|im_end|> b" == smollm2.decode(ids, keep=keep)


@pytest.mark.model
def test_streams_that_keep_the_same_tokens_share_their_pieces(smollm2: Tokenizer) -> None:
    keep = frozenset({"<|im_end|>"})
    pieces = smollm2.pieces_of(keep)
    assert pieces is not None
    assert smollm2.pieces_of(keep | {"<|of another model|>"}) is pieces
    assert smollm2.pieces_of(frozenset({"<|of another model|>"})) is smollm2.pieces
    assert smollm2.special_tokens["<|im_end|>"] == id_of(smollm2, "<|im_end|>")


def test_what_follows_a_kept_token_keeps_its_space_as_decode_has_it() -> None:
    """A sentencepiece vocabulary drops the text's first space, and a visible special token counts as first."""
    tokenizer = sentencepiece()
    ids = [id_of(tokenizer, piece) for piece in ("<s>", "▁Paris", "▁is", "<s>", "▁Paris")]
    keep = frozenset({"<s>"})
    assert streamed(tokenizer.stream(keep=keep), ids) == tokenizer.decode(ids, keep=keep) == "<s> Paris is<s> Paris"
    assert streamed(tokenizer.stream(), ids) == tokenizer.decode(ids) == "Paris is Paris"
