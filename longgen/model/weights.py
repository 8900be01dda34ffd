"""Checks a checkpoint's weights against its config before any of them is read.

transformers itself does the comparing, on the meta device: the names and shapes in the files' headers go through its
key conversion (prefixes, experts stored one by one) into a model without memory, as the weights would.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from longgen.errors import CheckpointError
from longgen.model.files import listed, reason
from longgen.model.quiet import quiet_transformers
from longgen.model.shards import StoredTensor
from longgen.units import show_count

FLOATS = ("BF16", "F16", "F32", "F64")
_EXPERT = re.compile(r"(.*\.experts)\.([0-9]+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Differences:
    """How weight files differ from the model that a config describes, in the model's names.

    missing: weights the files lack, tied ones left out.   left_over: "name (file)" of those that nothing uses.
    misshapen: "name (file) is [a, b] where [c, d] belongs"; last, those that cannot be put together from experts stored
    one by one, with what is odd about the first.
    """

    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    misshapen: tuple[str, ...]


def check_weights(folder: Path, config: Any, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises CheckpointError, with what is wrong and what to do, unless the files hold the config's weights exactly.

    Args:
        folder: a checkpoint folder.
        config: its text config, from read_config.
        tensors: what its files hold, from read_shards.
    """
    quantised = sorted(name for name, tensor in tensors.items() if tensor.dtype not in FLOATS and _used(name))
    if quantised:
        stored = tensors[quantised[0]]
        raise CheckpointError(
            f"{folder / stored.file} holds {quantised[0]} as {stored.dtype}: longgen does not run quantised weights; "
            "use the checkpoint that is not quantised"
        )
    _refuse_differences(folder, compare(tensors, config))
    gaps = sorted(_expert_gaps(tensors, config))
    if gaps:
        raise CheckpointError(f"{folder} lacks experts that config.json calls for: {listed(gaps)}; get it again")


def _used(name: str) -> bool:
    """Whether a stored weight is of the text model: the type of vision and multi-token prediction does not matter."""
    return not name.startswith(("mtp.", "model.visual.", "visual."))


def _refuse_differences(folder: Path, differences: Differences) -> None:
    missing, misshapen, left_over = differences.missing, differences.misshapen, differences.left_over
    if missing:
        raise CheckpointError(
            f"missing {show_count(len(missing), 'weight')} that config.json calls for in {folder}: "
            f"{listed(list(missing))}; get the files again, or the config.json that belongs to them"
        )
    if misshapen:
        raise CheckpointError(
            f"the weights in {folder} do not fit its config.json, {show_count(len(misshapen), 'weight')} of another "
            f"shape: {misshapen[0]}; get the files again, or the config.json that belongs to them"
        )
    if left_over:
        raise CheckpointError(
            f"{folder} holds {show_count(len(left_over), 'weight')} that its config.json has no place for: "
            f"{listed(list(left_over))}; get the config.json that belongs to the files"
        )


def compare(tensors: Mapping[str, StoredTensor], config: Any) -> Differences:
    """What transformers would find missing, left over and misshapen on loading `tensors`; takes no memory."""
    try:
        with quiet_transformers(), torch.device("meta"):
            # A copy, because transformers writes the type of the model it makes into its config.
            model: Any = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.bfloat16)
    # Sizes that do not go together, of which the libraries speak as they like.
    except Exception as error:
        raise CheckpointError(f"no model can be made of its config.json: {reason(error)}") from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {name: torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta") for name, tensor in tensors.items()}
    load = LoadStateDictConfig(
        device_map={"": "meta"}, dtype=torch.bfloat16, weight_mapping=get_model_conversion_mapping(model)
    )
    with quiet_transformers():
        info, _ = convert_and_load_state_dict_in_model(
            model=model, state_dict=stored, load_config=load, disk_offload_index=None
        )
    model._adjust_missing_and_unexpected_keys(info)
    # A conversion fails where what it puts together is of different shapes or numbers.
    failed = sorted(str(name) for name in info.conversion_errors)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    absent = info.missing_keys.union(failed)
    missing = {name for name in absent.difference(failed) if tied.get(name, name) in absent}
    shapes = {name: (tuple(found), tuple(wanted)) for name, found, wanted in sorted(info.mismatched_keys)}
    misshapen = [
        f"{place} is {list(found)} where {list(wanted)} belongs"
        for place, (found, wanted) in zip(_places(list(shapes), tensors), shapes.values(), strict=True)
    ]
    misshapen += [_odd_parts(name, expected.get(name, ()), tensors) for name in failed[:1]] + failed[1:]
    left_over = _places(sorted(info.unexpected_keys), tensors)
    return Differences(tuple(sorted(missing)), tuple(left_over), tuple(misshapen))


def _places(names: Sequence[str], tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Each weight with the file that holds it, maybe under a longer prefix than the model's own name has."""
    by_tail: dict[str, set[str]] = {}
    for stored, tensor in tensors.items() if names else ():
        parts = stored.split(".") if _used(stored) else []
        for start in range(len(parts)):
            by_tail.setdefault(".".join(parts[start:]), set()).add(tensor.file)

    def place(name: str) -> str:
        files = {tensors[name].file} if name in tensors else by_tail.get(name.removeprefix("model."), set())
        return f"{name} ({min(files)})" if len(files) == 1 else name

    return [place(name) for name in names]


def _odd_parts(name: str, wanted: tuple[int, ...], tensors: Mapping[str, StoredTensor]) -> str:
    """Why the experts that are stored one by one cannot be put together to the weight `name` of shape `wanted`."""
    stem = name[name.find("layers.") :].rpartition(".")[0]
    by_kind: dict[str, list[str]] = {}
    for stored in tensors:
        match = _EXPERT.fullmatch(stored)
        if match and match[1].endswith(stem):
            by_kind.setdefault(match[3], []).append(stored)
    shapes = {kind: Counter(tensors[each].shape for each in names).most_common() for kind, names in by_kind.items()}
    for kind, ((usual, _), *others) in shapes.items():
        if others:
            odd = next(each for each in by_kind[kind] if tensors[each].shape != usual)
            return f"{odd} ({tensors[odd].file}) is {list(tensors[odd].shape)} where the others are {list(usual)}"
    found = ", ".join(f"{kind} {list(usual)}" for kind, ((usual, _), *_) in shapes.items())
    return f"the parts of {name} ({found}) do not make {list(wanted)}"


def _expert_gaps(tensors: Mapping[str, StoredTensor], config: Any) -> Iterator[str]:
    """Experts by number that are not stored though others of the layer are: putting them together would not notice
    one number in another's place."""
    numbers: dict[str, set[int]] = {}
    for name in tensors:
        if match := _EXPERT.fullmatch(name):
            numbers.setdefault(f"{match[1]}.*.{match[3]}", set()).add(int(match[2]))
    for pattern, found in numbers.items():
        if not pattern.startswith("mtp."):
            yield from (pattern.replace("*", str(n)) for n in set(range(config.num_experts)) - found)
