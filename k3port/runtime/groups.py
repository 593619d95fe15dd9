"""How a model is spread over devices: which groups are legal, what a rank of one holds, where a pipeline is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from k3port.errors import ConfigError
from k3port.model.config import ModelConfig
from k3port.model.shapes import EXPERT_GROUP, legal_tp_sizes, rank_dims
from k3port.model.weights import embedding_params, head_params, layer_params


@dataclass(frozen=True)
class Group:
    """One arrangement of devices that holds the model once.

    Attention, the dense MLP and the shared experts are split over ``tp`` ranks. Routed experts are split over
    ``max(tp, ep)`` ranks: ``ep`` ways by whole experts, the rest by width. With ``ep`` above ``tp`` there are
    ``ep / tp`` attention groups, and each serves its share of the requests. ``pp`` stages hold consecutive layers.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def attention_groups(self) -> int:
        return max(1, self.ep // self.tp)

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert's width."""
        return max(1, self.tp // self.ep)

    @property
    def gpus(self) -> int:
        return self.tp * self.attention_groups * self.pp

    def __str__(self) -> str:
        """``tp 8 x pp 2``: the sizes that are not 1."""
        parts = [f"{name} {size}" for name, size in (("tp", self.tp), ("ep", self.ep), ("pp", self.pp)) if size > 1]
        return " x ".join(parts) or "one device"


def group_faults(config: ModelConfig, group: Group, *, mxfp4: bool | None = None) -> list[str]:
    """Why a model cannot be split this way; empty where it can."""
    faults: list[str] = []
    try:
        rank_dims(config, 0, group.tp, mxfp4=mxfp4)
    except ConfigError as exc:
        faults += [*exc.reasons, exc.hint]
    if group.ep > 1:
        if config.moe is None:
            faults.append(f"ep = {group.ep}: the model has no routed experts")
        elif config.moe.num_experts % group.ep:
            experts = config.moe.num_experts
            sizes = ", ".join(str(n) for n in range(2, experts + 1) if experts % n == 0)
            faults.append(f"{experts} experts do not divide by ep = {group.ep}; legal: {sizes}")
        if max(group.ep, group.tp) % min(group.ep, group.tp):
            faults.append(f"ep = {group.ep} and tp = {group.tp}: one must divide the other")
    if group.pp > config.num_layers:
        faults.append(f"pp = {group.pp}: the model has {config.num_layers} layers")
    return faults


def require_legal(config: ModelConfig, group: Group, *, mxfp4: bool | None = None) -> None:
    """Raises:
    ConfigError: the model cannot be split this way.
    """
    faults = group_faults(config, group, mxfp4=mxfp4)
    if faults:
        sizes = f"tp = {group.tp}, ep = {group.ep}, pp = {group.pp}"
        legal = ", ".join(map(str, legal_tp_sizes(config, mxfp4=mxfp4)))
        raise ConfigError(
            f"this model cannot be split over {sizes}",
            reasons=faults,
            hint=f"legal tensor-parallel sizes for this model: {legal}",
        )


@dataclass(frozen=True)
class LayerBytes:
    """Weights of one layer on one rank."""

    model: int
    """In the activation dtype."""
    float32: int
    experts: int


ExpertBytes = Callable[[Group], int]
"""Bytes of all routed experts of one layer on one rank of a group, padding included."""


@cache
def _param_bytes(config: ModelConfig, layer: int, tp: int, itemsize: int, mxfp4: bool) -> tuple[int, int]:
    params = layer_params(config, layer, rank_dims(config, 0, tp, mxfp4=mxfp4))
    model = sum(p.num_elements for p in params if p.kind == "model")
    float32 = sum(p.num_elements for p in params if p.kind == "float32")
    return model * itemsize, float32 * 4


def layer_bytes(
    config: ModelConfig, group: Group, itemsize: int, experts: ExpertBytes, *, mxfp4: bool
) -> list[LayerBytes]:
    """Every layer's weights on one rank. Layers of one kind hold the same, so each kind is computed once."""
    per_layer = experts(group)
    first_of_kind: dict[tuple[bool, bool], int] = {}
    result = []
    for layer in range(config.num_layers):
        kind = (config.is_kda(layer), config.is_moe(layer))
        model, float32 = _param_bytes(config, first_of_kind.setdefault(kind, layer), group.tp, itemsize, mxfp4)
        result.append(LayerBytes(model, float32, per_layer if config.is_moe(layer) else 0))
    return result


@cache
def end_bytes(config: ModelConfig, tp: int, itemsize: int, mxfp4: bool) -> tuple[int, int]:
    """Bytes of the embedding, and of the final mix, norm and head, on one rank."""
    dims = rank_dims(config, 0, tp, mxfp4=mxfp4)
    embedding = sum(p.num_elements for p in embedding_params(dims)) * itemsize
    head = sum(p.num_elements for p in head_params(config, dims)) * itemsize
    return embedding, head


def split_layers(costs: Sequence[int], stages: int) -> list[range]:
    """Cuts consecutive layers into stages so that the largest stage is as small as it can be.

    Args:
        costs: bytes per layer.
        stages: at most the number of layers.
    """
    low, high = max(costs), sum(costs)
    while low < high:
        limit = (low + high) // 2
        if len(_fill(costs, limit)) <= stages:
            high = limit
        else:
            low = limit + 1
    cuts = _fill(costs, low)
    # Fewer stages than asked hold it all: the longest ones are halved, which makes none larger.
    while len(cuts) < stages:
        longest = max(range(len(cuts)), key=lambda i: len(cuts[i]))
        stage = cuts[longest]
        middle = stage.start + len(stage) // 2
        cuts[longest : longest + 1] = [range(stage.start, middle), range(middle, stage.stop)]
    return cuts


def _fill(costs: Sequence[int], limit: int) -> list[range]:
    cuts, start, total = [], 0, 0
    for layer, cost in enumerate(costs):
        if total + cost > limit and layer > start:
            cuts.append(range(start, layer))
            start, total = layer, 0
        total += cost
    return [*cuts, range(start, len(costs))]


def candidate_groups(config: ModelConfig, gpus_per_node: int, max_gpus: int, *, mxfp4: bool) -> Iterator[Group]:
    """Legal groups from small to large: any size inside one node, whole nodes beyond."""
    tps = legal_tp_sizes(config, mxfp4=mxfp4)
    for gpus in range(1, max_gpus + 1):
        if gpus > gpus_per_node and gpus % gpus_per_node:
            continue
        # Inside a node the widest split first; then fewest stages, since every stage waits for the one before.
        for tp in sorted((tp for tp in tps if gpus % tp == 0), key=lambda tp: (tp > gpus_per_node, -tp)):
            spread = gpus // tp
            # Whole experts instead of slices of them cost the same, and save what a kernel rounds up in a slice.
            for group in dict.fromkeys((Group(tp, 1, spread), Group(tp, tp, spread), Group(tp, gpus, 1))):
                if not group_faults(config, group, mxfp4=mxfp4):
                    yield group


def choose_group(
    config: ModelConfig, *, tp: int | None, ep: int | None, pp: int | None, gpus: int, mxfp4: bool, gpus_per_node: int
) -> Group:
    """Fills in the sizes that were not given so that the group uses ``gpus`` devices.

    Raises:
        ConfigError: no legal group has these sizes.
    """
    legal = [n for n in legal_tp_sizes(config, mxfp4=mxfp4) if gpus % n == 0 and n <= gpus_per_node]
    if tp is None:
        divisor = (pp or 1) * max(1, (ep or 1) // max(legal, default=1))
        tp = max((n for n in legal if n <= max(1, gpus // divisor)), default=1)
    width = max(tp, ep or 1)
    group = Group(tp, ep or 1, pp if pp is not None else max(1, gpus // width))
    require_legal(config, group, mxfp4=mxfp4)
    if group.gpus != gpus:
        raise ConfigError(
            f"{group} is {group.gpus} devices, asked for {gpus}",
            hint="leave out --gpus, or one of --tp, --ep, --pp",
        )
    return group


def local_experts(config: ModelConfig, group: Group) -> tuple[int, int]:
    """Whole experts on one rank, and the part of each expert's width."""
    if config.moe is None:
        return 0, 0
    return config.moe.num_experts // group.ep, config.moe.width // group.expert_tp


def expert_storage(weight_format: str) -> tuple[int, int, str]:
    """Bits per weight, weights per scale byte (0: no scales), and both in words.

    Raises:
        KeyError: an unknown format.
    """
    return _STORAGE[weight_format]


_STORAGE: Mapping[str, tuple[int, int, str]] = {
    "mxfp4": (4, EXPERT_GROUP, f"(1/2 + 1/{EXPERT_GROUP}) B"),
    "bfloat16": (16, 0, "2 B"),
    "float32": (32, 0, "4 B"),
}
