"""The kinds of files that weights are imported from and exported to."""

IMPORTS = ("swin-moe", "tutel", "single", "dense")
EXPORTS = ("swin-moe", "tutel", "single", "hub")
