"""The speed of a rank's processor and links, and the cost of an all-to-all."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A link. An exchange of m messages with n bytes in total takes
    `m latency + delay + n / bandwidth` seconds.

    The rank and its network card handle messages one after the other. On the wire, messages to
    different ranks overlap, so an exchange waits for the delay once.
    """

    latency: float  # seconds that one more message of an exchange costs a rank
    bandwidth: float  # bytes/s that one rank sends
    delay: float = 0.0  # seconds on the wire; 0: part of the latency

    def seconds(self, messages: float, num_bytes: float, steps: float = 1) -> float:
        """Seconds of `steps` exchanges, one after the other. Messages and bytes are totals."""
        if messages == 0:
            steps = 0
        return messages * self.latency + steps * self.delay + num_bytes / self.bandwidth


@dataclass(frozen=True)
class LinkTraffic:
    """Elements and messages that one rank sends to other ranks, averaged over the ranks."""

    intra: float = 0.0  # elements inside a node
    inter: float = 0.0  # elements between nodes
    intra_messages: int = 0  # messages inside a node
    inter_messages: int = 0  # messages between nodes

    @property
    def elements(self) -> float:
        return self.intra + self.inter


@dataclass(frozen=True)
class ExchangeCost:
    """The work of one rank in one all-to-all, averaged over the ranks.

    Attributes:
        stages: what the rank sends, one stage after the other. A stage uses both kinds of links at
            the same time.
        copies: how many times the rows are copied on the way.
    """

    stages: tuple[LinkTraffic, ...] = ()
    copies: int = 0

    @property
    def traffic(self) -> LinkTraffic:
        """The sum of all stages."""
        return LinkTraffic(
            sum(stage.intra for stage in self.stages),
            sum(stage.inter for stage in self.stages),
            sum(stage.intra_messages for stage in self.stages),
            sum(stage.inter_messages for stage in self.stages),
        )


@dataclass(frozen=True)
class Machine:
    """One rank of a cluster, with links inside its node (`intra`) and between nodes (`inter`)."""

    name: str  # in tables and profiles
    intra: Link  # between ranks of a node
    inter: Link  # between nodes
    flops: float  # FLOP/s that large products reach in bf16 or fp16
    flops_fp32: float  # the same in fp32, for the router, and for experts without mixed precision
    memory_bandwidth: float  # bytes/s
    kernel_overhead: float  # seconds that the shortest kernel takes
    memory: float = math.inf  # bytes
    # time of a reduce-scatter divided by that of an all-gather; gloo sums more than it returns
    reduce_scatter: float = 1.0

    def rate(self, element_size: int) -> float:
        """FLOP/s of matrix products with elements of `element_size` bytes."""
        if element_size <= 2:
            return self.flops
        return self.flops_fp32


# Two constants are fitted to Tutel's all-to-all shares on A100 GPUs (arXiv 2206.03382, table 2:
# 33.7% at 16 and 56.7% at 256 GPUs): the share of the peak that products reach, and the latency of
# a message. Peaks, memory and link rates are from the data sheets. The newer GPUs use the shares
# and latencies of the A100, which is not tested.
_REACHED = 0.514  # fitted: share of the peak that the experts' products reach
_INTER_LATENCY = 75e-6  # fitted: seconds that one more message of a linear all-to-all costs
# 7/8 of 128 MiB in 600 us over 8 GPUs (the same paper, appendix A.2), of NVLink 3's 300 GB/s
_INTRA_REACHED = 0.653
_KERNEL = 5e-6  # an estimate: launch and run of a short kernel, and a message inside a node


def _gpu(
    name: str,
    nvlink: float,
    network: float,
    peak: float,
    peak_fp32: float,
    hbm: float,
    memory: float,
) -> Machine:
    """Rates of the data sheet in units of 1e9 (bytes/s one way), 1e12 (FLOP/s, bytes/s) and GiB."""
    return Machine(
        name,
        intra=Link(_KERNEL, nvlink * 1e9 * _INTRA_REACHED),
        inter=Link(_INTER_LATENCY, network * 1e9),
        flops=peak * 1e12 * _REACHED,
        flops_fp32=peak_fp32 * 1e12 * _REACHED,
        memory_bandwidth=hbm * 1e12,
        kernel_overhead=_KERNEL,
        memory=memory * 2**30,
    )


PROFILES = {
    # A100 SXM 80 GB: NVLink 3 at 300 GB/s, HDR InfiniBand 200 Gb/s per GPU, 312 TFLOP/s dense bf16,
    # 19.5 fp32
    "a100-hdr": _gpu(
        "a100-hdr", nvlink=300, network=25, peak=312, peak_fp32=19.5, hbm=2.039, memory=80
    ),
    # H100 SXM 80 GB: NVLink 4 at 450 GB/s, NDR InfiniBand 400 Gb/s per GPU, 989 TFLOP/s dense bf16,
    # 67 fp32
    "h100": _gpu("h100", nvlink=450, network=50, peak=989, peak_fp32=67, hbm=3.35, memory=80),
    # H200 SXM 141 GB: an H100 with HBM3e
    "h200": _gpu("h200", nvlink=450, network=50, peak=989, peak_fp32=67, hbm=4.8, memory=141),
}
