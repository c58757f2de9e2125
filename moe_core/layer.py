"""The mixture-of-experts layer: route, plan, and exchange tokens with the experts."""

# T tokens, E experts, K top-k, N kept rows, M model dim

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_core.balance import BalanceBias
from moe_core.capacity import (
    RoutingStats,
    counts_and_kept,
    expert_capacity,
    needed_capacity_factor,
    routing_stats,
)
from moe_core.config import MoEConfig
from moe_core.context import expert_dtype, in_backward, in_transform, without_autocast
from moe_core.expert_choice import factor_by_image
from moe_core.experts import Experts, SharedExperts
from moe_core.layer_inputs import (
    as_images,
    check_capacity_factor,
    check_devices,
    check_exchange,
    check_output_norm,
    check_slots,
    check_tensors,
    expert_input,
    is_dropless,
    positions_of,
)
from moe_core.ops import DispatchPlan, make_plan, soft_combine, soft_dispatch
from moe_core.parallel import ExpertGroup, ParallelStrategy, Tuner
from moe_core.parallel.exchange import Agreement, Exchange, make_exchange, try_experts
from moe_core.parallel.search import Trial
from moe_core.router import (
    Routing,
    logits_of,
    make_router,
    route,
    route_by_experts,
    router_logits,
    split_gates,
)
from moe_core.soft import expert_logits, route_slots
from moe_core.torch_tools import HasExperts, before_pass, ignore_experts, register_experts


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
        if strategy != "auto":
            self._exchange_of(strategy)
        self.group.copy_to_replicas(self.experts)
        register_experts(self)
        ignore_experts(self)
        # probs [T, E], counts [E], kept [T, K] (None if no choice can be dropped) and K
        self._last: tuple[Tensor, Tensor, Tensor | None, int] | None = None

    def reset_parameters(self) -> None:
        """Initialise all parameters and biases, for example after `to_empty`.

        With several ranks this is a collective. Modules of one's own are initialised by their
        `reset_parameters`, or by those of the modules in them.
        """
        for child in self.children():
            _reset(child)
        self.group.copy_to_replicas(self.experts)

    @property
    def last_routing(self) -> RoutingStats | None:
        """Statistics of the last forward pass, computed on access; None before the first pass."""
        if self._last is None:
            return None
        return routing_stats(*self._last)

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
        output_norm: nn.Module | None = None,
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
            output_norm: a module from [T, M] to [T, M], applied to the experts' results before the
                gate value: `y = s G norm(sum_k (g_k / G) e_k)` with `G = sum_k g_k`. s is 1 / G of
                an undecided router. A norm of y itself would remove the gate value. Shared experts
                are normalised separately. Not for expert choice and Soft MoE.

        Raises:
            ValueError: x is not a floating-point tensor [..., M] on the layer's device; `mask` has
                another shape or floating-point values; top_k is below 1; capacity_factor is not
                finite, or is a tensor with several ranks; the strategy does not fit the group; the
                router does not exist; a custom experts module returns another shape.
            RuntimeError: a rank of the group has ended or did not come within the group's timeout.
        """
        check_tensors(x, mask)
        # A layer over several ranks is excluded from torch.compile. In torch 2.11 the gradient of
        # an autograd.Function whose forward writes into its output, as collectives do, is 0
        # (https://github.com/pytorch/pytorch/issues/180642). Also, every new number of rows would
        # cause a compilation.
        forward = self._forward
        if self.group.size > 1:
            forward = self._forward_uncompiled
        check_output_norm(output_norm, self.config)
        options = (top_k, capacity_factor, strategy, router, batch_prioritized, output_norm)
        if mask is None:
            return forward(x, *options)
        if self.config.routing == "soft" or self.config.choose_per_image:
            raise ValueError(f"router {self.config.router!r} on images needs all tokens: no mask")
        tokens = x.reshape(-1, x.shape[-1])  # [T, M]
        positions = positions_of(mask.flatten(), num_tokens)
        kept_tokens = tokens.index_select(0, positions)
        y, aux_loss = forward(kept_tokens, *options)
        return torch.zeros_like(tokens).index_copy(0, positions, y).view_as(x), aux_loss

    @torch.compiler.disable
    def _forward_uncompiled(self, *args) -> tuple[Tensor, Tensor]:
        return self._forward(*args)

    def _forward(
        self,
        x: Tensor,
        top_k,
        capacity_factor,
        strategy,
        router: int,
        batch_prioritized,
        output_norm: nn.Module | None,
    ) -> tuple[Tensor, Tensor]:
        """`forward` without a mask: route, plan, exchange with the experts and combine."""
        config = self.config
        if top_k is None:
            top_k = config.top_k
        if strategy is None:
            strategy = self.strategy
        if capacity_factor is None:
            capacity_factor = config.capacity_factor_in(self.training)
            if not self.training:
                strategy = _of_evaluation(strategy, capacity_factor)
        if batch_prioritized is None:
            batch_prioritized = config.batch_prioritized
        top_k = min(top_k, config.num_experts)
        self._check(x, top_k, capacity_factor, strategy, router)
        if self.group.num_ranks > 1:
            before_pass(self)

        tokens = x.reshape(-1, config.model_dim)  # [T, M]
        if config.routing == "soft":
            y, aux_loss = self._mix(x, strategy, router)
        else:
            num_images = as_images(x).shape[0]
            has_equal_images = self.group.size == 1 or self.group.has_equal_tokens
            if config.choose_per_image and not self.training and has_equal_images:
                capacity_factor = factor_by_image(
                    capacity_factor, num_images, tokens.shape[0], config.num_experts
                )
            normalize_gates = output_norm is None
            routing, inputs = self._route(
                tokens, top_k, self._router(router), num_images, normalize_gates
            )
            gate_scale: Tensor | None = None  # [T, 1]
            if output_norm is not None:
                routing, gate_scale = split_gates(routing, config)
            inputs = expert_input(inputs, self.group.size)
            y = self._through_experts(
                inputs, routing, top_k, capacity_factor, strategy, batch_prioritized
            )
            if output_norm is not None:
                y = output_norm(y.to(x.dtype)) * gate_scale
            aux_loss = routing.aux_loss
        y = y.to(x.dtype)
        if self.shared is not None:
            shared = self.shared(tokens)
            if output_norm is not None:
                shared = output_norm(shared)
            y = y + shared.to(x.dtype)
        return y.view_as(x), aux_loss

    def _through_experts(
        self,
        tokens: Tensor,
        routing: Routing,
        top_k: int,
        capacity_factor: float,
        strategy: ParallelStrategy | str,
        batch_prioritized: bool = False,
    ) -> Tensor:
        """tokens [T, M] -> the sums of their experts' results, weighted by the gates [T, M]."""
        strategy, trial = self._choose(strategy, tokens, top_k, capacity_factor)
        if trial is not None:
            tokens = trial.begin(tokens)
        exchange = self._exchange_of(strategy)
        plan, agreement = self._plan(exchange, routing, top_k, capacity_factor, batch_prioritized)
        self._keep_statistics(routing, plan, top_k)
        y = exchange(self.experts, tokens, routing.gates, plan, agreement)
        if trial is not None:
            y = trial.end(y)
        return y

    def _mix(
        self, x: Tensor, strategy: ParallelStrategy | str, router: int
    ) -> tuple[Tensor, Tensor]:
        """Soft MoE: the experts process slots, which are weighted means of an image's tokens.

        Slots are processed as tokens whose experts are already chosen.
        """
        config = self.config
        tokens = as_images(x)  # [B, N, M]
        module = self._router(router)
        logits = router_logits(module, tokens.flatten(0, 1))  # [T, S]
        check_slots(logits, config)
        logits = logits.view(tokens.shape[0], tokens.shape[1], logits.shape[1])  # [B, N, S]
        inputs = tokens.to(expert_dtype(tokens))
        slots = expert_input(soft_dispatch(inputs, logits), self.group.size)  # [B, S, M]
        routing = route_slots(slots, logits, config)
        # At a factor of 1 the capacity of an expert is its number of slots, so none is dropped.
        rows = self._through_experts(slots.flatten(0, 1), routing, 1, 1.0, strategy)
        y = soft_combine(rows.view_as(slots), logits)
        return y.flatten(0, 1), routing.aux_loss

    def _exchange_of(self, strategy: ParallelStrategy | str) -> Exchange:
        """The exchange of a strategy. It is created and checked at the first call.

        Raises:
            ValueError: the strategy does not fit the group or the experts.
        """
        if not isinstance(strategy, ParallelStrategy):
            raise ValueError(f"strategy ({strategy!r}) must be a ParallelStrategy or 'auto'")
        if strategy not in self._exchanges:
            exchange = make_exchange(self.config, self.group, strategy)
            if strategy.r != 1 and not isinstance(self.experts, Experts):
                raise ValueError(f"r ({strategy.r}) must be 1 with an experts module of one's own")
            self._exchanges[strategy] = exchange
        return self._exchanges[strategy]

    def _choose(
        self,
        strategy: ParallelStrategy | str,
        tokens: Tensor,
        top_k: int,
        capacity_factor: float,
    ) -> tuple[ParallelStrategy, Trial | None]:
        """The strategy of this call, and the tuner's trial if the call is one. For "auto" the tuner
        of the group chooses. It tries strategies in training with gradients, and in evaluation
        without gradients."""
        if isinstance(strategy, ParallelStrategy):
            return strategy, None
        if self.group.size == 1:
            return ParallelStrategy(), None
        # Without a capacity limit (0) the key contains the mean load of an expert.
        capacity = self._agreed_capacity(tokens, top_k, capacity_factor or 1.0)
        assert capacity is not None
        tuner = Tuner.of(self.group)
        built_in = isinstance(self.experts, Experts)
        training = torch.is_grad_enabled()
        has_capacity = capacity_factor != 0
        key = tuner.key(
            self.config, top_k, tokens.element_size(), built_in, capacity, training, has_capacity
        )
        strategy, trial = tuner.choose(self, key, explore=self.training == training)
        self.chosen_strategy = strategy
        return strategy, trial

    def _router(self, number: int) -> nn.Module:
        if isinstance(self.router, nn.ModuleList):
            return self.router[number]
        return self.router

    def _route(
        self,
        tokens: Tensor,
        top_k: int,
        router: nn.Module,
        num_images: int,
        normalize_gates: bool,
    ) -> tuple[Routing, Tensor]:
        """The routing of tokens [T, M], and the tokens. Some kernels cast them for the experts."""
        config = self.config
        reduce = None
        if config.global_balance:
            reduce = self.group.sum
        options = (reduce, normalize_gates)
        if config.routing == "expert_choice":
            scores = router_logits(router, tokens)
            with without_autocast(tokens):
                return route_by_experts(scores, config, num_images, self.training), tokens
        logits = logits_of(router, tokens, config)
        with without_autocast(tokens):
            routing = route(logits, config, top_k, self.training, *options, balance=self.balance)
        if routing.inputs is not None:
            tokens = routing.inputs
        return routing, tokens

    def _plan(
        self,
        exchange: Exchange,
        routing: Routing,
        top_k: int,
        capacity_factor: float,
        batch_prioritized: bool,
    ) -> tuple[DispatchPlan, Agreement]:
        """The plan of the routing, and the agreement of the ranks."""
        config = self.config
        agreement = exchange.agree(routing.expert_ids, top_k, capacity_factor)
        priority = routing.priority
        if batch_prioritized and priority is None:
            priority = routing.probs.detach().amax(1)
        plan = make_plan(
            routing.expert_ids,
            config.num_experts,
            agreement.capacity,
            priority,
            config.kernels,
            num_rows=routing.expert_ids.numel(),
        )
        return plan, agreement

    def _agreed_capacity(self, tokens: Tensor, top_k: int, capacity_factor: float) -> int | None:
        """The capacity as a number on the host, for this rank's tokens [T, ...]; None: no limit."""
        if capacity_factor == 0:
            return None
        # shape, not len: torch.export would make the result of len a constant
        most_tokens = self.group.most_tokens(tokens.shape[0], tokens.device)
        return expert_capacity(most_tokens, self.config.num_experts, top_k, capacity_factor)

    def _keep_statistics(self, routing: Routing, plan: DispatchPlan, top_k: int) -> None:
        """Keep the inputs of `last_routing`.

        A backward pass that recomputes activations does not replace those of a later pass."""
        if in_backward():
            return
        if in_transform(routing.probs):  # its tensors end with the transform
            self._last = None
            return
        counts, kept = counts_and_kept(plan, self.config.routing)
        self._last = (routing.probs.detach(), counts, kept, top_k)

    # Arguments are checked in the same way on every rank, before the first collective.

    def _check(
        self, x: Tensor, top_k: int, capacity_factor, strategy: ParallelStrategy, router: int
    ) -> None:
        if x.shape[-1] != self.config.model_dim:
            raise ValueError(
                f"x has {x.shape[-1]} channels, the layer's model_dim is {self.config.model_dim}"
            )
        if top_k < 1:
            raise ValueError(f"top_k ({top_k}) must be at least 1")
        check_capacity_factor(capacity_factor, self.config, self.group.size)
        num_routers = 1
        if isinstance(self.router, nn.ModuleList):
            num_routers = len(self.router)
        if not 0 <= router < num_routers:
            raise ValueError(
                f"router ({router}) must be below the layer's number of routers ({num_routers})"
            )
        if strategy != "auto":
            self._exchange_of(strategy)
            check_exchange(strategy.exchange, capacity_factor, self.config)
        if self.group.size > 1:
            if in_transform(x):
                raise ValueError(
                    "a MoELayer over several ranks supports no torch.func transform and no"
                    " forward-mode derivative: use a layer with group=None"
                )
            check_devices(self, x)
            if self._untried_experts:
                try_experts(self.experts, x.new_zeros(self.shard.num_experts, x.shape[-1]))
                self._untried_experts = False


def _of_evaluation(
    strategy: ParallelStrategy | str, capacity_factor: float
) -> ParallelStrategy | str:
    """The strategy in evaluation. Without a capacity a static exchange counts its rows."""
    if not isinstance(strategy, ParallelStrategy) or strategy.exchange != "static":
        return strategy
    if not is_dropless(capacity_factor):
        return strategy
    return replace(strategy, exchange="counted", all_to_all="linear")


def _reset(module: nn.Module) -> None:
    """Call `reset_parameters` of a module, or of its children if it has none."""
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    for child in module.children():
        _reset(child)
