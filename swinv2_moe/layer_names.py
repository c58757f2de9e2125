"""Readable names of layers."""


def block_place(layer: str) -> str:
    """The stage and block of an MoE layer, counted from 1 as in papers.

    "layers.2.blocks.1.mlp.moe" -> "stage 3, block 2"; "blocks.1.mlp.moe" -> "block 2".
    """
    numbers = [int(part) + 1 for part in layer.split(".") if part.isdecimal()]
    if len(numbers) == 2:
        stage, block = numbers
        return f"stage {stage}, block {block}"
    if len(numbers) == 1:
        return f"block {numbers[0]}"
    return layer
