"""What timm's own tests ask of every registered model; `tests/integration/timm_conventions.py` runs
these tests."""

import io
import os
import subprocess
import sys

import pytest
import timm
import torch
from gloo_processes import ROOT
from timm.models import create_feature_extractor

import swinv2_moe.models.api  # noqa: F401 - registers the names
from moe_core import MoEConfig, MoELayer

# timm's source, of the installed version, for the slow test.
TIMM_SOURCE = os.environ.get("TIMM_SOURCE", "")
FORMS = ("swinv2_moe_nano_window4_16", "swin_moe_small_window12_192")
SMALL = {"img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2)}
SMALL |= {"window_size": 4, "moe_blocks": ((), (1,)), "num_classes": 5, "num_experts": 4}
SMALL |= {"pretrained_window_sizes": (0, 0)}


@pytest.fixture(params=FORMS)
def make(request, randomize):
    """`make(**kwargs)`: a small model of one of the two forms, in fp64, with weights that are
    nowhere zero."""

    def make(**kwargs):
        return randomize(timm.create_model(request.param, **SMALL | kwargs)).double()

    return make


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 32, 32, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("num_experts", [0, 4])
def test_fx_graph_gives_the_same_logits_and_every_gradient(num_experts, make, images):
    model = make(num_experts=num_experts).eval()
    with torch.inference_mode():
        expected = model(images)
        (found,) = create_feature_extractor(model, ["head.fc"])(images).values()
    torch.testing.assert_close(found, expected)
    graph = create_feature_extractor(model.train(), ["head.fc"])
    (logits,) = graph(images).values()
    logits.mean().backward()
    assert [name for name, p in graph.named_parameters() if p.grad is None] == []


def test_torchscript_of_a_dense_model(make, images):
    """Also for another size than the first: the model's windows follow, those of what was compiled
    stay."""
    model = make(num_experts=0).eval()
    for side in (32, 48):
        model.set_input_size((side, side))
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(model), file)
        file.seek(0)
        batch = images if side == 32 else torch.randn(2, 3, side, side).double()
        with torch.no_grad():
            torch.testing.assert_close(torch.jit.load(file)(batch), model(batch))


def test_torchscript_trace_of_a_dense_model_takes_other_sizes(make, images):
    model = make(num_experts=0, strict_img_size=False).eval()
    traced = torch.jit.trace(model, images, check_trace=False)
    wider = torch.randn(3, 3, 32, 64).double()
    with torch.no_grad():
        torch.testing.assert_close(traced(wider), model(wider))


def test_torchscript_of_experts_is_refused_in_one_line(make):
    for module in (make(), MoELayer(MoEConfig(8, 16, 4))):
        words = r"torch\.jit\.script cannot compile a MoELayer: use"
        with pytest.raises(NotImplementedError, match=words) as raised:
            torch.jit.script(module)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", FORMS)
def test_dtype_and_device_of_creation_are_those_of_every_parameter(name):
    for dtype, device in ((torch.float64, "meta"), (torch.bfloat16, "cpu")):
        model = timm.create_model(name, device=device, dtype=dtype, **SMALL)
        found = {(tensor.dtype, tensor.device.type) for tensor in model.parameters()}
        assert found == {(dtype, device)}


@pytest.mark.parametrize("how", ["init_weights", "load_state_dict", "assign"])
@pytest.mark.parametrize("name", [*FORMS, "timm_moe"])
def test_logits_after_deferred_initialisation(name, how, images, randomize):
    """They are those of a model that was never on the meta device. Parameters and buffers, those
    that no state dict has (masks and positions) among them, get their values."""
    options = SMALL
    if name == "timm_moe":
        options = {
            "name": "vit_tiny_patch16_224",
            "img_size": 32,
            "patch_size": 8,
            "embed_dim": 16,
            "depth": 4,
            "num_heads": 2,
        }
    plain = randomize(timm.create_model(name, dtype=torch.float64, **options)).eval()
    model = timm.create_model(name, device="meta", dtype=torch.float32, **options).eval()
    if how == "assign":  # the dtype is that of the state dict
        model.load_state_dict(plain.state_dict(), assign=True)
    else:
        model.double().to_empty(device="cpu")
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        if how == "init_weights":
            model.init_weights()
            plain.load_state_dict(model.state_dict())
        else:
            model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
    torch.testing.assert_close(model(images), plain(images))


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not TIMM_SOURCE, reason="TIMM_SOURCE, timm's source with its tests, is not set")
def test_timms_own_tests(tmp_path):
    program = ROOT / "tests" / "integration" / "timm_conventions.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(program), TIMM_SOURCE]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
