"""Weights at another resolution and window: what the position network says must not change, held to
timm's own."""

import pytest
import torch
from timm.models.swin_transformer_v2 import SwinTransformerV2

from swinv2_moe.errors import UserError
from swinv2_moe.models import SwinTransformerV2MoE, load_dense
from swinv2_moe.models.positions import windows_of_tables

BEFORE = [4, 4, 2]  # the windows of `nano`: its last map has only 2 x 2 tokens


@pytest.mark.parametrize(("size", "window"), [(32, 8), (64, 16), (32, 4), (16, 2), (24, 6)])
def test_another_window_equals_timms_resampling(size, window, nano, randomize):
    """timm rebuilds its tables in place; here a model is made for the new size and takes over the
    weights."""
    theirs = randomize(SwinTransformerV2(**nano | {"pretrained_window_sizes": BEFORE}), seed=2)
    changed = {"img_size": size, "window_size": window, "pretrained_window_sizes": BEFORE}
    ours = SwinTransformerV2MoE(**nano | changed)
    assert load_dense(ours, theirs.state_dict()) == []
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(3))
    theirs.set_input_size(img_size=(size, size), window_size=(window, window))
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=1e-4, atol=1e-4)


def test_the_bias_of_positions_that_both_windows_have_stays(nano, randomize):
    small = randomize(SwinTransformerV2MoE(**nano), seed=2)
    large = SwinTransformerV2MoE(
        **nano
        | {"img_size": 32, "window_size": 8, "pretrained_window_sizes": small.position_windows()}
    )
    load_dense(large, small.state_dict())
    for stage, window in enumerate(BEFORE):
        before, after = (model.layers[stage].blocks[0].attn for model in (small, large))
        wide = after.window_size[0]
        assert wide == 2 * window
        within = (torch.arange(wide * wide).view(wide, wide)[:window, :window]).flatten()
        torch.testing.assert_close(
            after.position_bias()[:, within][:, :, within], before.position_bias()
        )


def test_windows_are_read_from_the_tables_of_a_file(nano, make_model):
    for change in (
        {},
        {"img_size": 32, "window_size": 8, "pretrained_window_sizes": BEFORE},
        {"window_size": 1},
    ):
        theirs = SwinTransformerV2(**nano | change)
        tables = {
            f"{name}.relative_coords_table": module.relative_coords_table
            for name, module in _attentions(theirs)
        }
        expected = SwinTransformerV2MoE(**nano | change).position_windows()
        assert windows_of_tables(tables, 3) == expected
        ours = make_model(img_size=32, window_size=8, pretrained_window_sizes=expected)
        assert load_dense(ours, theirs.state_dict() | tables) == []
    assert windows_of_tables(theirs.state_dict(), 3) is None
    with pytest.raises(
        UserError, match=r"are for windows of \[1, 1, 1\].* for \[8, 8, 4\]; set .*_SIZES \[1,1,1\]"
    ):
        load_dense(make_model(img_size=32, window_size=8), theirs.state_dict() | tables)


def _attentions(model):
    return (
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "relative_coords_table")
    )
