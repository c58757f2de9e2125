"""Names of options that cannot be extended, and a check of integers. Options that can be extended
are in moe_core.registry."""

from numbers import Integral

CPU_KERNELS = (
    "amx",
    "avx512_bf16",
    "avx512_vnni",
    "avx512",
    "avx2",
    "neon_bf16",
    "neon_dotprod",
    "neon",
)  # the fastest first
KERNELS = ("auto", "triton", "torch", *CPU_KERNELS)  # MoEConfig.kernels
EXCHANGES = ("counted", "static")  # ParallelStrategy.exchange
# fields of MoEConfig
ROUTING_CHOICES = {"gate_activation": ("softmax", "sigmoid"), "balance": ("loss", "bias")}


def check_integer(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is an integer of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} ({value!r}) must be an integer of at least {least}")
