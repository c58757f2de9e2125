"""`tutel.moe`: the layer, and functions to build custom layers."""

from moe_core.compat.tutel.dispatch import (
    extract_critical,
    fast_cumsum_sub_one,
    fast_decode,
    fast_dispatcher,
    fast_encode,
    get_reversed_sample_ids,
    get_topk_selection,
)
from moe_core.compat.tutel.layer import moe_layer

top_k_routing = extract_critical

__all__ = [
    "extract_critical",
    "fast_cumsum_sub_one",
    "fast_decode",
    "fast_dispatcher",
    "fast_encode",
    "get_reversed_sample_ids",
    "get_topk_selection",
    "moe_layer",
    "top_k_routing",
]
