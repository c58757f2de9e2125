"""Names of options that cannot be extended. Options that can are in moe_core.registry."""

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
