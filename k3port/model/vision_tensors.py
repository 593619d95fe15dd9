"""Names, shapes and types of the vision tower and the projector as stored (never quantised). No torch import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3port.errors import ConfigError
from k3port.model.config_reader import MAX_SIZE, Reader
from k3port.model.json_file import is_id, shown
from k3port.model.text_tensors import TensorSpec

VISION_PREFIXES = ("vision_tower.", "mm_projector.")

_KEYS = (
    "patch_size",
    "init_pos_emb_height",
    "init_pos_emb_width",
    "vt_hidden_size",
    "qkv_hidden_size",
    "vt_intermediate_size",
    "vt_num_hidden_layers",
    "merge_kernel_size",
    "text_hidden_size",
)


def is_vision_tensor(name: str) -> bool:
    """Whether a normalised name belongs to the vision tower or the projector."""
    return name.startswith(VISION_PREFIXES)


def vision_tensors(vision: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """The stored vision tensors of a K3 ``vision_config``, tower first, all BF16 and without biases.

    Raises:
        ConfigError: keys that give the shapes are missing, or are no sizes.
    """
    faults: list[str] = []
    reader = Reader(vision, "vision_config", faults)
    reader.require(_KEYS)
    for key in _KEYS:
        if key != "merge_kernel_size":
            reader.integer(key, maximum=10_000 if key == "vt_num_hidden_layers" else MAX_SIZE)
    kernel = vision.get("merge_kernel_size", [1, 1])
    if not isinstance(kernel, list | tuple) or len(kernel) != 2 or not all(is_id(side, MAX_SIZE) for side in kernel):
        reader.fault(f"merge_kernel_size = {shown(kernel)}: expected two whole numbers")
    if faults:
        raise ConfigError(
            "vision_config does not describe the vision tower of Kimi K3",
            reasons=faults,
            hint="compare with the published config.json of Kimi K3",
        )
    patch, hidden, width = vision["patch_size"], vision["vt_hidden_size"], vision["qkv_hidden_size"]
    inner, text = vision["vt_intermediate_size"], vision["text_hidden_size"]
    merged = hidden * vision["merge_kernel_size"][0] * vision["merge_kernel_size"][1]
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (hidden, 3, patch, patch),
        "vision_tower.patch_embed.pos_emb.weight": (
            vision["init_pos_emb_height"],
            vision["init_pos_emb_width"],
            hidden,
        ),
    }
    for block in range(vision["vt_num_hidden_layers"]):
        prefix = f"vision_tower.encoder.blocks.{block}."
        shapes[prefix + "norm0.weight"] = (hidden,)
        shapes[prefix + "wqkv.weight"] = (3 * width, hidden)
        shapes[prefix + "wo.weight"] = (hidden, width)
        shapes[prefix + "norm1.weight"] = (hidden,)
        shapes[prefix + "mlp.fc0.weight"] = (inner, hidden)
        shapes[prefix + "mlp.fc1.weight"] = (hidden, inner)
    shapes["vision_tower.encoder.final_layernorm.weight"] = (hidden,)
    shapes["mm_projector.proj.0.weight"] = (merged, merged)
    shapes["mm_projector.proj.2.weight"] = (text, merged)
    shapes["mm_projector.post_norm.weight"] = (text,)
    return {name: TensorSpec(shape, "BF16", ("BF16",)) for name, shape in shapes.items()}
