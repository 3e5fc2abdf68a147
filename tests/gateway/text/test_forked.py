"""A text helper that a forked gateway forks is like one of a fresh interpreter."""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

import httpx

from kvforge.gateway.text.pool import ENTRY
from tests.gateway.serve.test_serving import ASKED, making_tokens_up
from tests.gateway.served import Gateway
from tools.chaos import tokenizer

END_MS = 60_000


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_forked_helper_has_its_command_line_descriptors_group_and_leash(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.write(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    settings = f'tokenizer = "{folder}"\nnames = ["m"]\n'
    with making_tokens_up(0) as runtime, Gateway(runtime, tmp_path, settings) as gateway:
        assert httpx.post(f"{gateway.url}/v1/completions", json={**ASKED, "prompt": "abc"}).status_code == 200
        (first,) = children(gateway.process.pid)
        command = Path(f"/proc/{first}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        *before, descriptor = map(os.fsdecode, command)
        assert before == [sys.executable, "-P", str(ENTRY), "kvforge.gateway.text"]
        assert {path.name for path in Path(f"/proc/{first}/fd").iterdir()} == {"0", "1", "2", descriptor}
        assert os.getpgid(first) == first
        (second, *_) = children(first)  # it forks the others
        ends = [os.pidfd_open(pid) for pid in (first, second)]
        os.kill(gateway.process.pid, signal.SIGKILL)
        try:
            for end in ends:
                assert select.select([end], [], [], END_MS / 1000)[0], "a helper outlives its gateway"
        finally:
            for end in ends:
                os.close(end)
