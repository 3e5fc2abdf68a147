"""Steps of generated tokens compute nothing for a drafter, and its proposals are those of one that saw every token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.protocol.messages import Step
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.host_file import HostFile
from kvforge.worker.loading.draft_model import join_draft_model, join_head
from kvforge.worker.loading.eagle_heads import load_eagle_head
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.mtp_heads import load_mtp_head
from kvforge.worker.step import draft_passes
from kvforge.worker.step.draft_passes import DraftPasses
from kvforge.worker.step.host_transfers import HostTransfers
from kvforge.worker.step.runner import StepOutcome
from tests.pairs import every_pair
from tests.worker.eagle_checkpoints import EAGLE, EagleReference, write_eagle
from tests.worker.head_checkpoints import MtpReference, write_mtp, write_right_mtp
from tests.worker.step.test_draft_model import drafter_of, nan_pool, proposed, without_lookup
from tests.worker.step.test_drafts import (
    BLOCKS,
    DRAFTS_MAX,
    SAMPLINGS,
    SLOTS,
    Answer,
    Drafting,
    answers_of,
    none,
    undrafted,
)
from tests.worker.step.test_runner import BLOCK_SIZE, i4

GREEDY = SAMPLINGS["greedy"]
MTP, MODEL = "glm4_moe", "a draft model"
KINDS = [MTP, EAGLE, MODEL]
Drafts = Callable[[list[int], int], list[int]]


@dataclass
class Drafted:
    """A model with what drafts for it, and the drafts behind any tokens: (tokens, count) -> drafts."""

    model: LoadedModel
    reference: Drafts


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory, cpu: Device) -> Callable[[str], Drafted]:
    """drafted(kind) -> a random model with a drafter of the kind; each is made once."""
    made: dict[str, Drafted] = {}

    def make(kind: str) -> Drafted:
        if kind in made:
            return made[kind]
        folder = tmp_path_factory.mktemp("drafted")
        settings: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK_SIZE, "device": cpu}
        if kind == EAGLE:
            head_folder = write_eagle(folder)
            plain = load_model(folder / "model", **settings)
            model = join_head(plain, load_eagle_head(head_folder, plain, "auto"))
            made[kind] = Drafted(model, EagleReference(folder).drafts)
            return made[kind]
        family = MTP if kind == MTP else "mimo"
        source = write_mtp(folder, family=family)
        plain = load_model(source, **settings)
        if kind == MTP:
            head = load_mtp_head(source, plain, "auto", 0, partial(load_model, source, **settings, mtp=True))
            made[kind] = Drafted(join_head(plain, head), MtpReference(folder, family).drafts)
        else:
            draft = load_model(source, load_format="dummy", seed=5, **settings)
            made[kind] = Drafted(join_draft_model(plain, draft), partial(greedy, draft))
        return made[kind]

    return make


def greedy(draft: LoadedModel, tokens: list[int], count: int) -> list[int]:
    """Return the greedy tokens of a model behind a prompt."""
    alone, slot = Drafting(draft), 0
    start = msgspec.structs.replace(Answer(slot, GREEDY).start(), prompt_history=len(tokens))
    found = alone.run([(slot, 0, tokens, 0)], begins=(start,), history=i4(*tokens)).tokens.tolist()
    while len(found) < count:
        found += alone.run([(slot, len(tokens) + len(found) - 1, [-1], 0)]).tokens.tolist()
    alone.close()
    return found


class Bench:
    """Runs answers, with proposals where `due` says so."""

    def __init__(self, found: Drafted, monkeypatch: pytest.MonkeyPatch, graphs: bool = False) -> None:
        self.rows = without_lookup(nan_pool(Drafting(found.model, graphs)), monkeypatch)
        self.reference, self.due, self.caught_up = found.reference, False, list[int]()
        propose = drafter_of(self.rows).propose
        monkeypatch.setattr(
            drafter_of(self.rows), "propose", lambda slots, ends, asked: propose(slots, ends, asked * self.due)
        )
        catch_up = DraftPasses._catch_up

        def watched(passes: DraftPasses, tables: Any, owners: Any, places: Any) -> None:
            self.caught_up.append(len(owners))
            catch_up(passes, tables, owners, places)

        monkeypatch.setattr(DraftPasses, "_catch_up", watched)

    def check(self, outcome: StepOutcome, *answers: Answer) -> None:
        """Compare the proposals for answers with the reference; each must have some."""
        found = proposed(outcome)
        for each in answers:
            mine = found.get(each.slot, [])
            assert len(mine) == each.most, f"slot {each.slot}"
            assert mine == self.reference([*each.prompt, *each.tokens], len(mine)), f"slot {each.slot}"

    def advance(self, answers: list[Answer], steps: int, due: bool = False) -> StepOutcome:
        """Run steps without drafts; with proposals behind the last one, if they are due."""
        for number in range(steps):
            self.due = due and number == steps - 1
            outcome = self.rows.advance(answers, none)
        self.due = False
        return outcome


def some(count: int) -> list[Answer]:
    answers = answers_of([GREEDY] * SLOTS)[:count]
    for each in answers:
        each.most = DRAFTS_MAX
    return answers


@pytest.mark.parametrize(("kind", "graphs"), every_pair(KINDS, [False, True]))
def test_proposals_behind_steps_without_any_are_right(
    kind: str, graphs: bool, drafted: Callable[[str], Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens are rows of the first captured pass, many take passes before it."""
    bench, answers = Bench(drafted(kind), monkeypatch, graphs), some(3)
    bench.rows.begin(answers)
    late = 1  # the prompt of the second one is a single token, which counts as generated
    for steps, eager in ((20, True), (2, not graphs), (1, not graphs), (16, True)):
        bench.caught_up.clear()
        bench.check(bench.advance(answers, steps, due=True), *answers)
        assert bench.caught_up == [3 * steps + late] * eager, f"behind {steps} steps"
        late = 0
    bench.rows.close()


@pytest.mark.parametrize(("kind", "graphs"), every_pair(KINDS, [False, True]))
def test_verified_drafts_are_caught_up_with_the_states_of_the_model(
    kind: str, graphs: bool, drafted: Callable[[str], Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right and wrong ones, with proposals behind some of the steps."""
    random, found, samplings = Random(11), drafted(kind), list(SAMPLINGS.values())[:3]
    plain = replace(found.model, draft=None, geometry=replace(found.model.geometry, beside=None))
    want = undrafted(plain, samplings, 46)
    bench, answers, proposals = Bench(found, monkeypatch, graphs), answers_of(samplings), 0

    def partly_right(each: Answer) -> list[int]:
        known = want[each.slot].tokens[len(each.tokens) :]
        right = random.randint(0, DRAFTS_MAX)
        return known[:right] + [(token + 1) % 97 for token in known[right : random.randint(right, DRAFTS_MAX)]]

    for each in answers:
        each.most = DRAFTS_MAX
    bench.rows.begin(answers)
    while min(len(each.chosen) for each in answers) + DRAFTS_MAX < 40:
        bench.due = random.random() < 0.3
        outcome = bench.rows.advance(answers, partly_right)
        if bench.due:
            bench.check(outcome, *answers)
            proposals += 1
    for mine, other in zip(answers, want, strict=True):
        assert mine.chosen == other.chosen[: len(mine.chosen)]
        assert 0 < mine.accepted < mine.drafted
    assert proposals >= 2
    bench.rows.close()


@pytest.mark.parametrize(("kind", "graphs"), every_pair(KINDS, [False, True]))
def test_what_a_proposal_catches_up_is_bounded(
    kind: str, graphs: bool, drafted: Callable[[str], Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows with the fewest tokens go first; the others get no drafts until their turn."""
    monkeypatch.setattr(draft_passes, "CAUGHT_UP_MAX", 6)
    bench = Bench(drafted(kind), monkeypatch, graphs)
    first, _, second, third = some(4)  # the prompt of the other is one token, which counts as generated
    answers = [first, second, third]
    bench.rows.begin([first])
    bench.advance([first], 10)
    bench.rows.begin([second, third])
    outcome = bench.advance(answers, 3, due=True)
    bench.check(outcome, second, third)
    assert proposed(outcome).keys() == {2, 3}
    assert bench.caught_up == [6], "of 3, 3 and 13 tokens"
    for _ in range(2):
        assert 0 not in proposed(bench.advance([first], 1, due=True))
    assert bench.caught_up == [6] * 3, "of 14, then of 9"
    bench.check(bench.advance([first], 1, due=True), first)
    bench.rows.close()


@pytest.mark.parametrize(("kind", "graphs"), every_pair(KINDS, [False, True]))
def test_steps_of_generated_tokens_compute_nothing_for_what_drafts(
    kind: str, graphs: bool, drafted: Callable[[str], Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = drafted(kind)
    fed, feed = list[int](), type(found.model.draft).feed

    def watched(draft: Any, token_ids: Any, *rest: Any) -> None:
        fed.append(len(token_ids))
        feed(draft, token_ids, *rest)

    monkeypatch.setattr(type(found.model.draft), "feed", watched)
    bench, answers = Bench(found, monkeypatch, graphs), some(3)
    if graphs:
        assert bench.rows.runner.graphs is not None
        bench.rows.runner.graphs.capture()
        assert fed == [], "not in a captured step either"
    bench.rows.begin(answers)
    assert fed == [sum(len(each.prompt) for each in answers)]
    bench.advance(answers, 4)
    assert len(fed) == 1
    bench.advance(answers, 1, due=True)
    assert fed[1:] == ([] if graphs else bench.caught_up)
    bench.rows.close()


def fork(bench: Bench, parent: Answer, child: Answer, shared: int, **fields: Any) -> None:
    """Begin a request behind the first tokens of another one; it has three prompt tokens of its own."""
    whole = [*parent.prompt, *parent.tokens]
    prompt = [*whole[:shared], 71, 12, 5]
    start = msgspec.structs.replace(child.start(), prompt_history=len(prompt))
    outcome = bench.rows.run(
        [(child.slot, shared, prompt[shared:], 0)],
        begins=(start,),
        history=i4(*prompt),
        **fields,
    )
    bench.rows.take([child], outcome)
    mine = proposed(outcome)[child.slot]
    assert mine == bench.reference([*prompt, *child.tokens], len(mine))


@pytest.mark.parametrize(("kind", "graphs"), every_pair(KINDS, [False, True]))
@pytest.mark.parametrize("behind", [0, 2])
def test_forks_of_generated_tokens_bring_what_they_lack(
    behind: int, kind: str, graphs: bool, drafted: Callable[[str], Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the end of a block and inside one. The other row has caught up by then, or not."""
    bench = Bench(drafted(kind), monkeypatch, graphs)
    parent, _, child, other = some(4)
    bench.rows.begin([parent])
    bench.advance([parent], 12)
    shared = 4 * BLOCK_SIZE + behind
    for each in (child, other):
        copies = [[at, BLOCKS * each.slot + at, min(BLOCK_SIZE, shared - BLOCK_SIZE * at)] for at in range(5)]
        bench.due = True
        fork(bench, parent, each, shared, copies=i4(*[number for copy in copies for number in copy if copy[2]]))
        bench.check(bench.advance([parent], 3, due=True), parent)
    bench.rows.close()


@pytest.mark.parametrize(("kind", "graphs"), every_pair(KINDS, [False, True]))
def test_prompts_go_on_behind_generated_blocks(
    kind: str, graphs: bool, drafted: Callable[[str], Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests have blocks in common, and catch up together or one after another."""
    bench = Bench(drafted(kind), monkeypatch, graphs)
    parent, _, child, other = some(4)
    shared = 4

    def table(slot: int) -> list[int]:
        own = [*range(BLOCKS * slot, BLOCKS * (slot + 1))]
        return own if slot == parent.slot else [*range(shared), *own[shared:]]

    monkeypatch.setattr(bench.rows, "table", table)
    bench.rows.begin([parent])
    bench.advance([parent], 12)
    for each in (child, other):
        bench.due = each is child
        whole = [*parent.prompt, *parent.tokens][: shared * BLOCK_SIZE]
        prompt = [*whole, 71, 12, each.slot]
        start = msgspec.structs.replace(each.start(), prompt_history=len(prompt))
        row = (each.slot, len(whole), prompt[len(whole) :], 0)
        outcome = bench.rows.run([row], begins=(start,), history=i4(*prompt))
        bench.rows.take([each], outcome)
        if bench.due:
            mine = proposed(outcome)[each.slot]
            assert mine == bench.reference([*prompt, *each.tokens], len(mine))
    bench.check(bench.advance([parent], 1, due=True), parent)
    bench.rows.close()


@pytest.mark.parametrize("caught_up", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_another_tier_bring_what_they_lack(
    kind: str,
    caught_up: bool,
    drafted: Callable[[str], Drafted],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Blocks of generated tokens go to the host file and come back elsewhere, caught up before or not."""
    bench = Bench(drafted(kind), monkeypatch)
    pool, runner = bench.rows.pool, bench.rows.runner
    runner.host = HostTransfers(pool, HostFile(tmp_path / "file", "layout", 9, pool.geometry.bytes_per_block))
    parent, _, child = some(3)
    bench.rows.begin([parent])
    bench.advance([parent], 12, due=caught_up)
    first, shared = BLOCKS * child.slot, 4 * BLOCK_SIZE
    copies = i4(*[number for block in range(4) for number in (block, block, 7, block)])
    runner.run(Step(0, host_writes=copies), np.zeros((0, 1), np.int32))
    for cache in pool.tensors():
        cache[:4] = float("nan") if cache.is_floating_point() else 127
    reads = copies.copy()
    reads[::4] += first
    bench.due = True
    fork(bench, parent, child, shared, host_reads=reads)
    runner.host.close()
    bench.rows.close()


@pytest.mark.parametrize(("kind", "graphs"), every_pair(KINDS, [False, True]))
def test_steps_in_flight_write_tokens_that_only_the_device_knows(
    kind: str, graphs: bool, drafted: Callable[[str], Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host knows that they are generated, and a proposal finds their ids on the device."""
    bench = Bench(drafted(kind), monkeypatch, graphs)
    (answer,) = some(1)
    begin = {"begins": (answer.start(),), "history": i4(*answer.prompt)}
    pending = bench.rows.launch([(0, 0, answer.prompt, 0)], **begin)
    for step in range(18):
        row, bench.due = [(0, len(answer.prompt) + step, [-1], 0)], step % 7 == 6
        later = None if bench.due else bench.rows.launch(row)  # none follows a step that asks
        outcome = bench.rows.runner.finish(pending)
        bench.rows.take([answer], outcome)
        if bench.due:
            bench.check(outcome, answer)
        pending = later or bench.rows.launch(row)
    # The step behind a proposal writes the token that its first pass was fed, which lacks K and V again.
    assert bench.caught_up == ([] if graphs else [6, 7])
    bench.rows.runner.finish(pending)
    bench.rows.close()


def check_right_module(
    source: Path, device: Device, dtype: str, block_size: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare proposals of a module that computes what its model does with the answer, behind steps without any."""
    settings: dict[str, Any] = {"dtype": dtype, "device": device, "block_size": block_size}
    plain = load_model(source, **settings)
    want = Drafting(plain, graphs).answer(some(3), none, 40)
    head = load_mtp_head(source, plain, "auto", 0, partial(load_model, source, **settings, mtp=True))
    bench, answers, right = Bench(Drafted(join_head(plain, head), lambda *_: []), monkeypatch, graphs), some(3), 0
    bench.rows.begin(answers)
    for steps in (20, 1, 3):
        found = proposed(bench.advance(answers, steps, due=True))
        for mine, other in zip(answers, want, strict=True):
            assert mine.chosen == other.chosen[: len(mine.chosen)]
            right += found[mine.slot] == other.tokens[len(mine.tokens) :][:DRAFTS_MAX]
    assert right == 9 if dtype == "float32" else right >= 6, "of 9 proposals"
    bench.rows.close()


@pytest.mark.parametrize("graphs", [False, True])
def test_a_right_module_goes_on_with_the_answer(
    graphs: bool, tmp_path: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_right_mtp(tmp_path, vocab_size=97)
    check_right_module(source, cpu, "float32", BLOCK_SIZE, graphs, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_a_right_module_goes_on_with_the_answer_on_a_gpu(
    graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = open_device("auto")
    if not device.runs_kernels:
        pytest.skip("no GPU here")
    sizes = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64}
    source = write_right_mtp(tmp_path, vocab_size=97, **sizes)
    check_right_module(source, device, "bfloat16", 16, graphs, monkeypatch)
