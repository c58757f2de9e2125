"""`tutel.moe.moe_layer` on MoELayer."""

# T tokens, E experts, W ranks, s = W / E ranks that share an expert (E < W), M model dim

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_core.capacity import expert_capacity
from moe_core.compat.tutel.dispatch import round_up
from moe_core.compat.tutel.experts import FusedExpertsNetwork
from moe_core.compat.tutel.gates import GateRouter
from moe_core.compat.tutel.groups import expert_group_of
from moe_core.compat.tutel.options import (
    Call,
    GateType,
    adaptive_degree,
    check_unknown,
    count_local_experts,
    gate_descriptions,
    global_expert_count,
    is_set,
    make_experts,
    make_gate,
)
from moe_core.compat.tutel.padded import padded_forward
from moe_core.config import MoEConfig
from moe_core.context import expert_dtype
from moe_core.layer import MoELayer
from moe_core.parallel import ParallelStrategy, valid_r

_log = logging.getLogger("moe_core")
_COUNT = "_num_global_experts"


class MOELayer(nn.Module):
    """A mixture-of-experts layer with Tutel's arguments, attributes and parameter names.

    MoELayer computes the layer if the experts are of type "ffn", the kernels support their
    activation (optionally with dropout), and the output dim equals the input dim. Other layers are
    computed with padded buffers, as in Tutel (see `padded`).

    Args:
        gate_type: {"type": "top" or "cosine_top", "k", "capacity_factor", "gate_noise",
            "fp32_gate"}; {"type": "custom", "module": a class, ...}; or a list of these, from which
            each call uses one.
        model_dim: M.
        experts: {"type": "ffn", "num_experts_per_device" (or "count_per_node"),
            "hidden_size_per_expert", "activation_fn", "output_dim", "has_fc1_bias",
            "has_fc2_bias"}; {"type": "llama_ffn", ...}; {"type": "custom", "module": a class, ...}.
            With -n experts per device, n ranks share an expert.
        scan_expert_func: called with the name and the tensor of each parameter of the experts.
        result_func: called with the output. Its result is the result of the layer.
        group: the ranks over which the experts are distributed; None: the world.
        seeds: three arguments of `torch.manual_seed`: for the gates, the experts, and afterwards.
        a2a_ffn_overlap_degree: the number of chunks of an exchange. As in Tutel, the capacity is
            rounded up to a multiple of s times this number.
        is_postscore: whether gate values multiply the experts' results; False: their inputs.
        batch_prioritized_routing: whether a full expert keeps the most probable tokens.
        normalize_gate: whether the gate values of a token sum to 1; only for top-k above 1.
        is_gshard_loss: whether the auxiliary loss is GShard's; False: Tutel's load-importance loss.
        parallel_type: "adaptive:R", "data", "model" or "auto" (r = 1).
        use_2dh: whether rows are exchanged inside nodes first, then between nodes. The number of
            ranks on a node is LOCAL_SIZE, or the value that torchrun sets.

    Attributes:
        l_aux: the auxiliary loss of the last call. It is also an attribute of the output.
        experts, gates: the modules with the parameters.

    Raises:
        ValueError: an option is unknown or out of range. The message has its name and value.
        NotImplementedError: an environment variable of Tutel is set that is not supported.

    Source: Tutel (github.com/microsoft/Tutel), impls/moe_layer.py; arXiv 2206.03382.
    """

    global_expert_count = staticmethod(global_expert_count)

    def __init__(
        self,
        gate_type: GateType,
        model_dim: int,
        experts: Mapping[str, Any],
        scan_expert_func: Callable[[str, nn.Parameter], object] | None = None,
        result_func: Callable[[Tensor], Any] | None = None,
        group: dist.ProcessGroup | None = None,
        seeds: Sequence[int | None] | None = None,
        a2a_ffn_overlap_degree: int = 1,
        is_postscore: bool = True,
        batch_prioritized_routing: bool = False,
        normalize_gate: bool = True,
        is_gshard_loss: bool = True,
        parallel_type: str = "adaptive:1",
        use_2dh: bool = False,
        **kwargs,
    ) -> None:
        super().__init__()
        check_unknown(kwargs)
        self.expert_group = expert_group_of(group)
        self.world_size = self.expert_group.size
        self.model_dim = model_dim
        self.result_func = result_func
        self.a2a_ffn_overlap_degree = a2a_ffn_overlap_degree
        self.is_postscore = is_postscore
        self.batch_prioritized_routing = batch_prioritized_routing or is_set("BATCH_PRIO")
        self.normalize_gate = normalize_gate
        self.is_gshard_loss = is_gshard_loss
        self.use_2dh = use_2dh
        self.skip_moe = is_set("SKIP_MOE")
        self._count_experts(experts)
        self.adaptive_degree = adaptive_degree(parallel_type, self.valid_rs)
        self.l_aux: Tensor | None = None
        self._last_gate = 0
        self._counts: Tensor | None = None  # of the last call, if it used padded buffers
        seeds = [*(seeds or ()), None, None, None]
        _seed(seeds[1])
        self.experts = make_experts(experts, model_dim, self.num_local_experts, self.sharded_count)
        for name, parameter in self.experts.named_parameters():
            if scan_expert_func is not None:
                scan_expert_func(name, parameter)
            parameter._tutel_expert = True  # type: ignore[attr-defined]
        self.gates = nn.ModuleList()
        for i, description in enumerate(gate_descriptions(gate_type)):
            _seed(seeds[0], i)
            self.gates.append(make_gate(description, model_dim, self.num_global_experts))
        _seed(seeds[2])
        for gate in self._all_gates():
            self._check_noise(gate)
        self._engines = self._make_engines()

    def _count_experts(self, experts: Mapping[str, Any]) -> None:
        count = count_local_experts(experts)
        if count == -1:
            count = 1
        total = global_expert_count(count, self.group)
        self.register_buffer(_COUNT, torch.tensor(total))
        self.num_global_experts = total
        self.sharded_count = max(self.world_size // total, 1)
        self.num_local_experts = max(total // self.world_size, 1)
        self.valid_rs = valid_r(total, self.world_size)

    def _check_noise(self, gate: Any) -> None:
        if not self.is_gshard_loss and not gate.gate_noise > 0:
            raise ValueError(f"is_gshard_loss (False) needs gate_noise ({gate.gate_noise}) above 0")

    def _make_engines(self) -> tuple[MoELayer, ...]:
        """One MoELayer for each gate, all with the same experts; empty if MoELayer cannot be used.

        They are not submodules, so parameters have only Tutel's names.
        """
        experts = self.experts
        if not isinstance(experts, FusedExpertsNetwork):
            return ()
        aux_loss = "load_importance_tutel"
        if self.is_gshard_loss:
            aux_loss = "gshard"
        has_bias = experts.b1 is not None or experts.b2 is not None
        engines: list[MoELayer] = []
        for gate in self._all_gates():
            config = MoEConfig(
                self.model_dim,
                experts.hidden_size_per_expert,
                self.num_global_experts,
                gate_noise=gate.gate_noise,
                normalize_gates=self.normalize_gate,
                aux_loss=aux_loss,
                activation="relu",
                bias=has_bias,
                output_bias=experts.b2 is not None,
            )
            if not engines:
                output = replace(config, model_dim=experts.output_dim)
                experts.attach(config, output.shard(self.expert_group.rank, self.world_size))
            if experts.output_dim == self.model_dim and self.is_postscore:
                router = GateRouter(gate)
                engines.append(MoELayer(config, self.expert_group, router=router, experts=experts))
        return tuple(engines)

    def _all_gates(self) -> list[Any]:
        """The gates. The type is `Any`, because gates have attributes that nn.Module does not."""
        return list(self.gates)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.expert_group.process_group

    @property
    def dispatch_count(self) -> Tensor | None:
        """The choices of each expert [E] in the last call, before any drop; None before a call."""
        if self._counts is not None or not self._engines:
            return self._counts
        routing = self._engines[self._last_gate].last_routing
        return None if routing is None else routing.counts

    def get_parameter_iterator(self, param_type: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters of "gate" or "local_experts".

        Raises:
            ValueError: `param_type` has another value.
        """
        if param_type == "gate":
            return self.gates.named_parameters()
        if param_type == "local_experts":
            return self.experts.named_parameters()
        raise ValueError(f"param_type ({param_type!r}) must be 'gate' or 'local_experts'")

    def forward(
        self,
        input: Tensor,
        gate_index: int = 0,
        capacity_factor: float | None = None,
        top_k: int | None = None,
        a2a_ffn_overlap_degree: int | None = None,
        reserve_dims: int = 1,
        inequivalent_tokens: bool = False,
        adaptive_r: int | None = None,
        megablocks_size: int = 0,
    ) -> Any:
        """input [..., M] -> [..., output_dim], with the attribute `l_aux`; or `result_func` of it.

        Args:
            gate_index: the index in the list of gates.
            capacity_factor, top_k: None: the values of the gate.
            a2a_ffn_overlap_degree, adaptive_r: set for this call and later calls.
            reserve_dims: the number of last dims that form M. Custom experts get these dims.
            inequivalent_tokens: whether ranks may have different numbers of tokens.
            megablocks_size: in inference on one rank with several experts, the capacity is rounded
                up to a multiple of this number. The engine never computes padding.

        Raises:
            ValueError: the input has fewer than 2 dims, or as MoELayer.
        """
        if self.skip_moe:
            self.l_aux = None
            return self._result(input.view_as(input))
        if input.dim() < 2:
            raise ValueError(f"input has shape {list(input.shape)}, it must have 2 dims or more")
        self._set_strategy(a2a_ffn_overlap_degree, adaptive_r)
        gate = self._all_gates()[gate_index]
        self._check_noise(gate)
        if capacity_factor is None:
            capacity_factor = gate.capacity_factor
        tokens = self._cast(input.reshape(-1, input.shape[-reserve_dims:].numel()))  # [T, M]
        call = Call(
            top_k or gate.top_k,
            capacity_factor,
            self._alignment(megablocks_size),
            inequivalent_tokens,
        )
        known = None
        if isinstance(self.experts, FusedExpertsNetwork):
            if self._engines and reserve_dims == 1:
                known = self.experts.known_activation()
            self.experts.use(known)
        if known is not None:
            y, self.l_aux = self._engine_forward(gate_index, tokens, call)
        else:
            token_shape = input.shape[-reserve_dims:]
            y, self.l_aux, self._counts = padded_forward(self, gate, tokens, token_shape, call)
        y = y.reshape(*input.shape[:-reserve_dims], *y.shape[1:]).to(input.dtype)
        return self._result(y)

    def _engine_forward(self, gate_index: int, tokens: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """tokens [T, M] -> [T, M] and the auxiliary loss, computed by MoELayer."""
        self._last_gate, self._counts = gate_index, None
        return self._engine(gate_index)(
            tokens,
            top_k=call.top_k,
            capacity_factor=self._aligned_factor(tokens, call),
            strategy=self._strategy(),
            batch_prioritized=self.batch_prioritized_routing,
        )

    def _set_strategy(self, overlap_degree: int | None, r: int | None) -> None:
        """Set the options that a call may change; None: unchanged."""
        if overlap_degree is not None:
            self.a2a_ffn_overlap_degree = overlap_degree
        if r is not None:
            self.adaptive_degree = r
        if self.a2a_ffn_overlap_degree < 1:
            raise ValueError(
                f"a2a_ffn_overlap_degree ({self.a2a_ffn_overlap_degree}) must be at least 1"
            )
        if self.adaptive_degree not in self.valid_rs:
            listed = ", ".join(map(str, self.valid_rs))
            raise ValueError(f"adaptive_r ({self.adaptive_degree}) must be one of {listed}")

    def _result(self, y: Tensor) -> Any:
        y.l_aux = self.l_aux  # type: ignore[attr-defined]
        if self.result_func is not None:
            return self.result_func(y)
        return y

    def _cast(self, tokens: Tensor) -> Tensor:
        """Cast the tokens to the dtype of autocast or, without autocast, of the experts."""
        if torch.is_autocast_enabled(tokens.device.type):
            return tokens.to(expert_dtype(tokens))
        for parameter in self.experts.parameters():
            return tokens.to(parameter.dtype)
        return tokens

    def _alignment(self, megablocks_size: int) -> int:
        """The number of which the capacity must be a multiple."""
        alignment = self.sharded_count * self.a2a_ffn_overlap_degree
        is_local = self.world_size == 1 and self.num_local_experts > 1
        if megablocks_size > 0 and is_local and not torch.is_grad_enabled():
            alignment = round_up(alignment, megablocks_size)
        if alignment > 256:
            alignment = round_up(alignment, 128)
        return alignment

    def _aligned_factor(self, tokens: Tensor, call: Call) -> float:
        """The factor for which the engine's capacity is the aligned capacity of the call.

        The engine's capacity is a multiple of top_k. If the aligned capacity is not, the engine's
        is smaller by up to top_k - 1 rows for each expert.
        """
        factor = call.capacity_factor
        if call.alignment == 1 or factor == 0:
            return factor
        num_tokens = len(tokens)
        if call.inequivalent_tokens:
            num_tokens = self.expert_group.most_tokens(num_tokens, tokens.device)
        num_experts = self.num_global_experts
        top_k = min(call.top_k, num_experts)
        capacity = expert_capacity(num_tokens, num_experts, top_k, factor)
        assert isinstance(capacity, int), "the factor is not 0"
        per_choice = round_up(capacity, call.alignment) // top_k
        # With the additional half, rounding of the quotient does not lose a row.
        return (per_choice + 0.5) / max(-(-num_tokens // num_experts), 1)

    def _strategy(self) -> ParallelStrategy:
        all_to_all, ranks_per_node = "linear", None
        if self.use_2dh and self.world_size > 1:
            all_to_all = "2dh"
            if "LOCAL_SIZE" in os.environ:
                ranks_per_node = int(os.environ["LOCAL_SIZE"])
        return ParallelStrategy(
            self.adaptive_degree, self.a2a_ffn_overlap_degree, all_to_all, ranks_per_node
        )

    def _engine(self, gate_index: int) -> MoELayer:
        """The MoELayer of a gate, with the current mode of this layer and noise of the gate."""
        engine = self._engines[gate_index]
        engine.training = self.training
        noise = self._all_gates()[gate_index].gate_noise
        if engine.config.gate_noise != noise:
            engine.config = replace(engine.config, gate_noise=noise)
        return engine

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        """Load older checkpoints of Tutel too.

        Parameters of experts may have another shape with the same number of elements. Missing
        parameters of experts become zeros, with a warning.
        """
        name = prefix + _COUNT
        if name not in state_dict:
            _log.warning("%s is missing: the checkpoint is of an older Tutel", name)
            state_dict[name] = getattr(self, _COUNT)
        elif int(state_dict[name]) != self.num_global_experts:
            raise ValueError(
                f"{name} is {int(state_dict[name])}, the layer has {self.num_global_experts}"
                " experts"
            )
        for name, parameter in self.experts.named_parameters(prefix + "experts"):
            if name not in state_dict:
                _log.warning("%s is missing and becomes 0", name)
                state_dict[name] = torch.zeros_like(parameter)
            if state_dict[name].numel() == parameter.numel():
                state_dict[name] = state_dict[name].view(parameter.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies, without the loss of the last call, which belongs to its graph."""
        return self.__dict__ | {"l_aux": None}

    def extra_repr(self) -> str:
        gates = [f"k={gate.top_k}, noise={gate.gate_noise}" for gate in self.gates]
        return (
            f"Top-K(s) = {gates}, Total-Experts = {self.num_global_experts}"
            f" [managed by {self.world_size} device(s)],"
        )


moe_layer = MOELayer


def _seed(seed: int | None, offset: int = 0) -> None:
    if seed is not None:
        torch.manual_seed(seed + offset)
