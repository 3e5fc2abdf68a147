"""One rank's part of a transformers model: built without weights, sliced, and then filled.

Only the rank's slice of each tensor is read, so no rank ever holds the whole model. The plan (`slices`) defines the
exchanges between modules. Hooks perform them for layers that transformers runs; fused layers exchange by themselves
(`kernels.decoder`) and share the weights. With expert parallelism, hooks also leave out the experts of other ranks.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch.nn.functional import embedding

from kvforge.models.files import stored_tensors
from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.device.device import Device
from kvforge.worker.device.ranks import Ranks

from .composite import config_for, model_class, text_part
from .expert_check import StoredExperts, check_experts_of_ranks
from .mixer_slices import fit_mixer, join_norm
from .progress import Progress
from .quantised_reader import JOINED, Published, QuantisedReader
from .rehearsal import drop_removed_parts
from .report import EXPERT, LoadReport, check_experts, check_finite, check_unpacked, reject_mismatches
from .slices import (
    EXPERTS,
    GATHERED,
    JOINED_HEADS,
    ROWS,
    SPLIT,
    VOCABULARY,
    Slices,
    TensorSlice,
    kv_heads_of,
    slices_of,
    stored_names,
)
from .source import Source
from .split_experts import FIRST_HELD, leave_out_others
from .streamed_files import files_by_tensor, part_by_tensor, reads_in_parallel
from .tied import tied_weights

READ_AT_ONCE = 4  # tensors; each of them is read by several threads
STD = 0.02  # default standard deviation of random weights
CONVOLUTION = "conv1d"  # of queries, keys and values together; files may have one of each


def build_split(
    source: Source,
    config: Any,
    dtype: torch.dtype,
    device: Device,
    ranks: Ranks | None,
    progress: Progress,
    seed: int,
    expert_parallel: bool = False,
    published: Published | None = None,
) -> Any:
    """Build one rank's part as `build.build` does; without ranks the whole model.

    published: the format of quantised weights; None: they are plain.

    Raises:
        UnsupportedModel: Names the part that cannot be split.
        InvalidConfiguration: `expert_parallel` does not suit the model.
    """
    if source.format == "gguf":
        problem = "a GGUF file is read as a whole: several ranks take a folder with safetensors"
        raise UnsupportedModel(source.name, problem)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(source.name, "its weights are packed by a quantization_config, and cannot be split")
    cls = model_class(config)
    with init_empty_weights(include_buffers=False):
        module = cls._from_config(config_for(cls, config), dtype=dtype, attn_implementation="eager")
    mine, part = Slices(0, 1, {}, {}, {}, frozenset()), module
    if ranks is not None:
        # Files have the names of the whole model, and plans those of its text part. Both have the same modules.
        part = text_part(module, source.name)
        paths = _paths_in(module, part)
        mine = slices_of(part, ranks.rank, ranks.count, expert_parallel).renamed(paths)
    tied = tied_weights(module, source)
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        shape = mine.cut(name).shape(tuple(parameter.shape))
        _put(module, name, torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False))
    if source.format == "dummy":
        _make_up(module, config, mine, tied, dtype, device, seed)
    else:
        _read(module, source, mine, tied, dtype, device, progress, published)
        _read_generation(module, source)
    for same, original in tied.items():
        cut, of = mine.cut(same), module.get_parameter(original)
        _put(module, same, of if cut.is_whole else torch.nn.Parameter(cut.of(of), requires_grad=False))
    if source.format != "dummy":
        check_finite(module, source.name, source.stored_name)
    for name in mine.first_only:
        if mine.rank:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, None)
    _fit(module, mine)
    if ranks is not None:
        if part is not module:  # it is another module where it is kept in codes
            head = next(name for name, each in part.named_modules() if each is part.get_output_embeddings())
            part.set_output_embeddings(module.get_submodule(paths[head]))
        _check_experts(module, source, mine, ranks, None if published is not None else dtype)
        _exchange(module, mine, ranks)
    return part.to(device.torch_device).eval()


def _paths_in(whole: Any, part: Any) -> dict[str, str]:
    """Return the paths of modules in the whole model by those in its text part."""
    paths = {id(module): path for path, module in whole.named_modules()}
    return {path: paths[id(module)] for path, module in part.named_modules() if id(module) in paths}


def _check_experts(module: Any, source: Source, mine: Slices, ranks: Ranks, dtype: torch.dtype | None) -> None:
    """Check what ranks have of the experts. dtype: of weights that are in the files as numbers; None: they are not."""
    if source.format == "dummy" or dtype is None or not mine.experts:
        check_experts_of_ranks(module, mine, ranks, source.name, None)
        return
    with StoredExperts(source.model_files.weights, dtype) as checksum:
        check_experts_of_ranks(module, mine, ranks, source.name, checksum)


def _put(module: Any, name: str, parameter: torch.nn.Parameter) -> None:
    parent, _, last = name.rpartition(".")
    module.get_submodule(parent)._parameters[last] = parameter


# ------------------------------------------------------------------------------------------------------------- weights


def _read(
    module: Any,
    source: Source,
    mine: Slices,
    tied: dict[str, str],
    dtype: torch.dtype,
    device: Device,
    progress: Progress,
    published: Published | None,
) -> None:
    """Fill every parameter with its slice of the stored tensors.

    Raises:
        UnsupportedModel: Names the tensors that do not match.
    """
    stored = source.of_part(stored_tensors(source.model_files))
    check_experts(stored, source.name)
    report, used = LoadReport(), set()
    named = [(name, each) for name, each in module.named_parameters() if name not in tied]
    quantised, coded, shapes = None, list[str](), dict[str, tuple[int, ...]]()
    if published is not None:
        quantised = QuantisedReader(published, stored, dtype, device, source.name)
        shapes = {name: mine.whole.get(name, tuple(each.shape)) for name, each in named}
        quantised.check(shapes)
        coded = [name for name, shape in shapes.items() if quantised.covers(name, shape)]
        named = [(name, each) for name, each in named if name not in coded]
    is_part = source.part is not None
    opened = part_by_tensor(source) if is_part else files_by_tensor(source.model_files.weights, device)
    with opened as of, ThreadPoolExecutor(READ_AT_ONCE) as pool:
        # Mapped files are read as they are needed, so that host memory never holds more than one tensor.
        at_once = pool.map if reads_in_parallel(device) and not is_part else map
        # Of tensors that are one, files may have any.
        names = [[name, *(same for same, original in tied.items() if original == name)] for name, _ in named]
        all_found = at_once(lambda each: _found_first(each, mine.cut(each[0]), of), names)
        for number, ((name, parameter), found) in enumerate(zip(named, all_found, strict=True)):
            progress("reading weights", number / len(named))
            if found is None:
                report.missing.add(name)
                continue
            used.update(found[0])
            if found[1].shape != parameter.shape:
                report.mismatched.add((name, tuple(found[1].shape), tuple(parameter.shape)))
                continue
            filled = found[1].to(dtype=_dtype_of(module, name, dtype)).to(device.torch_device)
            _put(module, name, torch.nn.Parameter(filled, requires_grad=False))
        used |= _read_buffers(module, of, report, dtype, device)
        for number, name in enumerate(coded):
            progress("reading weights", number / len(coded))
            assert quantised is not None
            quantised.read(module, name, shapes[name], mine.cut(name), of)
            if device.computes_on_cores:
                device.release_cached()  # the C library keeps what a repacked tensor took
    if quantised is not None:
        quantised.finish(module)
        used |= quantised.used
    ignored = [re.compile(each) for each in module._keys_to_ignore_on_load_unexpected or ()]
    copies = {each for name in tied for each in stored_names(name)}
    others = stored.keys() - used - copies
    report.unused = {name for name in others if not any(each.search(name) for each in ignored)}
    drop_removed_parts(report, module)
    reject_mismatches(report, source.name, source.stored_name)
    if published is None:
        check_unpacked(module, stored, source.name)


def _read_buffers(module: Any, of: dict[str, Any], report: LoadReport, dtype: torch.dtype, device: Device) -> set[str]:
    """Fill the stored buffers, which every rank has as a whole. Return their stored names.

    They go to the device, as parameters do: mapped files give tensors of the host.
    """
    used = set()
    lasting = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        stored = next((each for each in stored_names(name) if each in of), None)
        if name not in lasting:
            continue
        if stored is None:
            report.missing.add(name)
            continue
        used.add(stored)
        found = of[stored].get_slice(stored)[...]
        if found.shape != buffer.shape:
            report.mismatched.add((name, tuple(found.shape), tuple(buffer.shape)))
            continue
        parent, _, last = name.rpartition(".")
        wanted = _dtype_of(module, name, dtype) if found.is_floating_point() else found.dtype
        module.get_submodule(parent)._buffers[last] = found.to(wanted).to(device.torch_device)
    return used


def _dtype_of(module: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor: transformers keeps some in float32."""
    kept = module._keep_in_fp32_modules_strict or ()
    return torch.float32 if any(re.search(rf"(^|\.){each}($|\.)", name) for each in kept) else dtype


def _found_first(names: list[str], cut: TensorSlice, of: dict[str, Any]) -> tuple[list[str], torch.Tensor] | None:
    """Return what `_found` does for the first of these names that is stored."""
    return next((found for name in names if (found := _found(name, cut, of)) is not None), None)


def _found(name: str, cut: TensorSlice, of: dict[str, Any]) -> tuple[list[str], torch.Tensor] | None:
    """Return the stored names of a parameter and this rank's slice; None if it is not stored."""
    for stored in stored_names(name):
        if stored in of:
            return [stored], cut.of(of[stored].get_slice(stored))
        path, _, last = stored.rpartition(".")
        if below := _one_below_the_other(stored, of):
            whole = [of[each].get_slice(each) for each in below]
            return below, cut.of_rows(whole, [each.get_shape()[0] for each in whole])
        for parts in JOINED.get(last, ()):
            experts = sorted(
                {int(match["number"]) for each in of if (match := EXPERT.match(each)) and match["experts"] == path}
            )
            names = [[f"{path}.{number}.{part}.weight" for part in parts] for number in experts]
            if names and all(each in of for expert in names for each in expert):
                mine, within = _of_experts(cut, len(names))
                joined = [torch.cat(_parts(within, expert, of)) for expert in names[mine]]
                return [each for expert in names for each in expert], torch.stack(joined)
    return None


def _one_below_the_other(name: str, of: dict[str, Any]) -> list[str]:
    """Return the stored names of a parameter's rows, in order, if it is stored in parts; none if it is not."""
    owner, _, last = name.rpartition(f".{CONVOLUTION}")
    names = [f"{owner}.{kind}_{CONVOLUTION}{last}" for kind in "qkv"] if owner else []
    return names if names and all(each in of for each in names) else []


def _of_experts(cut: TensorSlice, count: int) -> tuple[slice, TensorSlice]:
    """Return which experts a cut of all in one tensor has, and the cut of each."""
    if cut.dimension == 0:
        return slice(*cut.ranges[0]), TensorSlice()
    return slice(0, count), cut


def _parts(cut: TensorSlice, names: list[str], of: dict[str, Any]) -> list[torch.Tensor]:
    """Return one expert's slice of each of the weights that are joined. cut: the cut of all experts in one tensor."""
    if cut.is_whole:
        return [of[name].get_slice(name)[...] for name in names]
    one = TensorSlice(cut.dimension - 1, cut.ranges[:1])  # the same of each
    return [one.of(of[name].get_slice(name)) for name in names]


def _read_generation(module: Any, source: Source) -> None:
    """Read generation_config.json as `from_pretrained` would, for the tokens that end an answer."""
    if (source.folder / "generation_config.json").is_file():
        module.generation_config = transformers.GenerationConfig.from_pretrained(source.folder, local_files_only=True)


def _make_up(
    module: Any,
    config: Any,
    mine: Slices,
    tied: dict[str, str],
    dtype: torch.dtype,
    device: Device,
    seed: int,
) -> None:
    """Make random weights one tensor at a time; a tensor is whole only until it is sliced."""
    std = float(getattr(config.get_text_config(decoder=True), "initializer_range", STD))
    named = [(name, each) for name, each in module.named_parameters() if name not in tied]
    shapes = {name: mine.whole.get(name, tuple(parameter.shape)) for name, parameter in named}
    # One buffer for all tensors. Otherwise the slices would settle in the gaps and fragment the memory.
    room = torch.empty(max(prod(shape) for shape in shapes.values()), dtype=dtype, device=device.torch_device)
    with device.random_state():
        for number, (name, parameter) in enumerate(named):
            torch.manual_seed((seed << 20) + number)
            made = room[: prod(shapes[name])].view(shapes[name])
            if made.dim() > 1:
                made.normal_(std=std)
            else:
                made.fill_(0.0 if name.endswith("bias") else 1.0)
            part = torch.empty(parameter.shape, dtype=dtype, device=device.torch_device)
            _put(module, name, torch.nn.Parameter(part.copy_(mine.cut(name).of(made)), requires_grad=False))


# ----------------------------------------------------------------------------------------------------------- computing


def _fit(module: Any, mine: Slices) -> None:
    """Adjust the sizes that modules report to those of their slices."""
    for path, held in mine.experts.items():
        part = module.get_submodule(path)
        part.num_experts = held.stop - held.first
        setattr(part, FIRST_HELD, held.first)
    for path in mine.styles:
        part = module.get_submodule(path)
        if isinstance(part, torch.nn.Linear):
            part.out_features, part.in_features = part.weight.shape
    joined = {path.rpartition(".")[0] for path, style in mine.styles.items() if style == JOINED_HEADS}
    for path, part in module.named_modules():
        is_divided = f"{path}.k_proj" in mine.styles or path in joined
        if not is_divided or not hasattr(part, "num_key_value_groups"):
            continue
        if path in joined:  # the layer finds its keys behind as many heads as it has
            kv_heads = kv_heads_of(module, part)
            part.config = _HeadsOfRank(part.config, mine.count)
            part.num_key_value_heads = max(kv_heads // mine.count, 1)
        if (kv_heads := kv_heads_of(module, part)) % mine.count:
            part.num_key_value_groups = part.num_key_value_groups * kv_heads // mine.count  # per head on this rank
    for path, plan in mine.mixers.items():
        fit_mixer(module.get_submodule(path), plan, mine.rank, mine.count)


class _HeadsOfRank:
    """A configuration with a rank's number of heads. All else is read from the whole model's, which may change."""

    def __init__(self, config: Any, count: int) -> None:
        self._config, self.num_attention_heads = config, config.num_attention_heads // count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _exchange(module: Any, mine: Slices, ranks: Ranks) -> None:
    """Register the hooks that exchange numbers between modules, as the plan defines."""

    def summed(_part: Any, _given: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_sum(ranks, output[0]), *output[1:])
        return _sum(ranks, output)

    def joined(_part: Any, _given: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.cat(tuple(ranks.gather(output)), -1)

    def narrowed(_part: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        width = given[0].shape[-1] // ranks.count
        return (given[0].narrow(-1, ranks.rank * width, width), *given[1:])

    for path, plan in mine.mixers.items():
        join_norm(module.get_submodule(path), plan, ranks)
    for path, style in mine.styles.items():
        part = module.get_submodule(path)
        if path in mine.experts:
            leave_out_others(part, mine.experts[path])
        if style in (ROWS, EXPERTS, *SPLIT):
            part.register_forward_hook(summed)
        if style in SPLIT:
            part.register_forward_pre_hook(narrowed)
        if style in GATHERED:
            part.register_forward_hook(joined)
        if style == VOCABULARY:
            _look_up(part, mine.cut(f"{path}.weight"), ranks)


def _look_up(part: Any, cut: TensorSlice, ranks: Ranks) -> None:
    """Replace a table's lookup: rows of other ranks are zero, and the sum over the ranks is the row."""
    start, stop = cut.ranges[0]

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        here = (tokens >= start) & (tokens < stop)
        rows = embedding(torch.where(here, tokens - start, 0), part.weight)
        return _sum(ranks, rows * here[..., None].to(rows.dtype))

    part.forward = forward


def _sum(ranks: Ranks, part: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, in their order, in float32."""
    parts = ranks.gather(part)
    total = parts[0].float()
    for each in parts[1:]:
        total = total + each.float()
    return total.to(part.dtype)
