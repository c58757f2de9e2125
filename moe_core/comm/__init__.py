"""One-sided communication between the processes of one machine, and collectives written with it.

1. `Channel`: put, signal, wait and flush to one other rank of a `MemoryGroup`.
2. `Plan`: which rank puts what where, and who waits for whom; checked before it runs.
3. `Collectives`: all-to-all, all-gather, reduce-scatter and all-reduce as plans.

The layers are those of MSCCL++ (arXiv 2504.09014).
"""
