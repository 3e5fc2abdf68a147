"""From a served model to its prompts: present, missing and unreadable files."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from kvforge.gateway.config import Settings
from kvforge.gateway.generate.loading import prompts_of
from kvforge.gateway.text.pool import TextPool
from kvforge.protocol.errors import InvalidConfiguration, KvforgeError
from kvforge.protocol.messages import ModelInfo
from kvforge.text.token_table import TokenTable
from kvforge.text.tokenizer import Tokenizer
from tools.chaos import tokenizer

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer.write(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": PLAIN}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def info(source: str) -> ModelInfo:
    return ModelInfo(
        name="m", source=source, architecture="none", fingerprint="0", vocab_size=256, context_tokens_max=64
    )


def test_text_is_tokenised_and_the_template_was_looked_at(folder: Path) -> None:
    async def check() -> None:
        prompts, format_ = await prompts_of(info(str(folder)), Settings())
        try:
            assert format_.name == "plain"
            assert "no place for tools" in prompts.needs.tools_problem
            assert len((await prompts.chat([{"role": "user", "content": "abc"}])).ids) == 3
        finally:
            await prompts.close()

    asyncio.run(check())


def test_a_helper_has_loaded_the_tokenizer_and_this_process_does_not_block_its_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, start, order = Tokenizer.load, TextPool.start, list[str]()

    def loading(source: str) -> Tokenizer:
        order.append("here")
        return load(source)

    async def starting(pool: TextPool) -> TokenTable | str:
        asyncio.get_running_loop().call_soon(order.append, "the loop runs")
        table = await start(pool)
        order.append("helper")
        return table

    monkeypatch.setattr(Tokenizer, "load", loading)
    monkeypatch.setattr(TextPool, "start", starting)

    async def check() -> None:
        prompts, _ = await prompts_of(info(str(folder)), Settings())
        try:
            assert len(await prompts.text("abc", special=False)) == 3
        finally:
            await prompts.close()

    asyncio.run(check())
    assert order == ["the loop runs", "helper"]


def test_a_gateway_decodes_and_names_tokens_without_the_libraries_of_its_tokenizer(folder: Path) -> None:
    """In a process of its own, with the modules of the whole gateway."""
    program = (
        "import asyncio, sys\n"
        "import kvforge.gateway.app, kvforge.gateway.serve.process\n"
        "from kvforge.gateway.config import Settings\n"
        "from kvforge.gateway.generate.loading import prompts_of\n"
        "from kvforge.protocol.messages import ModelInfo\n"
        "async def main():\n"
        "    info = ModelInfo(name='m', source=sys.argv[1], architecture='none', fingerprint='0', vocab_size=256,\n"
        "                     context_tokens_max=64)\n"
        "    prompts, _ = await prompts_of(info, Settings())\n"
        "    ids = (await prompts.text('abc', special=False)).tolist()\n"
        "    stream = prompts.stream()\n"
        "    print(stream.push(ids) + stream.finish(), prompts.spelled(ids[0]), prompts.name_of(2))\n"
        "    await prompts.close()\n"
        "asyncio.run(main())\n"
        "print(sorted({'torch', 'transformers', 'tokenizers'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["abc ('a', b'a') </s>", "[]"], done.stderr


def test_a_tokenizer_without_a_table_is_loaded_here_and_the_reason_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "un": 1, "##able": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    file = tmp_path / "named.jinja"
    file.write_text(PLAIN)

    async def check() -> None:
        prompts, _ = await prompts_of(info(str(tmp_path)), Settings(chat_template=str(file)))
        try:
            assert prompts.template == PLAIN
            ids = (await prompts.text("unable", special=False)).tolist()
            stream = prompts.stream()
            assert (ids, stream.push(ids) + stream.finish()) == ([1, 2], "unable")
        finally:
            await prompts.close()

    asyncio.run(check())
    assert "loads the tokenizer itself: the text of its tokens depends on the tokens beside them" in caplog.text


def test_a_named_template_is_the_one_that_is_looked_at(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "named.jinja"
    file.write_text(PLAIN + "!")

    async def check() -> None:
        prompts, _ = await prompts_of(info(str(folder)), Settings(chat_template=str(file)))
        await prompts.close()
        assert prompts.template == PLAIN + "!"

    asyncio.run(check())


def test_a_template_that_is_no_text_is_refused_by_its_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "bytes.jinja"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfiguration, match=r"chat_template: .*bytes\.jinja.*utf-8"):
        asyncio.run(prompts_of(info(str(folder)), Settings(chat_template=str(file))))


def test_a_template_without_end_is_found_when_the_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "endless.jinja"
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    file.write_text(loop + PLAIN)

    async def check() -> None:
        settings = Settings(chat_template=str(file), template_s=0.2)
        prompts, _ = await prompts_of(info(str(folder)), settings)
        try:
            assert "template_s" in prompts.needs.problem
            assert len(await prompts.text("abc", special=False)) == 3
        finally:
            await prompts.close()

    asyncio.run(check())


@pytest.mark.parametrize("source", ["", "/nowhere/at/all"])
def test_a_model_whose_tokenizer_is_not_here_is_served_by_ids(source: str) -> None:
    prompts, format_ = asyncio.run(prompts_of(info(source), Settings()))
    assert not prompts.has_text
    assert format_.name == "plain"


def test_a_tokenizer_or_a_template_that_was_named_has_to_be_there(folder: Path) -> None:
    with pytest.raises(KvforgeError, match="nowhere"):
        asyncio.run(prompts_of(info(str(folder)), Settings(tokenizer="/nowhere/at/all")))
    with pytest.raises(InvalidConfiguration, match=r"chat_template: /nowhere.jinja"):
        asyncio.run(prompts_of(info(str(folder)), Settings(chat_template="/nowhere.jinja")))
