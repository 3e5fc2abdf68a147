"""Heads that draft: answers have the bits that they have without, and drafts are those of the published definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvforge.worker.attention.pool import KvPool
from kvforge.worker.attention.windows import WindowLimits, WindowTables
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.loading.draft_model import join_head
from kvforge.worker.loading.eagle_heads import load_eagle_head
from kvforge.worker.loading.heads import DraftHead
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.mtp_heads import load_mtp_head
from tests.pairs import every_pair
from tests.worker.eagle_checkpoints import EAGLE, MIXED, EagleReference, write_eagle
from tests.worker.head_checkpoints import FP8, MODULES, MtpReference, Reference, write_mtp, write_right_mtp
from tests.worker.loading.covering import HYBRID, covering
from tests.worker.loading.random_models import HYBRIDS
from tests.worker.step.test_draft_model import drafted_answers, nan_pool, proposed, without_lookup
from tests.worker.step.test_drafts import (
    BLOCKS,
    DRAFTS_MAX,
    PROMPTS,
    SAMPLINGS,
    SLOTS,
    Answer,
    Drafting,
    answers_of,
    none,
    undrafted,
)
from tests.worker.step.test_runner import BLOCK_SIZE, i4

pytestmark = pytest.mark.usefixtures("quick_loads")
GREEDY = SAMPLINGS["greedy"]
# The MTP modules of families, and EAGLE-3 heads for models without and with recurrent states.
FAMILIES = [*MODULES, EAGLE, *(f"{EAGLE} {family}" for family in MIXED)]
# Parts of K and V of the models, where a rejected draft must leave nothing behind. Of those with states, one has an MTP
# module and one an EAGLE-3 head: test_draft_states.py rejects drafts for each kind of state.
KEEPING = ("decoder.layers.latent", "decoder.layers.options", "decoder.layers.kv_")
WITH_STATES = ("qwen3_5", f"{EAGLE} granite")


def few_families() -> list[str]:
    """Return families that have all of these parts. The logits of heads are compared for each module."""
    model_of, families = {FP8: "deepseek_v3", "mimo": "qwen2", EAGLE: "llama"}, dict[str, str]()
    for family in FAMILIES:
        name = model_of.get(family, family.removeprefix(f"{EAGLE} "))
        families.setdefault(HYBRID + name if name in HYBRIDS else name, family)
    few = {families[name] for name in covering(families, within=KEEPING)} | {*WITH_STATES}
    return [family for family in FAMILIES if family in few]


FEW = few_families()
OTHERS = [(family, graphs) for family in FAMILIES if family not in FEW for graphs in (False, True)]


@dataclass
class Headed:
    """A model with a head, the same without, and what the head should compute."""

    model: LoadedModel
    plain: LoadedModel
    head: DraftHead
    reference: Reference

    @cached_property
    def undrafted(self) -> list[Answer]:
        """An answer of each sampling without drafts: a test with graphs expects the same."""
        return undrafted(self.plain, list(SAMPLINGS.values()), 12)


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory, cpu: Device) -> Callable[..., Headed]:
    """headed(family, kernels=True) -> a random model with a head; each is made once."""
    made: dict[Any, Headed] = {}
    folders: dict[str, Path] = {}
    references: dict[str, Reference] = {}

    def make(family: str, kernels: bool = True) -> Headed:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            write = partial(write_mtp, family=family)
            if EAGLE in family:
                write = write_eagle if family == EAGLE else partial(write_eagle, family=family.partition(" ")[2])
            write(folders[family])
            is_eagle = EAGLE in family
            references[family] = EagleReference(folders[family]) if is_eagle else MtpReference(folders[family], family)
        if (family, kernels) not in made:
            source = folders[family] / ("model" if EAGLE in family else family)
            settings: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK_SIZE}
            settings["device"] = replace(cpu, kernels=kernels)
            plain = with_draft_states(load_model(source, **settings))
            if EAGLE in family:
                head = load_eagle_head(folders[family] / EAGLE, plain, "auto")
            else:
                head = load_mtp_head(source, plain, "auto", 0, lambda: load_model(source, **settings, mtp=True))
            made[family, kernels] = Headed(join_head(plain, head), plain, head, references[family])
        return made[family, kernels]

    return make


def with_draft_states(model: LoadedModel) -> LoadedModel:
    """Return a model with room for the states behind drafts, if it has recurrent states."""
    states = SLOTS * DRAFTS_MAX if model.geometry.states else 0
    return replace(model, geometry=replace(model.geometry, draft_states=states))


def bench_of(found: Headed, monkeypatch: pytest.MonkeyPatch, graphs: bool = False) -> Drafting:
    return without_lookup(nan_pool(Drafting(found.model, graphs)), monkeypatch)


def head_logits(bench: Drafting, head: DraftHead, slot: int, token: int, position: int) -> torch.Tensor:
    """Return the logits that the head computes behind a token at the end of a slot's row."""
    pool = bench.pool.beside
    assert pool is not None
    tables = np.arange(BLOCKS * slot, BLOCKS * (slot + 1), dtype=np.int32)[None]
    passes = bench.runner._drafts.passes
    assert passes is not None
    passes.complete(tables, i4(position))
    batch = pool.batch(tables, np.array([position], np.int32), np.ones(1, np.int32))
    places = torch.tensor([token]), torch.tensor([position])
    return head.run(*places, head.hidden_before(batch, pool), batch, pool)[0][0]


# An EAGLE-3 head computes the same for each model with states: in `make test` two of them.
ALIKE = [(f"{EAGLE} {family}", kernels) for family in [*MIXED][2:] for kernels in (True, False)]


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *every_pair([family for family in FAMILIES if (family, True) not in ALIKE], [True, False]),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ALIKE),
    ],
)
def test_logits_are_those_of_the_definition(
    family: str, kernels: bool, headed: Callable[..., Headed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt comes in chunks that end inside blocks and at their ends, and then decodes, in company."""
    found = headed(family, kernels)
    bench = bench_of(found, monkeypatch)
    first, other = answers_of([GREEDY] * 6)[::5]
    lengths, tokens = [0, 0], [[*first.prompt], [*other.prompt]]
    starts = {"begins": (first.start(), other.start()), "history": i4(*first.prompt, *other.prompt)}
    samples = [(3, 4), (2, 1), (3, 3), (1, 4)]
    for chunk in samples:
        rows = []
        for number, (answer, count) in enumerate(zip((first, other), chunk, strict=True)):
            rows.append((answer.slot, lengths[number], tokens[number][lengths[number] :][:count], 0))
            lengths[number] += count
        outcome = bench.run(rows, samples=i4(int(lengths[0] == 9), int(lengths[1] == 12)), **starts)
        assert not outcome.errors
        starts = {}
    for answer, token in zip((first, other), outcome.tokens.tolist(), strict=True):
        answer.chosen.append((token, 0, ()))
    for _ in range(3):
        bench.advance([first, other], none)
    for answer in (first, other):
        whole = [*answer.prompt, *answer.tokens]
        got = head_logits(bench, found.head, answer.slot, whole[-1], len(whole) - 1)
        want = found.reference.logits(whole)[-1]
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3 * float(want.abs().max()))
    bench.close()


@pytest.mark.parametrize(
    ("family", "graphs"),
    [*every_pair(FEW, [False, True]), *(pytest.param(*each, marks=pytest.mark.soak) for each in OTHERS)],
)
def test_answers_keep_their_bits_and_drafts_follow_the_definition(
    family: str, graphs: bool, headed: Callable[..., Headed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of each step are verified in the next one; most are wrong, and leave nothing behind."""
    found = headed(family)
    samplings = list(SAMPLINGS.values())
    want = found.undrafted
    bench, answers = bench_of(found, monkeypatch, graphs), answers_of(samplings)
    for each in answers:
        each.most = 1 + each.slot % DRAFTS_MAX
    outcome, texts = bench.begin(answers), list[tuple[int, list[int], list[int]]]()
    while running := [each for each in answers if len(each.chosen) < 12]:
        drafts = proposed(outcome)
        for each in running:
            assert len(drafts[each.slot]) == each.most
            texts.append((each.slot, [*each.prompt, *each.tokens], drafts[each.slot]))
        outcome = bench.advance(running, lambda each, drafts=drafts: drafts[each.slot])  # type: ignore[misc]
    for mine, other in zip(answers, want, strict=True):
        assert mine.chosen[:12] == other.chosen
        assert mine.drafted > 0
    for slot, text, drafted in reversed(texts):  # the longest first: its hidden states are those of the others
        assert drafted == found.reference.drafts(text, len(drafted)), f"slot {slot}, {len(text)} tokens"
    bench.close()


@pytest.mark.parametrize("family", ["glm4_moe", EAGLE])
@pytest.mark.parametrize("copied", [BLOCK_SIZE, 2])
def test_forks_go_on_with_the_hidden_states_of_their_origin(
    copied: int, family: str, headed: Callable[..., Headed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork goes on behind a block's end, and inside a block; the other row goes on too."""
    found = headed(family)
    bench = bench_of(found, monkeypatch)
    parent, child = Answer(0, GREEDY, most=DRAFTS_MAX), Answer(1, GREEDY, most=DRAFTS_MAX)
    bench.begin([parent])
    bench.advance([parent], none)
    length = len(PROMPTS[0])
    shared = BLOCK_SIZE + copied
    copies = [[block, 16 + block, min(BLOCK_SIZE, shared - BLOCK_SIZE * block)] for block in range(2)]
    start = msgspec.structs.replace(child.start(), prompt_history=length)
    prompt = [*PROMPTS[0][:shared], 71, 12, 5]
    outcome = bench.run(
        [(1, shared, prompt[shared:], 0)],
        begins=(start,),
        history=i4(*PROMPTS[0]),
        copies=i4(*[number for copy in copies for number in copy]),
        zeros=i4(*range(16, 32)),
    )
    bench.take([child], outcome)
    drafts = proposed(outcome)[1]
    assert drafts == found.reference.drafts([*prompt, *child.tokens], len(drafts))
    outcome = bench.advance([parent], none)
    drafts = proposed(outcome)[0]
    assert drafts == found.reference.drafts([*parent.prompt, *parent.tokens], len(drafts))
    bench.close()


def test_a_step_that_asks_may_be_launched_behind_another(
    headed: Callable[..., Headed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are fed tokens that the host does not know yet; the hidden states of both steps count."""
    found = headed("glm4_moe")
    bench = bench_of(found, monkeypatch)
    (answer,) = answers_of([GREEDY])
    answer.most = DRAFTS_MAX
    begin = {"begins": (answer.start(),), "history": i4(*answer.prompt)}
    pending = bench.launch([(0, 0, answer.prompt, 0)], **begin)
    for _ in range(4):
        later = bench.launch([(0, len(answer.prompt) + len(answer.tokens), [-1], 0)])
        outcome = bench.runner.finish(pending)
        bench.take([answer], outcome)
        assert proposed(outcome) == {}
        outcome = bench.runner.finish(later)
        bench.take([answer], outcome)
        drafts = proposed(outcome).get(0, [])
        assert len(drafts) == DRAFTS_MAX
        assert drafts == found.reference.drafts([*answer.prompt, *answer.tokens], len(drafts))
        pending = bench.launch([bench.row(answer, [])])
    bench.runner.finish(pending)
    bench.close()


@pytest.mark.parametrize("family", ["glm4_moe", EAGLE])
def test_graphs_of_prompts_feed_heads(
    family: str, headed: Callable[..., Headed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step has rows with prompt tokens, decodes, and padding."""
    found = headed(family)
    bench = bench_of(found, monkeypatch, graphs=True)
    graphs, launched = bench.runner.prompt_graphs, list[int]()
    assert graphs is not None
    for tokens, decodes in ((len(PROMPTS[0]), 0), (len(PROMPTS[2]), 1)):
        size = graphs._size_for(tokens, decodes)
        assert size is not None
        assert graphs.capture_one(size)
    launch = graphs.launch

    def watched(rows: Any) -> Any:
        launched.append(len(rows))
        return launch(rows)

    monkeypatch.setattr(graphs, "launch", watched)
    first, _, second = answers_of([GREEDY] * 3)
    first.most = second.most = DRAFTS_MAX
    bench.begin([first])
    start = {"begins": (second.start(),), "history": i4(*second.prompt)}
    outcome = bench.run([bench.row(first, []), (second.slot, 0, second.prompt, 0)], **start)
    bench.take([first, second], outcome)
    assert launched == [1, 2]
    for each in (first, second):
        mine = proposed(outcome)[each.slot]
        assert mine == found.reference.drafts([*each.prompt, *each.tokens], len(mine))
    bench.close()


def test_all_drafts_together_go_with_all_prompts(
    headed: Callable[..., Headed], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = headed("deepseek_v3")
    bench = bench_of(found, monkeypatch)
    want = undrafted(found.plain, [GREEDY] * len(PROMPTS))
    for mine, other in zip(drafted_answers(bench, answers_of([GREEDY] * len(PROMPTS))), want, strict=True):
        assert mine.chosen == other.chosen
    bench.close()


def test_a_right_head_saves_steps(tmp_path: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step appends its drafts and one token more: the fewest steps that are possible."""
    source = write_right_mtp(tmp_path, vocab_size=97)
    settings: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK_SIZE, "device": cpu}
    plain = load_model(source, **settings)
    head = load_mtp_head(source, plain, "auto", 0, lambda: load_model(source, **settings, mtp=True))
    found = Headed(join_head(plain, head), plain, head, Reference(None, {}))
    bench, steps = bench_of(found, monkeypatch), list[int]()
    advance = bench.advance
    monkeypatch.setattr(bench, "advance", lambda *given: steps.append(1) or advance(*given))  # type: ignore[func-returns-value]
    answers = drafted_answers(bench, answers_of([GREEDY] * 3), tokens=25)
    assert all(each.accepted == each.drafted for each in answers)
    assert len(steps) == 24 // (DRAFTS_MAX + 1)
    bench.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["mtp", "qwen3_5", EAGLE, f"{EAGLE} qwen3_next"])
def test_heads_on_a_gpu(
    kind: str, graphs: bool, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = open_device("auto")
    if not device.runs_kernels:
        pytest.skip("no GPU here")
    settings: dict[str, Any] = {"dtype": "bfloat16", "device": device, "block_size": 16}
    if EAGLE in kind:
        head_folder = write_eagle(tmp_path, "llama" if kind == EAGLE else "qwen3_next")
        source = tmp_path / "model"
    elif kind == "qwen3_5":
        source = write_mtp(tmp_path, kind)
    else:
        source = write_right_mtp(tmp_path, vocab_size=97, hidden_size=128, head_dim=32, moe_intermediate_size=64)
    plain = with_draft_states(load_model(source, **settings, kv_dtype=kv_dtype))
    want = [Drafting(plain, graphs).answer([each], none)[0] for each in answers_of(list(SAMPLINGS.values()))]
    if EAGLE in kind:
        head = load_eagle_head(head_folder, plain, "auto")
    else:
        head = load_mtp_head(source, plain, "auto", 0, lambda: load_model(source, **settings, mtp=True))
    bench = without_lookup(Drafting(join_head(plain, head), graphs), monkeypatch)
    if bench.runner.draft_graphs is not None:
        bench.runner.draft_graphs.capture()
        assert bench.runner.draft_graphs.sizes, "captured"
    if kind == EAGLE:
        reference, right, first = EagleReference(tmp_path), 0, Answer(0, GREEDY, most=1)
        outcome = bench.begin([first])
        for _ in range(20):
            right += proposed(outcome)[0] == reference.drafts([*first.prompt, *first.tokens], 1)
            outcome = bench.advance([first], none)
        assert right >= 12, "most drafts are those of float32"
    got = drafted_answers(bench, answers_of(list(SAMPLINGS.values())))
    assert [each.chosen for each in got] == [each.chosen for each in want]
    assert got[0].drafted > 0
    if kind == "mtp" and kv_dtype == "auto":  # fp8 rounds the K and V of the model, and not those of its module
        assert got[0].accepted >= 0.8 * got[0].drafted, "the module computes what the model does"
    bench.close()


def test_models_that_keep_windows_have_heads(
    tiny: Callable[..., LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their own K and V lie in pages, and those of the head in memory of its own."""
    fields = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "head_dim": 16}
    limits = WindowLimits(8, 16, 16)
    plain = tiny("gemma3_text", windows=limits, **fields)
    load = partial(load_model, tmp_path / "gemma3_text", load_format="dummy", dtype="float32", device=plain.device)
    head = load_mtp_head(tmp_path / "gemma3_text", plain, "dummy", 0, partial(load, block_size=BLOCK_SIZE, mtp=True))
    model = join_head(plain, head)
    assert model.geometry.is_paged
    assert not head.geometry.is_paged
    assert model.geometry.beside == replace(head.geometry, keeps_tokens=True)
    pool = KvPool(model.geometry, 8, model.device)
    assert pool.beside is not None
    tables = np.arange(2, dtype=np.int32)[None]
    windows = WindowTables(np.zeros(1, np.int64), np.arange(2, 4, dtype=np.int32).reshape(1, 2, 1))
    batch = pool.batch(tables, i4(0), i4(6), windows=windows)
    tokens = torch.tensor([5, 9, 31, 7, 7, 2])
    model.forward(tokens, torch.arange(6), torch.tensor([5]), batch, pool)
    assert batch.beside is not None
    before = head.hidden_before(batch.beside, pool.beside)
    assert before[1:].isfinite().all()
    assert before[1:].any(1).all()
    assert not before[0].any()
    pool.close()


FORMATS: dict[str, dict[str, Any]] = {
    "int8 weights": {"weight_dtype": "int8"},
    "int8 KV": {"kv_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 in plain torch": {"kernels": False, "dtype": "bfloat16"},
}


@pytest.mark.parametrize(("named", "tied"), every_pair(FORMATS, [False, True]))
def test_heads_have_the_formats_of_the_model(
    named: str,
    tied: bool,
    tiny: Callable[..., LoadedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights are packed and quantised as the model's are; K and V and hidden states of heads are not quantised."""
    formats = FORMATS[named]
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "tie_word_embeddings": tied}
    plain = tiny("llama", **formats, **sizes)
    settings = {"dtype": formats.get("dtype", "float32"), "weight_dtype": formats.get("weight_dtype", "dtype")}
    own: dict[str, Any] = {"load_format": "dummy", "device": plain.device, "block_size": BLOCK_SIZE}
    load = partial(load_model, tmp_path / "llama", **settings, **own)
    head = load_mtp_head(tmp_path / "llama", plain, "dummy", 0, partial(load, mtp=True))
    assert head.info.weight_dtype == plain.info.weight_dtype
    assert head.geometry.kv_dtype == settings["dtype"]
    want = undrafted(plain, [GREEDY] * 3, 8)
    bench = without_lookup(Drafting(join_head(plain, head)), monkeypatch)
    for mine, other in zip(drafted_answers(bench, answers_of([GREEDY] * 3), 8), want, strict=True):
        assert mine.chosen == other.chosen
        assert mine.drafted > 0
    bench.close()
