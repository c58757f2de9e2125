"""Images of any size: features do not depend on how much padding lies around an image."""

import pytest
import torch
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import nn

from moe_core import moe_layers
from swinv2_moe.models import SwinTransformerMoE, SwinTransformerV2MoE, take_aux_loss
from swinv2_moe.models.padding import mask_blocks, stage_maps

SMALL = {"img_size": 64, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
SMALL |= {"num_classes": 0, "always_partition": True, "dynamic_img_size": True}
SMALL |= {"drop_path_rate": 0.0}
MOE = {"num_experts": 4, "moe_blocks": ((1,), (1,))}
FORMS = [SwinTransformerV2MoE, SwinTransformerMoE]


def random_norms(model: nn.Module) -> nn.Module:
    """Norms that begin at zero would hide what attention and experts do."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model


def make(form=SwinTransformerV2MoE, **kwargs) -> SwinTransformerV2MoE:
    torch.manual_seed(0)
    return mask_blocks(random_norms(form(**SMALL | MOE | kwargs))).double()


def image(height: int, width: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 3, height, width, generator=generator, dtype=torch.float64)


def on_canvas(images: list[torch.Tensor], height: int, width: int) -> torch.Tensor:
    canvas = torch.full((len(images), 3, height, width), 7.0, dtype=torch.float64)
    for place, one in zip(canvas, images, strict=True):
        place[:, : one.shape[2], : one.shape[3]] = one[0]
    return canvas


def features(model, images, sizes=None, **kwargs) -> list[torch.Tensor]:
    return [x for x, _ in stage_maps(model, images, sizes, **kwargs)]


@pytest.mark.parametrize("size", [(64, 64), (32, 96)])
def test_equals_timm_where_windows_fit(size):
    torch.manual_seed(0)
    timms = random_norms(SwinTransformerV2(**SMALL)).eval().double()
    ours = make(num_experts=0).eval()
    ours.load_state_dict(timms.state_dict())
    expected = timms.forward_intermediates(image(*size), intermediates_only=True)
    for found, wanted in zip(features(ours, image(*size)), expected, strict=True):
        torch.testing.assert_close(found.permute(0, 3, 1, 2), wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [(72, 104), (33, 19), (4, 4), (64, 64)])
def test_padding_changes_nothing(form, size):
    """Alone on a canvas of its size, and beside a larger image on larger ones: equal features, loss
    and loads."""
    # no noise: its values would lie on other tokens beside another image
    model = make(form).train()
    for layer in moe_layers(model).values():
        object.__setattr__(layer.config, "gate_noise", 0.0)
    alone = features(model, image(*size))
    loss = take_aux_loss(model)
    loads = [layer.last_routing.counts for layer in moe_layers(model).values()]
    for extra in [(1, 0), (0, 5), (32, 48)]:
        canvas = on_canvas([image(*size)], size[0] + extra[0], size[1] + extra[1])
        padded = features(model, canvas, [size])
        for found, wanted in zip(padded, alone, strict=True):
            height, width = wanted.shape[1:3]
            torch.testing.assert_close(found[:, :height, :width], wanted)
            assert not found[:, height:].any()
            assert not found[:, :, width:].any()
        torch.testing.assert_close(take_aux_loss(model), loss)
        counts = [layer.last_routing.counts for layer in moe_layers(model).values()]
        torch.testing.assert_close(counts, loads)


@pytest.mark.parametrize("form", FORMS)
def test_images_of_a_batch_do_not_see_each_other(form):
    """Dropless, each has in a batch of mixed sizes the features that it has alone."""
    model = make(form, eval_capacity_factor=0.0).eval()
    sizes = [(72, 40), (30, 90), (64, 64)]
    images = [image(*size, seed=i) for i, size in enumerate(sizes)]
    together = features(model, on_canvas(images, 80, 96), sizes)
    for i, one in enumerate(images):
        for found, wanted in zip(together, features(model, one), strict=True):
            height, width = wanted.shape[1:3]
            torch.testing.assert_close(found[i : i + 1, :height, :width], wanted)


def test_unmasked_padding_would_change_it():
    """The control: without sizes what is around the image is seen."""
    model = make(eval_capacity_factor=0.0).eval()
    wanted = features(model, image(36, 36))[0]
    found = features(model, on_canvas([image(36, 36)], 64, 64))[0][:, :9, :9]
    assert (found - wanted).abs().max() > 0.1


def test_gradients_and_loss_survive_recomputation():
    model = make().train()
    images, outcomes = on_canvas([image(36, 44)], 48, 64), []
    for recompute in (False, True):
        torch.manual_seed(3)
        maps = features(model, images, [(36, 44)], recompute=recompute)
        loss = sum(x.square().mean() for x in maps) + take_aux_loss(model)
        unused = {"allow_unused": True, "materialize_grads": True}
        gradients = torch.autograd.grad(loss, list(model.parameters()), **unused)
        outcomes.append([loss, *gradients])
    torch.testing.assert_close(*outcomes)
    names = [name for name, _ in model.named_parameters()]
    routers = [g for name, g in zip(names, gradients, strict=True) if "router" in name]
    assert len(routers) == 2
    assert all(gradient.any() for gradient in routers)


def test_capacity_counts_the_image_alone():
    model = make(eval_capacity_factor=1.0).eval()
    features(model, on_canvas([image(64, 64)], 256, 256), [(64, 64)])
    layers = moe_layers(model).values()
    assert [int(layer.last_routing.counts.sum()) for layer in layers] == [16 * 16, 8 * 8]
    few = [layer.last_routing.dropped_share for layer in layers]
    features(model, image(64, 64))
    assert few == [layer.last_routing.dropped_share for layer in layers]


def test_stage_names_stay():
    plain = SwinTransformerV2MoE(**SMALL | MOE)
    assert list(make().state_dict()) == list(plain.state_dict())
