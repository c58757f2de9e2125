"""Names of fixed alternatives. Those that can be extended are in moe_core.registry."""

KERNELS = ("auto", "triton", "torch")  # MoEConfig.kernels
EXCHANGES = ("counted", "static")  # ParallelStrategy.exchange
# fields of MoEConfig
ROUTING_CHOICES = {"gate_activation": ("softmax", "sigmoid"), "balance": ("loss", "bias")}
