"""Sizes of blocks. `triton.cdiv` and `triton.next_power_of_2` take ten times as long on a host."""

import functools


def cdiv(number: int, size: int) -> int:
    """The number of blocks of `size` that cover `number`, at least 0."""
    return -(-number // size)


@functools.cache
def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, at least 1."""
    return 1 << max(number - 1, 0).bit_length()
