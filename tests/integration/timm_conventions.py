"""timm's own tests of its models, run on the names that this project registers.

    python tests/integration/timm_conventions.py TIMM_CHECKOUT [pytest's options]      (about 5
    minutes on one core)

TIMM_CHECKOUT is timm's source at the installed release, with its tests: `pip download --no-deps
--no-binary :all: timm==VERSION`, unpacked. Every test of tests/test_models.py that timm runs on its
own `swinv2_tiny_window8_256` or `vit_tiny_patch16_224` runs on the names below in its place, once
with experts and once without. The exit status is 1 if one fails.
"""

import argparse
import sys
from pathlib import Path

import pytest
import timm
import torch

from swinv2_moe.models import swin_moe, swinv2_moe

TIMMS_NAME, TIMMS_VIT = "swinv2_tiny_window8_256", "vit_tiny_patch16_224"
VIT = "timm_moe"  # of TIMMS_VIT
NANO, TINY, RELEASED = (
    "swinv2_moe_nano_window4_16",
    "swinv2_moe_tiny_window8_256",
    "swin_moe_small_window12_192",
)
# RELEASED is built with these arguments, unless a test has others.
REDUCED = {"embed_dim": 32, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 4, 8), "window_size": 6}
ON_META_DEVICE = ("test_model_default_cfgs",)  # takes every name, whatever its size
NEED_WEIGHTS = ("test_model_load_pretrained", "test_model_features_pretrained")

SCRIPT = (NotImplementedError, "torch.jit.script refuses experts")
TRACE = (RuntimeError, "torch.jit.trace fixes the number of tokens, and so the capacity")
FAIL_WITH_EXPERTS = {
    "test_model_forward_torchscript": SCRIPT,
    "test_model_forward_fx_torchscript": SCRIPT,
    "test_swin_family_script_after_resize": SCRIPT,
    "test_swin_family_dynamic_mask_trace": TRACE,
}


def values_for(test: str, values: list) -> list:
    """`values` of a test's parameters with this project's names in the place of timm's.

    Args:
        values: names, or tuples that begin with one. A tuple's other values fit TINY; 256 is its
            image size.

    Returns:
        Empty for a test that timm runs on neither of its two, or that needs published weights.
    """
    if test in NEED_WEIGHTS:
        return []
    swins = [value for value in values if _name(value).partition(".")[0] == TIMMS_NAME]
    vits = [value for value in values if _name(value).partition(".")[0] == TIMMS_VIT]
    if test in ON_META_DEVICE and swins:
        return timm.list_models(["swinv2_moe_*", "swin_moe_*"])  # it takes no sequences of tokens
    return _swins(test, swins) + _vits(vits)


def _swins(test: str, values: list) -> list:
    if values and isinstance(values[0], str):
        four_stages_alone = test.startswith("test_swin_family")
        return [TINY, RELEASED] if four_stages_alone else [NANO, TINY, RELEASED]
    replaced = []
    for _, *others in values:
        replaced.append((TINY, *others))
        replaced.append((RELEASED, *(192 if other == 256 else other for other in others)))
    return replaced


def _vits(values: list) -> list:
    if values and isinstance(values[0], str):
        return [VIT]
    return [(VIT, *others) for _, *others in values]


def _name(value: str | tuple) -> str:
    return value if isinstance(value, str) else value[0]


class Conventions:
    """A pytest plugin that puts this project's names and models in the place of timm's."""

    def __init__(self, dense: bool) -> None:
        self.dense = dense

    def create_model(self, name: str, **kwargs):
        """timm.create_model, without experts if `dense`; otherwise with experts in blocks that
        `depths` has."""
        if self.dense:
            kwargs.setdefault("num_experts", 0)
        if name == RELEASED:
            kwargs = REDUCED | kwargs
        if name == VIT:
            kwargs["name"] = TIMMS_VIT
        if "depths" in kwargs:
            kwargs.setdefault("moe_blocks", tuple((depth - 1,) for depth in kwargs["depths"]))
        return timm.create_model(name, **kwargs)

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc) -> None:
        marks = metafunc.definition.own_markers
        for i, mark in enumerate(marks):
            if mark.name == "parametrize" and mark.args[0].split(",")[0] == "model_name":
                values = values_for(metafunc.definition.name, mark.args[1])
                marks[i] = pytest.mark.parametrize(mark.args[0], values).mark

    def pytest_collection_modifyitems(self, config, items: list) -> None:
        others = [item for item in items if not _is_ours(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if _is_ours(item)]
        for item in items:
            item.module.create_model = self.create_model
            if not self.dense and item.originalname in FAIL_WITH_EXPERTS:
                error, reason = FAIL_WITH_EXPERTS[item.originalname]
                item.add_marker(pytest.mark.xfail(raises=error, strict=True, reason=reason))

    def pytest_runtest_teardown(self) -> None:
        torch.compiler.reset()  # models of other sizes count as compilations of the same code


def _is_ours(item: pytest.Item) -> bool:
    """False for tests without a model's name and for those left with no name: pytest marks them as
    skipped."""
    has_name = "model_name" in getattr(getattr(item, "callspec", None), "params", {})
    return has_name and not any(mark.name == "skip" for mark in item.own_markers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, metavar="TIMM_CHECKOUT")
    args, options = parser.parse_known_args()
    tests = args.checkout / "tests" / "test_models.py"
    if not tests.is_file():
        parser.error(f"{args.checkout} has no tests/test_models.py")
    for module in (swin_moe, swinv2_moe):  # a test looks it up beside the class
        module.checkpoint_filter_fn = timm.models.swin_transformer_v2.checkpoint_filter_fn
    plain = [
        "-c",
        str(args.checkout / "pyproject.toml"),
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "-q",
        "-rfEx",
    ]
    statuses = []
    for dense in (False, True):
        print(f"timm {timm.__version__}, {'without' if dense else 'with'} experts", flush=True)
        statuses.append(pytest.main([*plain, str(tests), *options], plugins=[Conventions(dense)]))
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
