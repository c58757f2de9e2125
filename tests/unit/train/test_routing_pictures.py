"""Choices of a forward pass, recorded, painted, and in TensorBoard while a run trains."""

import io
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from run_cases import LAYERS, saver_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_cases import make_trainer as make_trainer_of

from moe_core import moe_layers
from swinv2_moe.config import model_config
from swinv2_moe.models import WithAuxLoss, build_model
from swinv2_moe.routing_pictures import (
    denormalise,
    expert_colours,
    expert_hatch,
    montage,
    paint,
    to_pixels,
)
from swinv2_moe.train.record import Recorder
from swinv2_moe.train.routing import evenly_spaced, record_choices, sample_choices
from swinv2_moe.train.run import train

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture
def make_model(make_config, tmp_path):
    """`make_model({"KEY": value})`: the small model (experts in two layers, of 4 x 4 and 2 x 2
    tokens) in eval mode."""

    def make(keys=None):
        torch.manual_seed(0)
        return build_model(model_config(make_config(tmp_path, keys)), num_classes=10).eval()

    return make


def hooks_of(model) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


@pytest.mark.parametrize("kind", ["swinv2_moe", "swin_moe"])
def test_choices_lie_where_the_tokens_lie(make_model, kind):
    """Patches of two kinds in a known pattern, no attention that could mix them: two experts in
    that pattern."""
    model = make_model({"MODEL.TYPE": kind, "DATA.IMG_SIZE": 32, "MODEL.MOE.NUM_EXPERTS": 16})
    for stage in model.layers:
        for block in stage.blocks:
            torch.nn.init.zeros_(block.attn.proj.weight)
    # the last stage's tokens
    mask = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    kinds = torch.randn(2, 3, generator=torch.Generator().manual_seed(2))
    # [3, 3, 32, 32]
    images = kinds[mask.long()].movedim(-1, 1).repeat_interleave(8, 2).repeat_interleave(8, 3)
    with torch.inference_mode(), record_choices(model) as choices:
        model(images)
    assert list(choices) == LAYERS
    for ids, side in zip(choices.values(), (8, 4), strict=True):
        assert ids.shape == (3, side, side, 1)
        where = mask.repeat_interleave(side // 4, 1).repeat_interleave(side // 4, 2)
        first, second = ids[..., 0][where].unique(), ids[..., 0][~where].unique()
        assert len(first) == len(second) == 1
        assert first != second


@pytest.mark.parametrize(
    "keys", [{}, {"MODEL.MOE.TOP_K": 2, "MODEL.MOE.ROUTER": "cosine", "AMP_ENABLE": True}]
)
def test_they_are_what_the_layer_counted(make_model, keys):
    model = make_model(keys)
    with torch.inference_mode(), record_choices(model) as choices:
        # the latest pass counts
        for images in (torch.randn(5, 3, 16, 16), torch.randn(2, 3, 16, 16)):
            with torch.autocast("cpu", torch.bfloat16, enabled="AMP_ENABLE" in keys):
                model(images)
            for name, layer in moe_layers(model).items():
                assert len(choices[name]) == len(images)
                counts = torch.bincount(choices[name].flatten(), minlength=4)
                assert counts.tolist() == layer.last_routing.counts.tolist()


def test_the_first_choice_is_first(make_model):
    model, images = make_model(), torch.randn(2, 3, 16, 16)
    with torch.inference_mode(), record_choices(model) as choices:
        model(images)
        one = choices[LAYERS[0]]
        for layer in moe_layers(model).values():
            layer.config = replace(layer.config, top_k=2)
        model(images)
    assert choices[LAYERS[0]].shape == (2, 4, 4, 2)
    assert choices[LAYERS[0]][..., :1].equal(one)


@pytest.mark.parametrize("keys", [{}, {"TRAIN.USE_CHECKPOINT": True}])
def test_nothing_changes_and_nothing_stays(make_model, keys):
    model, images = make_model(keys), torch.randn(4, 3, 16, 16)
    before = hooks_of(model)
    with torch.inference_mode():
        expected = model(images)
        with sample_choices(model, 4, 2):
            assert model(images).equal(expected)
        assert model(images).equal(expected)
    assert hooks_of(model) == before
    with pytest.raises(ZeroDivisionError), sample_choices(model, 4, 2):
        raise ZeroDivisionError
    assert hooks_of(model) == before


def test_training_mode_is_refused(make_model):
    model = make_model().train()
    with pytest.raises(AssertionError, match="noise of training"), record_choices(model):
        model(torch.randn(2, 3, 16, 16))


def test_a_dense_model_has_none(make_model):
    model = make_model({"MODEL.MOE.NUM_EXPERTS": 0})
    with torch.inference_mode(), record_choices(model) as choices:
        model(torch.randn(2, 3, 16, 16))
    assert choices == {}


def test_a_compiled_model_is_not_compiled_again(make_model):
    """Training compiles a wrapper of the model; validation, which is recorded, runs the model
    itself."""
    model, images = make_model(), torch.randn(2, 3, 16, 16)
    backend = Mock(side_effect=lambda graph, inputs: graph.forward)
    wrapped = WithAuxLoss(model)
    wrapped.compile(backend=backend)
    with torch.no_grad():
        wrapped(images)
        compiled = backend.call_count
        with record_choices(model) as choices:
            model(images)
        wrapped(images)
    assert list(choices) == LAYERS
    assert backend.call_count == compiled > 0


@given(size=st.integers(0, 200), count=st.integers(1, 50))
def test_spread(size, count):
    found = evenly_spaced(size, count)
    assert len(found) == min(size, count)
    assert found[:1] == [0] * (size > 0)
    gaps = np.diff([*found, size])
    assert size == 0 or (gaps.min() >= 1 and gaps.max() - gaps.min() <= 1)


def test_a_sample_of_several_batches(make_model):
    model, images = make_model(), torch.randn(8, 3, 16, 16)
    with torch.inference_mode(), record_choices(model) as choices:
        model(images)
    with torch.inference_mode(), sample_choices(model, 8, 4) as sample:
        for part in images.split((3, 3, 2)):
            model(part)
    assert torch.stack(sample.images).equal(images[::2])
    for name, ids in choices.items():
        assert torch.stack(sample.choices[name]).equal(ids[::2])


def test_pixels():
    colour = torch.tensor([51, 102, 255]) / 255
    sides = {8: 128, 60: 180, 64: 128, 128: 128, 192: 192, 255: 255, 384: 128}
    for size, side in sides.items():
        images = torch.ones(2, 3, size, size) * colour.view(3, 1, 1)
        normalised = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        for channels, expected in ((3, [51, 102, 255]), (1, [51, 51, 51])):
            pixels = to_pixels(normalised[:, :channels], MEAN, STD)
            assert (pixels.shape, pixels.dtype) == ((2, side, side, 3), np.uint8)
            assert (pixels == expected).all()
        assert denormalise(normalised * 1e3, MEAN, STD).max() == 1


def test_paint():
    """Each patch keeps the hue of its expert, on black and on white; experts are outlined."""
    photos = np.zeros((1, 64, 96, 3), np.uint8)
    photos[0, :, 48:] = 255
    experts = np.array([[[0, 7], [7, 0]]])  # two colours without hatching
    painted, colours = paint(photos, experts)[0], expert_colours(8).astype(int)
    assert painted.dtype == np.uint8
    corners = {(0, 0): (0, 0.45), (0, 48): (7, 1), (32, 0): (7, 0.45), (32, 48): (0, 1)}
    for (row, col), (expert, shade) in corners.items():
        patch = painted[row : row + 31, col : col + 47]  # without the outline
        assert (abs(patch - colours[expert] * shade) <= 1).all()
    assert (painted[31] == painted[31, 0]).all()
    assert (painted[:, 47] == painted[0, 47]).all()


def test_experts_of_one_colour_differ_by_their_hatching():
    photos = np.full((1, 32, 32, 3), 200, np.uint8)
    pictures = {paint(photos, np.full((1, 1, 1), expert)).tobytes() for expert in range(56)}
    assert len(pictures) == 56


def test_montage():
    black, grey = np.zeros((2, 3, 3, 3), np.uint8), np.full((2, 3, 3, 3), 9, np.uint8)
    picture = montage([black, grey])
    assert picture.shape == (10, 10, 3)
    assert (picture[:3, :3] == 0).all()
    assert (picture[7:, 7:] == 9).all()
    assert (picture[3:7] == 255).all()


def test_colours():
    colours = expert_colours(8)
    looks = {(colour.tobytes(), expert_hatch(i)) for i, colour in enumerate(expert_colours(56))}
    assert len(looks) == 56
    assert expert_colours(256).shape == (256, 3)
    distances = np.abs(colours[:, None].astype(int) - colours[None]).max(-1)
    assert distances[~np.eye(8, dtype=bool)].min() >= 60  # of 255, in some channel


def pictures_of(run: Path) -> list[tuple[int, np.ndarray]]:
    """(step, picture) of all that TensorBoard's image tab shows."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0}).Reload()
    if not events.Tags()["images"]:
        return []
    assert events.Tags()["images"] == ["routing"]
    images = events.Images("routing")
    return [
        (image.step, np.asarray(Image.open(io.BytesIO(image.encoded_image_string))))
        for image in images
    ]


def test_a_picture_for_each_epoch(make_config, tmp_path):
    """Also of averaged weights, recomputed activations and experts that are not trained."""
    train(make_config(tmp_path / "plain"))
    keys = {"TRAIN.EMA_DECAY": 0.5, "TRAIN.USE_CHECKPOINT": True, "MODEL.MOE.FREEZE": True}
    train(make_config(tmp_path / "frozen", keys | {"MODEL.PRETRAINED": tmp_path / "plain"}))
    for run in ("plain", "frozen"):
        (first, before), (second, after) = pictures_of(tmp_path / run)
        assert (first, second) == (5, 10)
        assert before.shape == after.shape
        photographs = before.shape[1] // 3  # of three columns
        assert (before[:, :photographs] == after[:, :photographs]).all()  # the same images
        assert (before != after).any()


def test_a_resumed_run_repeats_no_picture(make_config, tmp_path):
    train(make_config(tmp_path, {"TRAIN.MAX_STEPS": 7}))
    train(make_config(tmp_path, {"TRAIN.EPOCHS": 3}), "auto")
    assert [step for step, _ in pictures_of(tmp_path)] == [5, 7, 10, 15]


def test_no_picture_of_a_dense_run(make_config, tmp_path):
    train(make_config(tmp_path, {"MODEL.MOE.NUM_EXPERTS": 0, "TRAIN.MAX_STEPS": 1}))
    assert pictures_of(tmp_path) == []


def fit(rank: int, root: Path, options: str) -> None:
    trainer = make_trainer_of(rank, 2, options)
    recorder = Recorder(root, trainer.world, 0)
    trainer.fit(recorder, saver_of(trainer, root / "checkpoints"))
    recorder.close()


def test_pictures_of_two_ranks(run_processes, tmp_path):
    """Experts are on both, only the main rank records: a forward pass more, or a hook that
    communicates, would hang."""
    options = "TRAIN.MAX_STEPS 3 TRAIN.EMA_DECAY 0.5 TRAIN.SHARD_TRUNK True"
    run_processes(fit, 2, tmp_path, options)
    assert [step for step, _ in pictures_of(tmp_path)] == [3]
