"""timm's dense models as a mixture of experts."""

from pathlib import Path

import timm
import torch
from safetensors.torch import save_file

from moe_core import moe_layers
from swinv2_moe.config import load_config, model_config
from swinv2_moe.models import build_model, load_dense

CONFIG = (
    Path(__file__).parents[3] / "configs" / "upcycle" / "swinv2_moe_tiny_window8_256_8expert.yaml"
)


def test_timms_swinv2_t_keeps_its_logits(tmp_path):
    """Its configuration, but for smaller images: one expert a token, routers at random."""
    torch.manual_seed(0)
    dense = timm.create_model("swinv2_tiny_window8_256", img_size=64).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            if "norm" in name:  # they start at zero, where every block is the identity
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    options = ["MODEL.PRETRAINED", str(tmp_path / "dense.safetensors"), "DATA.IMG_SIZE", "64"]
    config = load_config(CONFIG, options, data="anywhere")
    sparse = build_model(model_config(config), 1000).eval()
    keys = config.MODEL
    kept = load_dense(sparse, keys.PRETRAINED, keys.UPCYCLE)
    assert [name.split(".moe.")[1] for name in kept] == ["router.weight"] * 4
    images = torch.randn(2, 3, 64, 64, generator=generator).double()
    with torch.inference_mode():
        expected, found = dense.double()(images), sparse.double()(images)
    assert float(expected.std()) > 0.01
    # the norm behind an expert takes the gate's value out, up to its epsilon
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.std()))
    used = [int((layer.last_routing.counts > 0).sum()) for layer in moe_layers(sparse).values()]
    assert max(used) > 1  # experts, not one of them
