"""Helper processes with real tokenizers and hostile chat templates."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from kvforge.gateway.text.inline import InlineText
from kvforge.gateway.text.jobs import FIRST_BYTES_MAX, HEAD_BYTES, Load, TextLimits, framed
from kvforge.gateway.text.pool import TextPool
from kvforge.protocol.errors import (
    DeadlineExceeded,
    InvalidConfiguration,
    InvalidRequest,
    QueueFull,
    UnsupportedModel,
)
from kvforge.text.token_table import TokenTable
from kvforge.text.tokenizer import Tokenizer
from tests.standstill import HOUR_S, Standstill, set_forward
from tools.chaos import tokenizer

T = TypeVar("T")
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
# A counter set by a user's message: hostile input, or a faulty template.
LOOPS = (
    "{% if 'loop' in messages[0].content %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
)
# One operation that Python does not interrupt.
POWER = (
    "{% if 'power' in messages[0].content %}"
    "{{ (10 ** (10 ** (4 + (messages[0].content | length)))) is odd }}{% endif %}"
)
GROWS = (
    "{% if 'grow' in messages[0].content %}{% set n = namespace(t='x' * 1000) %}"
    "{% for a in range(40) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t | length }}{% endif %}"
)
DEADLINE_S = 120.0


def run(work: Coroutine[Any, Any, T]) -> T:
    async def within() -> T:
        async with asyncio.timeout(DEADLINE_S):
            return await work

    return asyncio.run(within())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.write(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "chat_template": LOOPS + POWER + GROWS + PLAIN,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_standstill_of_the_gateway_is_no_time_that_a_text_took(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Standstill(monkeypatch)

    async def check() -> None:
        pool = TextPool(str(folder), TextLimits())
        try:
            await pool.start()
            job = asyncio.ensure_future(pool.encode("abc", special=False))
            while pool._waiting or not pool._jobs:  # until a helper works on it
                await asyncio.sleep(0)
            assert not job.done()
            clock.stand_still()
            set_forward(monkeypatch, asyncio.get_running_loop(), HOUR_S)
            assert len(await job) == 3
        finally:
            await pool.close()

    asyncio.run(check())


def test_what_it_gives_is_what_the_tokenizer_gives(folder: Path) -> None:
    async def check() -> None:
        pool = TextPool(str(folder), TextLimits())
        inline = InlineText(Tokenizer.load(folder))
        try:
            ids = await pool.encode("Grüße ☕", special=False)
            assert ids.tolist() == (await inline.encode("Grüße ☕", special=False)).tolist()
            assert ids.dtype == np.int32
            assert await pool.decode(ids) == await inline.decode(ids)
            for whole in (False, True):
                came = await pool.render(user("hi"), {"add_generation_prompt": True}, whole=whole)
                right = await inline.render(user("hi"), {"add_generation_prompt": True}, whole=whole)
                assert (came[0].tolist(), came[1]) == (right[0].tolist(), right[1])
        finally:
            await pool.close()

    run(check())


def test_a_helper_loads_no_torch(folder: Path) -> None:
    async def check() -> None:
        pool = TextPool(str(folder), TextLimits())
        try:
            await pool.start()
            assert pool._first is not None
            mapped = Path(f"/proc/{pool._first._process.pid}/maps").read_text()
            assert "/tokenizers" in mapped
            assert "libtorch" not in mapped
        finally:
            await pool.close()

    run(check())


def test_a_table_of_many_messages_arrives_whole(tmp_path: Path) -> None:
    vocabulary = {f"{'x' * 60}{number}": number for number in range(3000)}
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')

    async def check() -> None:
        pool = TextPool(str(tmp_path), TextLimits())
        try:
            table = await pool.start()
        finally:
            await pool.close()
        assert isinstance(table, TokenTable)
        assert len(table.to_bytes()) > 2 * FIRST_BYTES_MAX
        assert [table.spelled(number) for number in range(3000)] == [*vocabulary]

    run(check())


def test_a_template_without_end_costs_its_own_request_alone(folder: Path) -> None:
    """Others are served while it runs: the pool has another helper, and the event loop is free."""

    async def check() -> None:
        limits = TextLimits(template_s=0.5, memory_bytes_max=256 << 20)
        pool = TextPool(str(folder), limits, processes=2)
        try:
            await pool.start()
            for word in ("loop", "power", "grow"):
                hostile = asyncio.ensure_future(pool.render(user(word), {}))
                served = 0
                while not hostile.done():
                    ids, _ = await pool.render(user("hi"), {})
                    served += len(ids) > 0
                with pytest.raises(InvalidRequest, match=r"messages: .*(template_s|text_memory_bytes_max)"):
                    await hostile
                assert served > 0, word
                assert (await pool.render(user("hi"), {}))[1].startswith("user: hi")
        finally:
            await pool.close()

    run(check())


def test_a_text_of_too_many_bytes_is_refused_by_its_size(folder: Path) -> None:
    async def check() -> None:
        pool = TextPool(str(folder), TextLimits(context_tokens_max=100))
        try:
            await pool.start()
            with pytest.raises(InvalidRequest, match=r"prompt\[3\]: is too long: 10000 bytes"):
                await pool.encode("x" * 10_000, field="prompt[3]")
            with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content: is too long"):
                await pool.render([*user("hi"), *user("x" * 10_000)], {})
            parts = [{"role": "user", "content": [{"type": "text", "text": "x" * 10_000}]}]
            with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content: is too long"):
                await pool.render(parts, {})
            assert len(await pool.encode("x" * 90, special=False)) == 90
        finally:
            await pool.close()

    run(check())


def test_a_template_that_multiplies_a_text_is_bounded_too(folder: Path) -> None:
    file = folder / "many.jinja"
    file.write_text("{{ messages[0].content * 1000 }}")

    async def check() -> None:
        pool = TextPool(str(folder), TextLimits(text_bytes_max=10_000), template_file=str(file))
        try:
            with pytest.raises(InvalidRequest, match=r"messages: is too long.*text_bytes_max"):
                await pool.render(user("x" * 1000), {})
        finally:
            await pool.close()

    run(check())


def test_a_long_text_of_too_many_tokens_is_counted_before_all_of_it_is_held(folder: Path) -> None:
    inline = InlineText(Tokenizer.load(folder), TextLimits(text_bytes_max=1 << 30, context_tokens_max=1000))
    with pytest.raises(InvalidRequest, match=r"more than 2000 tokens"):
        asyncio.run(inline.encode("x" * (3 << 20)))


def test_what_waits_is_bounded(folder: Path) -> None:
    async def check() -> None:
        pool = TextPool(str(folder), TextLimits(template_s=0.3), processes=1, waiting_max=2)
        try:
            await pool.start()
            jobs = [asyncio.ensure_future(pool.render(user("loop"), {})) for _ in range(4)]
            done = await asyncio.gather(*jobs, return_exceptions=True)
            assert sum(isinstance(one, QueueFull) for one in done) >= 1
            assert all(isinstance(one, QueueFull | InvalidRequest) for one in done)
            assert (await pool.render(user("hi"), {}))[1]
        finally:
            await pool.close()

    run(check())


def test_a_job_that_waits_too_long_is_given_up(folder: Path) -> None:
    async def check() -> None:
        pool = TextPool(str(folder), TextLimits(template_s=600.0, text_s=0.5), processes=1)
        try:
            await pool.start()
            with pytest.raises(DeadlineExceeded, match="text_s"):
                await pool.render(user("loop"), {})
            pool._limits = TextLimits()  # on a busy machine the next helper takes longer to start
            assert len(await pool.encode("x", special=False)) == 1
        finally:
            await pool.close()

    run(check())


def test_a_caller_that_hangs_up_leaves_its_helper_whole(folder: Path) -> None:
    async def check() -> None:
        pool = TextPool(str(folder), TextLimits(), processes=1)
        try:
            await pool.start()
            for _ in range(3):
                job = asyncio.ensure_future(pool.encode("x" * 5000, special=False))
                await asyncio.sleep(0)
                job.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await job
            assert len(await pool.encode("abc", special=False)) == 3
        finally:
            await pool.close()

    run(check())


def test_helpers_that_are_killed_are_replaced(folder: Path) -> None:
    async def check() -> None:
        pool = TextPool(str(folder), TextLimits(), processes=1)
        try:
            table = await pool.start()
            assert len(await pool.encode("abc", special=False)) == 3
            os.kill(pool._idle[0].pid, signal.SIGKILL)
            assert len(await pool.encode("abc", special=False)) == 3
            first = pool._first
            assert first is not None
            first._process.kill()
            first._process.wait()
            assert len(await pool.encode("abc", special=False)) == 3
            assert pool._first is not first
            assert isinstance(table, TokenTable)
            assert await pool.start() is table  # the one that took its place was not asked for another
        finally:
            await pool.close()

    run(check())


def test_nothing_is_left_when_it_is_closed(folder: Path) -> None:
    async def check() -> list[int]:
        pool = TextPool(str(folder), TextLimits())
        await pool.encode("abc")
        assert pool._first is not None
        processes = [pool._first._process.pid, *(helper.pid for helper in pool._idle)]
        await pool.close()
        return processes

    for process in run(check()):
        assert not Path(f"/proc/{process}").exists()


@pytest.mark.parametrize(("template", "error"), [("", UnsupportedModel), ("/nowhere.jinja", InvalidConfiguration)])
def test_a_tokenizer_that_cannot_be_loaded_is_said(
    tmp_path: Path, folder: Path, template: str, error: type[Exception]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    pool_source = str(folder if template else tmp_path)

    async def check() -> None:
        pool = TextPool(pool_source, TextLimits(), template_file=template)
        try:
            with pytest.raises(error):
                await pool.start()
        finally:
            await pool.close()

    run(check())


def test_a_helper_whose_gateway_was_killed_as_it_loaded_ends_quietly(folder: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        load = Load(source=str(folder), template_file="", limits=TextLimits())
        ours.send(framed(load)[HEAD_BYTES:])
        ours.close()  # before the helper has read it: its answer has no reader
        code = f"from kvforge.gateway.text.process import main; main({theirs.fileno()})"
        command = [sys.executable, "-c", code]
        descriptors = [theirs.fileno()]
        ran = subprocess.run(command, pass_fds=descriptors, capture_output=True, timeout=DEADLINE_S, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")
