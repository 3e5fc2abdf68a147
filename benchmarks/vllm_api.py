"""vLLM's API server over an engine without cost: the reference for `benchmarks.gateway` where vLLM is installed.

    PYTHON -m benchmarks.vllm_api --port PORT --model FOLDER [--pace TOKENS_PER_S]

Source: vllm 0.33.0. All before the engine is vLLM's own, started as `vllm serve` starts one API process: its argument
parser, its application on uvicorn with uvloop, its protocol, its input processor, its output processor and detokenizer,
its streams. The client of its engine process is replaced by one that invents tokens as the load harness's null
server does: all at once, or with --pace one for each request in step. It runs in the same process, so the figures
exclude sockets and the engine's encoding, which kvforge's gateway pays for. Statistics and the log of each request are
off; a server has statistics on by default.

vLLM is no dependency: it is imported only inside functions. Without a GPU, vLLM's CUDA package is set to the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

CONTEXT_TOKENS_MAX = 4096


class NullCore:
    """The engine as vLLM's API process sees it. pace: tokens a second of each request, in step; 0: all at once."""

    def __init__(self, pace: float, vocabulary: int) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        self._output, self._outputs, self._length = EngineCoreOutput, EngineCoreOutputs, FinishReason.LENGTH
        self._gap_s = 1 / pace if pace else 0.0
        self._vocabulary = vocabulary
        self._running: dict[str, list[int]] = {}  # tokens made, of how many, the first one's id
        self._ready: asyncio.Queue[Any] = asyncio.Queue()
        self._accepted = 0
        self._stepping: asyncio.TimerHandle | None = None
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)

    async def add_request_async(self, request: Any) -> None:
        """Takes it."""
        self._accepted += 1
        tokens = request.sampling_params.max_tokens
        if not self._gap_s:
            made = [(self._accepted + at) % self._vocabulary for at in range(tokens)]
            self._ready.put_nowait(self._outputs(outputs=[self._made(request.request_id, made, ended=True)]))
            return
        self._running[request.request_id] = [0, tokens, self._accepted]
        if self._stepping is None:
            self._again(asyncio.get_running_loop().time())

    def _again(self, last: float) -> None:
        loop = asyncio.get_running_loop()
        due = max(loop.time(), last + self._gap_s)
        self._stepping = loop.call_at(due, self._step, due)

    def _step(self, due: float) -> None:
        outputs = []
        for request_id, row in tuple(self._running.items()):
            made, tokens, first = row
            row[0] = made + 1
            ended = row[0] == tokens
            if ended:
                del self._running[request_id]
            outputs.append(self._made(request_id, [(first + made) % self._vocabulary], ended=ended))
        if outputs:
            self._ready.put_nowait(self._outputs(outputs=outputs))
        if self._running:
            self._again(due)
        else:
            self._stepping = None

    def _made(self, request_id: str, tokens: list[int], *, ended: bool) -> Any:
        reason = self._length if ended else None
        return self._output(request_id=request_id, new_token_ids=tokens, finish_reason=reason)

    async def get_output_async(self) -> Any:
        """Return the new outputs of all requests."""
        return await self._ready.get()

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        """Drop the requests."""
        for request_id in request_ids:
            self._running.pop(request_id, None)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Text."""
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """Do nothing: there is no such cache."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: there are no resources to release."""


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_api")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--pace", type=float, default=0.0)
    options = parser.parse_args(argv)
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    import uvloop
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.core_client import EngineCoreClient

    def null_core(vllm_config: Any, **_: Any) -> NullCore:
        return NullCore(options.pace, vllm_config.model_config.get_vocab_size())

    EngineCoreClient.make_async_mp_client = staticmethod(null_core)
    words = [
        "--model",
        options.model,
        "--served-model-name",
        "null",
        "--host",
        "127.0.0.1",
        "--port",
        str(options.port),
    ]
    words += ["--max-model-len", str(CONTEXT_TOKENS_MAX), "--disable-log-stats", "--disable-uvicorn-access-log"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
