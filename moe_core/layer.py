"""The mixture-of-experts layer: route, plan, and exchange tokens with the experts."""

# T tokens, E experts, K top-k, N kept rows, M model dim

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_core.balance import BalanceBias
from moe_core.capacity import (
    RoutingStats,
    expert_capacity,
    needed_capacity_factor,
    routing_stats,
)
from moe_core.config import MoEConfig
from moe_core.context import expert_dtype, in_backward, in_transform, requiring_gradient
from moe_core.experts import Experts, SharedExperts
from moe_core.ops import DispatchPlan, chosen, make_plan
from moe_core.parallel import ExpertGroup, ParallelStrategy, Tuner
from moe_core.parallel.calls import LayerCall
from moe_core.parallel.exchange import Choices, Exchange, make_exchange, try_experts
from moe_core.parallel.search import Trial
from moe_core.router import make_router
from moe_core.routing import ROUTINGS, CallOptions, Routing, expert_logits
from moe_core.torch_tools import (
    HasExperts,
    after_pass,
    before_pass,
    ignore_experts,
    register_experts,
)


class MoELayer(HasExperts):
    """A feed-forward layer with `num_experts` experts. Every token visits `top_k` of them.

    Args:
        config: the layer's configuration.
        group: the expert-parallel ranks. Each owns the same number of consecutive experts or, with
            more ranks than experts, a part of one expert. None: all experts are in this process.
            Layers with the same ExpertGroup share process groups, shared memory and the tuner.
        strategy: how the ranks exchange data. It changes neither the result nor which rank owns
            which parameter. "auto" tries strategies and keeps the fastest one
            (moe_core.parallel.tuner).
        router: replaces the configured router: a module from tokens [T, M] to logits [T, E], or a
            sequence of such modules, from which each call selects one.
        experts: replaces the built-in experts: a module from (rows [N, M], offsets [E_local]) to
            rows [N, M]. All its parameters belong to this rank. It needs whole experts on every
            rank, and r = 1. With a group it is tried on one row per expert before the first call.

    Raises:
        ValueError: the experts do not divide over the group; `experts` is a module of this engine
            for another layer; or as ParallelStrategy.check.

    Source: arXiv 2206.03382 (Tutel), sections 2 and 3; its public code for exact semantics.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: dist.ProcessGroup | ExpertGroup | None = None,
        *,
        strategy: ParallelStrategy | str = ParallelStrategy(),  # noqa: B008 - frozen
        router: nn.Module | Sequence[nn.Module] | None = None,
        experts: nn.Module | None = None,
        device=None,
    ) -> None:
        super().__init__()
        self.config = config
        self.group = ExpertGroup.of(group)
        self.routing = ROUTINGS[config.routing](self.group)
        self.shard = config.shard(self.group.rank, self.group.size)
        is_foreign = experts is not None and not isinstance(experts, Experts)
        if isinstance(experts, Experts):
            experts.check_layer(config, self.shard)
        if is_foreign and self.shard.num_parts > 1:
            raise ValueError(
                f"an experts module needs num_experts ({config.num_experts}) to be at least the"
                f" expert-parallel size ({self.group.size})"
            )
        self.strategy = strategy
        self.chosen_strategy: ParallelStrategy | None = None  # with "auto", of the last pass
        if router is None:
            router = make_router(config, device)
        elif isinstance(router, Sequence):
            router = nn.ModuleList(router)
        self.router: nn.Module = router
        self._untried_experts = is_foreign and self.group.size > 1
        self.experts = Experts(config, self.shard, device) if experts is None else experts
        self.shared: SharedExperts | None = None
        if config.num_shared_experts:
            self.shared = SharedExperts(config, device)
        self.balance: BalanceBias | None = None
        if config.balance == "bias":
            self.balance = BalanceBias(config.num_experts, config.balance_rate, device)
        self._exchanges: dict[ParallelStrategy, Exchange] = {}
        self._exchange_of(strategy)
        self.group.copy_to_replicas(self.experts)
        self.group.calls.add(self)
        register_experts(self)
        ignore_experts(self)
        # probs [T, E], counts [E], kept [T, K] (None if no choice can be dropped) and K
        self._last: tuple[Tensor, Tensor, Tensor | None, int] | None = None

    def reset_parameters(self) -> None:
        """Initialise all parameters and biases, for example after `to_empty`.

        With several ranks this is a collective. Custom modules are initialised by their
        `reset_parameters`, or by those of the modules in them.
        """
        for child in self.children():
            _reset(child)
        self.group.copy_to_replicas(self.experts)
        register_experts(self)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that should have no weight decay, as timm's models return them:
        the biases of experts, which are 2-D and have no "bias" in their names, and what a router
        or an experts module of one's own names in a method `no_weight_decay`.
        """
        names = set()
        for prefix, module in self.named_modules():
            if module is not self and hasattr(module, "no_weight_decay"):
                names |= {f"{prefix}.{name}" for name in module.no_weight_decay()}
        return names

    @property
    def last_routing(self) -> RoutingStats | None:
        """Statistics of the last forward pass, computed on access; None before the first pass."""
        if self._last is None:
            return None
        return routing_stats(*self._last)

    def routing_of_replay(self) -> Callable[[], None]:
        """A function that makes `last_routing` describe the replay of a CUDA graph.

        Call this method after the pass was captured, and the returned function after each replay.
        """
        captured = self._last

        def restore() -> None:
            self._last = captured

        return restore

    def needed_capacity_factor(self, drop_share: float = 0.0) -> Tensor:
        """The smallest capacity factor with which this rank would have dropped at most
        `drop_share` of its choices in the last forward pass: a scalar on the device."""
        assert self._last is not None, "no forward pass yet"
        _, counts, _, top_k = self._last
        return needed_capacity_factor(counts, top_k, drop_share)

    def expert_logits(self, logits: Tensor) -> Tensor:
        """A router's logits (for Soft MoE [T, S]) -> one logit for each expert [T, E]."""
        if self.config.routing == "soft":
            return expert_logits(logits, self.config)
        return logits

    def extra_repr(self) -> str:
        return (
            f"{self.config}, {self.shard.num_experts} experts here, group of {self.group.size},"
            f" {self.strategy}"
        )

    def __prepare_scriptable__(self) -> "MoELayer":
        """torch.jit.script calls this for every module that it compiles."""
        raise NotImplementedError(
            "torch.jit.script cannot compile a MoELayer: use torch.compile or torch.export"
        )

    def forward(
        self,
        x: Tensor,
        *,
        top_k: int | None = None,
        capacity_factor: float | Tensor | None = None,
        strategy: ParallelStrategy | str | None = None,
        router: int = 0,
        batch_prioritized: bool | None = None,
        mask: Tensor | None = None,
        num_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x [..., M] -> y like x, and the auxiliary loss (a scalar of at least fp32, unweighted).

        `top_k`, `capacity_factor`, `strategy` and `batch_prioritized` replace the configured values
        for this call only; Soft MoE uses only `strategy`. `router` is the index of the router.

        In evaluation mode the capacity factor is `eval_capacity_factor`, by default dropless: the
        result of a token (with expert choice within images and Soft MoE, of an image) does not
        depend on the rest of the batch. This cannot hold with expert choice over the batch.

        Args:
            capacity_factor: a number (0: dropless), or a nonzero scalar tensor on the device of x.
                The value of a tensor may change without recompilation. A tensor is supported only
                with one rank.
            mask: bool [...]. Tokens where it is False are ignored: they do not count for capacity,
                loss and statistics, and their y is 0.
            num_tokens: the number of True values in `mask`. If it is None, they are counted, which
                waits for the device.

        Raises:
            ValueError: x is not a floating-point tensor [..., M] on the layer's device; `mask` has
                another shape or floating-point values; top_k is below 1; capacity_factor is not
                finite, or is a tensor with several ranks; the strategy does not fit the group; the
                router does not exist; a custom experts module returns another shape.
            RuntimeError: a rank of the group has ended or did not come within the group's timeout.
        """
        check_tensors(x, mask)
        options = (top_k, capacity_factor, strategy, router, batch_prioritized)
        # A layer over several ranks is excluded from torch.compile. In torch 2.11 the gradient of
        # an autograd.Function whose forward writes into its output, as collectives do, is 0
        # (https://github.com/pytorch/pytorch/issues/180642). Also, every new number of rows would
        # cause a compilation.
        forward = self._forward
        if self.group.size > 1:
            forward = self._forward_uncompiled
        if mask is None:
            return forward(x, *options)
        if self.config.routing == "soft" or self.config.choose_per_image:
            raise ValueError(
                f"router {self.config.router!r} on images needs all tokens, without a mask"
            )
        tokens = x.reshape(-1, x.shape[-1])  # [T, M]
        positions = positions_of(mask.flatten(), num_tokens)
        y, aux_loss = forward(tokens.index_select(0, positions), *options)
        return torch.zeros_like(tokens).index_copy(0, positions, y).view_as(x), aux_loss

    @torch.compiler.disable
    def _forward_uncompiled(self, *args) -> tuple[Tensor, Tensor]:
        return self._forward(*args)

    def _forward(self, x: Tensor, *options) -> tuple[Tensor, Tensor]:
        """`forward` without a mask: route, plan, exchange with the experts and combine."""
        call = self._resolve(x, *options)
        if self.group.num_ranks > 1:
            before_pass(self)
        routing = self.routing.route(x, call)
        assert routing.inputs is not None
        inputs = routing.inputs.to(expert_dtype(x))  # [N, M]
        if self.group.size > 1:
            inputs = requiring_gradient(inputs)
        exchange, trial, layer_call = call.exchange, None, None
        if self.group.size > 1:
            layer_call = LayerCall(self.group.calls, self)
        if exchange is None:
            exchange, trial = self._choose(inputs, routing, layer_call)

        if trial is not None:
            inputs = trial.begin(inputs)
        ids, priority = routing.expert_ids, routing.priority
        agreement = exchange.agree(ids, routing.top_k, routing.capacity_factor, layer_call)
        capacity = agreement.capacity
        if capacity is None:
            priority = None  # no choice is dropped, so no token comes first
        plan = make_plan(ids, self.config.num_experts, capacity, priority, call.kernels)
        self._keep_statistics(routing, plan)
        choices = Choices(routing.gates, plan, agreement, call.kernels)
        y = exchange(self.experts, inputs, choices)  # [N, M]
        if trial is not None:
            y = trial.end(y)
        if self.group.num_ranks > 1:
            after_pass(self)

        if routing.combine is not None:
            y = routing.combine(y)  # [T, M]
        y = y.to(x.dtype)
        if self.shared is not None:
            shared = self.shared(x.reshape(-1, self.config.model_dim))
            y = y + shared.to(x.dtype)
        return y.view_as(x), routing.aux_loss

    def _resolve(
        self,
        x: Tensor,
        top_k: int | None,
        capacity_factor: float | Tensor | None,
        strategy: ParallelStrategy | str | None,
        router: int,
        batch_prioritized: bool | None,
    ) -> CallOptions:
        """Check the options of a call, and replace those that are None."""
        config = self.config
        if strategy is None:
            strategy = self.strategy
        if capacity_factor is None:
            capacity_factor = config.capacity_factor_in(self.training)
            if not self.training:
                strategy = strategy_in_evaluation(strategy, capacity_factor)
        if top_k is None:
            top_k = config.top_k
        top_k = min(top_k, config.num_experts)
        if batch_prioritized is None:
            batch_prioritized = config.batch_prioritized
        check_numbers(x, top_k, capacity_factor, config, self.group.size)
        routers = [self.router]
        if isinstance(self.router, nn.ModuleList):
            routers = list(self.router)
        if not 0 <= router < len(routers):
            raise ValueError(
                f"router ({router}) must be below the layer's number of routers ({len(routers)})"
            )
        exchange = self._exchange_of(strategy, capacity_factor)
        if self.group.size > 1:
            self._check_ranks(x)
        return CallOptions(
            config,
            top_k,
            capacity_factor,
            exchange,
            routers[router],
            self.balance,
            batch_prioritized,
            self.training,
            chosen(config.kernels, x),
        )

    def _check_ranks(self, x: Tensor) -> None:
        """Raise ValueError for an input or experts that cannot be used over several ranks."""
        if in_transform(x):
            raise ValueError(
                "a MoELayer over several ranks supports no torch.func transform and no forward-mode"
                " derivative: use a layer with group=None"
            )
        check_devices(self, x)
        if self._untried_experts:
            try_experts(self.experts, x.new_zeros(self.shard.num_experts, x.shape[-1]))
            self._untried_experts = False

    def _exchange_of(
        self, strategy: ParallelStrategy | str, capacity_factor: float | Tensor = 1.0
    ) -> Exchange | None:
        """The exchange of a strategy. It is created and checked at the first call. None: the tuner
        chooses.

        Raises:
            ValueError: the strategy does not fit the group, the experts or the capacity.
        """
        if strategy == "auto":
            if self.group.size > 1:
                return None
            strategy = ParallelStrategy()
        if not isinstance(strategy, ParallelStrategy):
            raise ValueError(f"strategy ({strategy!r}) must be a ParallelStrategy or 'auto'")
        if strategy not in self._exchanges:
            exchange = make_exchange(self.config, self.group, strategy)
            if strategy.r != 1 and not isinstance(self.experts, Experts):
                raise ValueError(f"r ({strategy.r}) must be 1 with a custom experts module")
            self._exchanges[strategy] = exchange
        if strategy.exchange == "static":
            check_has_capacity(capacity_factor, self.config)
        return self._exchanges[strategy]

    def _choose(
        self, tokens: Tensor, routing: Routing, layer_call: LayerCall | None
    ) -> tuple[Exchange, Trial | None]:
        """The exchange that the tuner of the group chooses, and its trial if the call is one.

        It tries strategies in training with gradients, and in evaluation without gradients.
        """
        top_k, factor = routing.top_k, routing.capacity_factor
        assert not isinstance(factor, Tensor), "over several ranks it is a number"
        most_tokens = self.group.most_tokens(tokens.shape[0], tokens.device, layer_call)
        # Without a capacity limit (0) the key contains the mean load of an expert.
        capacity = expert_capacity(most_tokens, self.config.num_experts, top_k, factor or 1.0)
        assert isinstance(capacity, int)
        tuner = Tuner.of(self.group)
        built_in = isinstance(self.experts, Experts)
        training = torch.is_grad_enabled()
        key = tuner.key(
            self.config, top_k, tokens.element_size(), built_in, capacity, training, factor != 0
        )
        strategy, trial = tuner.choose(self, key, explore=self.training == training)
        self.chosen_strategy = strategy
        exchange = self._exchange_of(strategy)
        assert exchange is not None
        return exchange, trial

    def _keep_statistics(self, routing: Routing, plan: DispatchPlan) -> None:
        """Keep the inputs of `last_routing`.

        A backward pass that recomputes activations does not replace those of a later pass."""
        if in_backward():
            return
        if in_transform(routing.probs):  # its tensors end with the transform
            self._last = None
            return
        counts, kept = self.routing.counts_and_kept(plan)
        self._last = (routing.probs.detach(), counts, kept, routing.top_k)


def _reset(module: nn.Module) -> None:
    """Call `reset_parameters` of a module, or of its children if it has none."""
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    for child in module.children():
        _reset(child)


# Checks of the arguments. They are the same on every rank, before the first collective.


def check_tensors(x: Tensor, mask: Tensor | None) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a tensor, not {type(x).__name__}")
    if x.dim() == 0:
        raise ValueError("x is 0-d, its last dim must be the layer's model_dim")
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}, it must be floating-point")
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask must be a tensor, not {type(mask).__name__}")
    if mask.is_floating_point():  # an additive mask keeps the positions that are 0
        raise ValueError(f"mask has dtype {mask.dtype}, it must be bool")
    if mask.shape != x.shape[:-1]:
        raise ValueError(f"mask has shape {list(mask.shape)}, the tokens of x {list(x.shape[:-1])}")


def positions_of(mask: Tensor, count: int | None) -> Tensor:
    """The indices [count] at which `mask` [T] is True, in ascending order.

    Raises:
        ValueError: `count` is not their number. This is checked on a CPU only, since reading the
            number would wait for a GPU.
    """
    if count is None:
        return mask.nonzero().squeeze(1)
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        actual = int(mask.count_nonzero())
        if actual != count:
            raise ValueError(f"num_tokens is {count}, mask has {actual} True values")
    return mask.nonzero_static(size=count).squeeze(1)


def check_numbers(
    x: Tensor, top_k: int, capacity_factor: float | Tensor, config: MoEConfig, group_size: int
) -> None:
    """Raise ValueError for numbers that a layer over `group_size` ranks cannot use."""
    if x.shape[-1] != config.model_dim:
        raise ValueError(
            f"x has {x.shape[-1]} channels, the layer's model_dim is {config.model_dim}"
        )
    if top_k < 1:
        raise ValueError(f"top_k ({top_k}) must be at least 1")
    if isinstance(capacity_factor, Tensor):
        if group_size > 1:
            raise ValueError(
                f"capacity_factor is a tensor, over {group_size} ranks it must be a number"
            )
        return
    if capacity_factor == 0 and config.routing == "expert_choice":
        raise ValueError(
            "capacity_factor (0) must not be 0 with expert choice: it says how many tokens an"
            " expert chooses"
        )
    # torch.compile cannot trace math.isfinite of a value that changes between calls.
    if not abs(capacity_factor) < math.inf:
        raise ValueError(f"capacity_factor ({capacity_factor}) must be finite; 0 is dropless")


def check_has_capacity(capacity_factor: float | Tensor, config: MoEConfig) -> None:
    """Raise ValueError for a static exchange without a capacity."""
    is_dropless = not isinstance(capacity_factor, Tensor) and capacity_factor == 0
    if is_dropless and config.routing != "soft":
        raise ValueError(
            "capacity_factor (0) must not be 0 with exchange 'static', which sends as many rows as"
            " the capacity"
        )


def check_devices(layer: nn.Module, x: Tensor) -> None:
    """Raise ValueError if a parameter is on another device than x."""
    for name, parameter in layer.named_parameters():
        if parameter.device != x.device:
            raise ValueError(f"x is on {x.device}, the layer's {name} on {parameter.device}")


def strategy_in_evaluation(
    strategy: ParallelStrategy | str, capacity_factor: float
) -> ParallelStrategy | str:
    """The configured strategy in evaluation: without a capacity a static one counts its rows."""
    if not isinstance(strategy, ParallelStrategy) or strategy.exchange != "static":
        return strategy
    if capacity_factor != 0:
        return strategy
    return replace(strategy, exchange="counted", all_to_all="linear")
