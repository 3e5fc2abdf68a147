"""A table of tokens gives the text that the tokenizer gives which it was made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the text extra is not installed")

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import kvforge.text.token_table as module
from kvforge.protocol.errors import InvalidRequest
from kvforge.text.stream import TextStream, byte_alphabet
from kvforge.text.token_table import NotTabularError, TokenTable
from kvforge.text.tokenizer import Tokenizer
from tests.gateway import scripted
from tests.kvforge.text.test_tokenizer import SAMPLE, sentencepiece, tiny_gguf

FOLLOWING = 3  # ids behind the last one, which have no token


def gguf(folder: Path) -> Tokenizer:
    path = folder / "tiny.gguf"
    path.write_bytes(tiny_gguf(tokenizer__chat_template="{{ messages[0].content }}"))
    return Tokenizer.load(path)


def metaspace(scheme: str) -> Callable[[Path], Tokenizer]:
    def made(folder: Path) -> Tokenizer:
        inner = sentencepiece()._tokenizer
        inner.backend_tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
        return Tokenizer(inner, "by hand")

    return made


def added(folder: Path) -> Tokenizer:
    """Ids without a token, tokens that were added in plain spelling, and a special one that is in the vocabulary."""
    backend = Backend(models.BPE({"a": 0, "Ġ": 1, "Ã": 4, "©": 5, "<s>": 9, "": 11}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<ü>", special=True)])
    backend.add_tokens([AddedToken("日 本", special=False), AddedToken("a", special=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"), "by hand")


def gemma(folder: Path) -> Tokenizer:
    """Byte fallback with a decoder that drops no space."""
    inner = sentencepiece()._tokenizer
    inner.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
    inner.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer(inner, "by hand")


MAKERS: dict[str, Callable[[Path], Tokenizer]] = {
    "gguf": gguf,
    "scripted": lambda _: scripted.tokenizer(),
    "sentencepiece": lambda _: sentencepiece(),
    "gemma": gemma,
    "added": added,
    **{f"metaspace-{scheme}": metaspace(scheme) for scheme in ("always", "first", "never")},
}


@pytest.fixture(scope="module", params=MAKERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, TokenTable]:
    """A tokenizer, and its table as another process has it."""
    tokenizer = MAKERS[request.param](tmp_path_factory.mktemp("tokenizer"))
    return tokenizer, TokenTable.from_bytes(tokenizer.table().to_bytes())


def ids_of(tokenizer: Tokenizer) -> range:
    return range(max(tokenizer._tokenizer.get_vocab().values()) + 1 + FOLLOWING)


def parts(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [*(stream.push([token]) for token in ids), stream.finish()]


def test_every_token_is_the_same(pair: tuple[Tokenizer, TokenTable]) -> None:
    tokenizer, table = pair
    assert table.special_tokens == tokenizer.special_tokens
    assert table.chat_template == tokenizer.chat_template
    for keep in (frozenset[str](), frozenset(tokenizer.special_tokens), frozenset({"of another model"})):
        pieces = tokenizer.pieces_of(keep)
        assert pieces is not None
        for token in ids_of(tokenizer):
            assert table.spelled(token) == tokenizer.spelled(token)
            assert table.pieces_of(keep).bytes_of(token) == pieces.bytes_of(token)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_stream_is_the_same(pair: tuple[Tokenizer, TokenTable], data: st.DataObject) -> None:
    tokenizer, table = pair
    every = ids_of(tokenizer)
    ids = data.draw(st.lists(st.one_of(st.sampled_from(every), st.sampled_from([*every][-12:])), max_size=40))
    keep = frozenset(data.draw(st.sets(st.sampled_from([*sorted(tokenizer.special_tokens), "of another model"]))))
    for continues in (False, True):
        right = parts(tokenizer.stream(continues=continues, keep=keep), ids)
        assert parts(table.stream(continues=continues, keep=keep), ids) == right
    assert table.decode(ids, keep=keep) == "".join(parts(tokenizer.stream(keep=keep), ids))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_what_was_a_text_is_decoded_as_the_tokenizer_decodes_it(pair: tuple[Tokenizer, TokenTable], text: str) -> None:
    tokenizer, table = pair
    ids = tokenizer.encode(text)
    assert table.decode(ids) == tokenizer.decode(ids)


@pytest.mark.model
def test_the_real_vocabulary(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    table = TokenTable.from_bytes(tokenizer.table().to_bytes())
    assert table.chat_template == tokenizer.chat_template
    assert table.special_tokens == tokenizer.special_tokens
    pieces = tokenizer.pieces_of()
    assert pieces is not None
    for token in ids_of(tokenizer):
        assert table.spelled(token) == tokenizer.spelled(token)
        assert table.pieces_of().bytes_of(token) == pieces.bytes_of(token)
    for case in SAMPLE["cases"]:
        assert table.decode(case["tokens"]) == tokenizer.decode(case["tokens"])


def test_streams_that_keep_the_same_tokens_share_their_pieces() -> None:
    table = sentencepiece().table()
    kept = table.pieces_of(frozenset({"<s>"}))
    assert table.pieces_of(frozenset({"<s>", "of another model"})) is kept
    assert table.pieces_of(frozenset({"of another model"})) is table.pieces_of()


def test_what_is_no_token_is_refused() -> None:
    table = sentencepiece().table()
    assert table.spelled(-1) == ""
    for ids in ([-1], [1 << 31]):
        with pytest.raises(InvalidRequest, match="token id"):
            table.decode(ids)


def test_a_tokenizer_without_a_table_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotTabularError, match="not one of the library"):
        Tokenizer(ByT5Tokenizer(), "slow").table()
    backend = Backend(models.WordPiece({"[UNK]": 0, "un": 1, "##able": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(NotTabularError, match="depends on the tokens beside them"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"), "words").table()
    monkeypatch.setattr(module, "TABLE_BYTES_MAX", 1500)
    table = sentencepiece().table  # its texts and their ends have more bytes
    with pytest.raises(NotTabularError, match="more than"):
        table()
    monkeypatch.setattr(module, "TABLE_BYTES_MAX", 1 << 20)
    whole = table()
    monkeypatch.setattr(module, "TABLE_BYTES_MAX", len(whole.to_bytes()) - 1)
    with pytest.raises(NotTabularError, match="more than"):
        whole.to_bytes()


@pytest.mark.parametrize("body", [b"", b"\xc0", b"{}", sentencepiece().table().to_bytes()[:-1]])
def test_bytes_that_are_no_table_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        TokenTable.from_bytes(body)


def test_the_alphabet_of_bytes_is_that_of_gpt2() -> None:
    assert byte_alphabet() == {character: byte for byte, character in bytes_to_unicode().items()}
