"""Multipart bodies, split at any byte."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvforge.gateway.batches.multipart import HEAD_BYTES_MAX, Content, MultipartReader, Part, boundary_of
from kvforge.protocol.errors import InvalidRequest

FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: x/y\r\n\r\n'
FIELD = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'


def read(body: bytes, cuts: list[int]) -> list[tuple[Part, bytes]]:
    reader, found = MultipartReader(b"b"), list[tuple[Part, bytes]]()
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    for begin, end in itertools.pairwise(places):
        for each in reader.feed(body[begin:end]):
            if isinstance(each, Part):
                found.append((each, b""))
            else:
                assert isinstance(each, Content)
                found[-1] = (found[-1][0], found[-1][1] + each.data)
    assert reader.ended
    return found


@given(st.binary(max_size=60) | st.sampled_from([b"\r\n--", b"\r\n--a\r\n", b"\r", b"--b"]), st.lists(st.integers(0)))
def test_a_body_is_the_same_however_it_is_cut(content: bytes, cuts: list[int]) -> None:
    if b"\r\n--b" in content:
        return
    body = b"preamble\r\n" + FIELD + FILE + content + b"\r\n--b--\r\nepilogue"
    assert read(body, cuts) == [(Part("purpose", None), b"batch"), (Part("file", "a.jsonl"), content)]


def test_quotation_marks_in_names() -> None:
    body = b'--b\r\ncontent-disposition: form-data; name="a"; filename="x%22\\"y"\r\n\r\n\r\n--b--'
    assert read(body, []) == [(Part("a", 'x""y'), b"")]


@pytest.mark.parametrize(
    "body",
    [
        b"--b\r\nx: y\r\n\r\n",
        b"--bx",
        b"--b\r\n" + b"x" * (HEAD_BYTES_MAX + 1),
        b"".join(b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n' for _ in range(40)),
    ],
)
def test_a_damaged_body_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="body"):
        MultipartReader(b"b").feed(body + b" " * 10)


def test_the_boundary_is_read_from_the_content_type() -> None:
    assert boundary_of("multipart/form-data; boundary=ab-1") == b"ab-1"
    assert boundary_of('Multipart/Form-Data; charset=utf-8; boundary="a b"') == b"a b"
    for wrong in ("", "application/json", "multipart/form-data", "multipart/mixed; boundary=a"):
        with pytest.raises(InvalidRequest, match="content-type"):
            boundary_of(wrong)
