"""Marks for DistributedDataParallel hide nothing of a model from other tools."""

from moe_cases import make_layer

from moe_core import WithoutExperts, ignore_experts


def test_hides_nothing_from_torch():
    layer = make_layer(model_dim=8, hidden_dim=16)
    for mark in (WithoutExperts, ignore_experts):
        model = mark(layer)
        assert model is layer
        names = list(model.state_dict())
        assert names == [name for name, _ in layer.named_parameters()]
        assert "experts.w1" in names
        # the experts of one process are copies that DistributedDataParallel averages
        assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
