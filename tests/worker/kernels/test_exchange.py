"""The exchange between ranks on GPUs: the kernels with all ranks' memory in one process, and on two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvforge.worker.attention.triton_attention import is_interpreted
from kvforge.worker.device.device import open_device
from kvforge.worker.device.exchange import ATTENTION, INNER, LOGITS, PROGRAMS_MAX, Exchange, RankBuffers
from kvforge.worker.device.targets import TARGETS
from kvforge.worker.kernels import PlainOperations, sharing
from kvforge.worker.kernels.exchange import (
    DirectExchange,
    add_norm_of_ranks,
    join_of_ranks,
    norm_of_shares,
    sum_share,
)
from kvforge.worker.kernels.exchange_selftest import SimulatedRanks
from kvforge.worker.kernels.launching import LaunchSettings
from tests.worker.loading.several import several

DEVICE = open_device("auto")
PLACE = DEVICE.torch_device
runs_kernels = pytest.mark.skipif(
    not DEVICE.runs_kernels and not is_interpreted(), reason="needs a GPU or the interpreter"
)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
interpreted = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random numbers with NaN behind them."""
    numbers = torch.full((shape[0] + 2, *shape[1:]), float("nan"), dtype=dtype, device=PLACE)
    numbers[: shape[0]].normal_()
    return numbers[: shape[0]]


def summed(peers: RankBuffers, residual: torch.Tensor, weight: torch.Tensor, multiprocessors: int = 2) -> torch.Tensor:
    target = replace(TARGETS["sm_90"], multiprocessors=multiprocessors)
    return add_norm_of_ranks(LaunchSettings(target), peers, residual, weight, 1e-5)


@runs_kernels
@interpreted
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 5, 11])  # fewer than programs, and more
def test_all_ranks_parts_are_added_up_in_their_order(count: int, tokens: int) -> None:
    torch.manual_seed(count * tokens)
    dtype = torch.float16  # the interpreter does not round to bfloat16 as GPUs do
    parts = [random(tokens, 200, dtype=dtype) for _ in range(count)]
    before, weight = random(tokens, 200, dtype=dtype), random(200, dtype=dtype)
    wanted_residual = before.clone()
    wanted = PlainOperations().add_norm(torch.stack(parts), wanted_residual, weight, 1e-5)
    for rank in range(count):
        pretended, residual = SimulatedRanks(parts, rank), before.clone()
        got = summed(pretended.peers, residual, weight)
        assert torch.equal(residual, wanted_residual), "sums are rounded as plain torch rounds them"
        torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)
        programs = min(tokens, 4)
        assert pretended.flags[:, :programs, rank].eq(1).all(), "a program did not signal a rank"
        assert pretended.flags[:, programs:, rank].max() <= 0, "and by no other"
        assert pretended.peers.meetings[:programs].eq(1).all()


@runs_kernels
@interpreted
@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 5, 19])  # ranks without a token, and programs with several
def test_two_launches_give_the_bits_of_one(count: int, tokens: int) -> None:
    torch.manual_seed(count * tokens)
    dtype = torch.float16
    parts = [random(tokens, 200, dtype=dtype) for _ in range(count)]
    before, weight = random(tokens, 200, dtype=dtype), random(200, dtype=dtype)
    wanted_residual = before.clone()
    alone = SimulatedRanks([part.clone() for part in parts], 0)
    wanted = summed(alone.peers, wanted_residual, weight)
    launch = LaunchSettings(replace(TARGETS["sm_90"], multiprocessors=1))
    ranks = [SimulatedRanks(parts, rank) for rank in range(count)]
    for rank in ranks:
        sum_share(launch, rank.peers, parts[rank.peers.rank], before)
    for each in ranks:
        each.flags[each.peers.rank, :, :count] += 1  # the others have come to the second synchronisation
        each.flags[each.peers.rank, :, each.peers.rank] -= 1
        residual = torch.full_like(before, float("nan"))
        got = norm_of_shares(launch, each.peers, residual, weight, 1e-5)
        assert torch.equal(residual, wanted_residual) and torch.equal(got, wanted)
        assert each.peers.meetings[: min(tokens, 2)].ge(1).all()


def test_many_tokens_of_more_than_two_ranks_take_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[str] = []
    for name in ("add_norm_of_ranks", "sum_share", "norm_of_shares"):
        monkeypatch.setattr(f"kvforge.worker.kernels.exchange.{name}", lambda *_, name=name: took.append(name))
    made = exchange(monkeypatch, (1 << 22, 1 << 22, 64))
    weight = torch.ones(1024, dtype=torch.bfloat16)
    for ranks, tokens in ((4, 511), (4, 512), (2, 2048)):
        made._peers = [replace(each, count=ranks) for each in made._peers]
        direct = DirectExchange(made, LaunchSettings(TARGETS["sm_90"]))
        direct.add_norm(ATTENTION, torch.zeros((tokens, 1024), dtype=torch.bfloat16), weight, 1e-5)
    assert took == ["add_norm_of_ranks", "sum_share", "norm_of_shares", "add_norm_of_ranks"]


@runs_kernels
@interpreted
@pytest.mark.parametrize("meeting", [7, (1 << 31) - 1, -(1 << 31), -(1 << 31) + 1])
def test_meetings_are_counted_beyond_the_largest_number(meeting: int) -> None:
    """The counter wraps after a day and a half of steps."""
    parts = [random(1, 64) for _ in range(2)]
    before = (meeting - 1 + (1 << 31)) % (1 << 32) - (1 << 31)
    pretended = SimulatedRanks(parts, 0)
    pretended.flags[0, :, :2] = meeting
    pretended.flags[0, :, 0] = before
    pretended.peers.meetings.fill_(before)
    residual = torch.zeros((1, 64), device=PLACE)
    summed(pretended.peers, residual, torch.ones(64, device=PLACE))
    assert torch.equal(residual, parts[0] + parts[1])
    assert int(pretended.peers.meetings[0]) == meeting and int(pretended.flags[1, 0, 0]) == meeting


@runs_kernels
@interpreted
def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_said() -> None:
    """During the start; later the coordinator ends a worker with a step that takes too long."""
    parts = [random(1, 64) for _ in range(2)]
    pretended = SimulatedRanks(parts, 0)
    pretended.flags[0, :, 1] = 0  # it never arrived
    summed(pretended.peers, torch.zeros((1, 64), device=PLACE), torch.ones(64, device=PLACE))
    assert int(pretended.flags[1, 0, 0]) == 1, "the missing rank was not signalled"


@runs_kernels
@interpreted
@pytest.mark.parametrize(("count", "tokens", "share"), [(2, 3, 5000), (3, 1, 77), (8, 2, 16)])
def test_shares_are_joined_side_by_side(count: int, tokens: int, share: int) -> None:
    parts = [random(tokens, share) for _ in range(count)]
    output = torch.full((tokens, count * share), float("nan"), device=PLACE)
    pretended, launch = SimulatedRanks(parts, 1), LaunchSettings(replace(TARGETS["sm_90"], multiprocessors=2))
    assert torch.equal(join_of_ranks(launch, pretended.peers, output), torch.cat(parts, 1))


def test_a_place_has_room_for_what_it_was_made_for_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made = exchange(monkeypatch, (2 * 8 * 64, 2 * 8 * 64, 4 * 3 * 100))
    place = made.place(ATTENTION, (8, 64), torch.bfloat16)
    assert place is not None and place.shape == (8, 64) and place.is_contiguous()
    assert made.place(ATTENTION, (9, 64), torch.bfloat16) is None
    assert made.place(LOGITS, (3, 100), torch.float32) is not None
    places = [made.place(which, (1, 64), torch.bfloat16) for which in (ATTENTION, INNER, LOGITS)]
    for number, each in enumerate(places):
        assert each is not None
        each.fill_(number)
        assert made.peers(number).addresses[0] == each.data_ptr() and each.data_ptr() % 256 == 0
    assert [float(each[0, 0]) for each in places if each is not None] == [0, 1, 2], "none lies in another"
    assert made.peers(ATTENTION).meetings is made.peers(LOGITS).meetings, "one count of meetings for all places"
    assert len(made.peers(ATTENTION).meetings) == PROGRAMS_MAX


def exchange(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int]) -> Exchange:
    """An exchange with one rank, on the CPU."""
    from torch.distributed import _symmetric_memory as symmetric

    def rendezvous(memory: torch.Tensor, group: Any) -> Any:
        return SimpleNamespace(buffer_ptrs=[memory.data_ptr()])

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        room = torch.empty(size + 256, dtype=dtype, device=device)
        return room[-room.data_ptr() % 256 :][:size]

    monkeypatch.setattr(symmetric, "empty", empty)
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return Exchange(0, 1, None, torch.device("cpu"), sizes)


class Ranks:
    """Two ranks as seen by one. said: the other rank's answers in turn."""

    def __init__(self, unshared: str = "", said: tuple[str, ...] = ("", "")) -> None:
        self.count, self.rank, self.unshared, self._said = 2, 0, unshared, list(said)
        self.shared: Any = None

    def texts(self, text: str) -> list[str]:
        return [text, self._said.pop(0)]


@pytest.mark.parametrize(
    ("made", "said", "difference", "why"),
    [
        (True, ("", ""), "", ""),
        (False, ("", ""), "", "no such memory"),
        (True, ("the other has none", ""), "", "the other has none"),
        (True, ("", ""), "other bits", "other bits"),
        (True, ("", "other bits there"), "", "other bits there"),
    ],
)
def test_if_one_rank_cannot_none_of_them_does(
    made: bool, said: tuple[str, ...], difference: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share(*_: Any) -> Any:
        if not made:
            raise RuntimeError("no such memory\nand where it was looked for")
        return SimpleNamespace(bytes=1 << 20)

    monkeypatch.setattr(sharing, "_share", share)
    monkeypatch.setattr(sharing, "_difference", lambda *_: difference)
    ranks, fused = Ranks(said=said), SimpleNamespace()
    assert sharing.share_memory(ranks, fused, 8, 4) == why  # type: ignore[arg-type]
    assert (ranks.shared is None) == bool(why) and ranks.unshared == why


def test_who_is_told_to_use_the_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_share", lambda *_: pytest.fail("nothing is tried"))
    ranks: Any = Ranks("collectives = 'nccl'")
    assert sharing.share_memory(ranks, None, 8, 4) == "collectives = 'nccl'"


@pytest.mark.gpu
@two_gpus
def test_two_gpus_say_what_one_says_and_company_changes_no_bit(wide_folders: dict[str, Path], tmp_path: Path) -> None:
    """In random batches, with ranks that read each other's memory and with ranks that use the library: always the same
    bits."""
    models = [(folder, "bfloat16", "dtype") for folder in wide_folders.values()]
    told = {
        how: several(2, models, tmp_path / how, device="cuda", collectives=how, company=60) for how in ("auto", "nccl")
    }
    for how, ranks in told.items():
        for first, second in zip(*ranks, strict=True):
            assert "error" not in first, first
            assert first["said"] == second["said"]
            assert not first["company"] and not second["company"], how
            assert ("each other's memory" in first["ranks"]) == (how == "auto"), first["ranks"]
    assert [each["said"] for each in told["auto"][0]] == [each["said"] for each in told["nccl"][0]]


@pytest.fixture
def wide_folders(tmp_path: Path, write_config: Callable[..., Path]) -> dict[str, Path]:
    """Configurations wide enough for each kind of product, with random weights."""
    from tests.worker.step.company import SHAPE

    made = {}
    for kind in ("llama", "qwen3"):
        made[kind] = write_config(**(SHAPE | {"model_type": kind}))
    return made
