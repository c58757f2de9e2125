"""A language model in plain numbers: its counts against a real one and against published ones, and
what its predictions must do."""

import argparse
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_core.parallel import PROFILES, ParallelStrategy
from swinv2_moe import planner
from swinv2_moe.config import load_config, train_config
from swinv2_moe.errors import UserError
from swinv2_moe.language_plan import LanguageModel, describe, parse

ROOT = Path(__file__).parents[2]
A100 = PROFILES["a100-hdr"]
META = LanguageModel(layers=32, dim=4096, hidden=16384, experts=512)
LINEAR = ParallelStrategy(1, 1, "linear", 8, "static")


def training(*opts: str):
    return train_config(load_config(None, ["AMP_ENABLE", "true", *opts]))


SHARDED = training("TRAIN.SHARD_TRUNK", "true")


def predict(model: LanguageModel, gpus: int, batch_size: int, **options) -> planner.Prediction:
    described = describe(model, 0, use_checkpoint=False)
    return planner.predict(described, SHARDED, A100, gpus, 8, batch_size, **options)


@pytest.mark.parametrize("experts", [0, 8])
def test_counts_are_those_of_the_example(experts):
    example = runpy.run_path(str(ROOT / "examples/language_model.py"))
    args = argparse.Namespace(context=64, dim=32, layers=4, heads=2, experts=experts, top_k=1)
    with torch.device("meta"):
        real = example["LanguageModel"](args, None)
    numbers = LanguageModel(4, 32, 128, experts, top_k=1, context=64, vocabulary=256)
    counted = sum(parameter.numel() for parameter in real.parameters())
    assert numbers.trunk_parameters + numbers.expert_parameters == counted
    one, two = (torch.zeros(size, 64, dtype=torch.long, device="meta") for size in (1, 2))
    kept = planner._saved_elements(real, two) - planner._saved_elements(real, one)
    # torch's attention on a CPU copies its output once more
    assert describe(numbers, 0, False).kept == pytest.approx(kept, rel=0.15)


def test_metas_model_has_1_1_trillion_parameters():
    # 16 layers of 512 experts, two matrices of 4,096 x 16,384 each
    weights = 16 * 512 * 2 * 4096 * 16384
    assert META.expert_parameters == pytest.approx(weights, rel=1e-3)
    assert META.trunk_parameters + META.expert_parameters == pytest.approx(1.1e12, rel=0.01)


def test_products_of_a_token_are_its_active_parameters():
    """Without the embeddings, which are no products; attention's own products come on top."""
    model = describe(replace(META, experts=0), 0, False)
    embeddings = (META.vocabulary + META.context) * META.dim
    per_token = model.trunk_macs / META.context
    attention = META.layers * META.context * META.dim
    assert per_token - attention == pytest.approx(model.trunk_parameters - embeddings, rel=1e-3)


def test_more_work_takes_longer():
    base = predict(META, 512, 4)
    for larger in ("layers", "dim", "hidden", "top_k", "vocabulary"):
        more = replace(META, **{larger: 2 * getattr(META, larger)})
        assert predict(more, 512, 4).step > base.step, larger
    assert predict(META, 512, 8).step > base.step
    dense = predict(replace(META, experts=0), 512, 4)
    assert dense.strategy is None
    assert dense.moe_layers == 0
    assert predict(META, 512, 4, einsum=True).step > base.step
    assert predict(META, 512, 4, strategy=LINEAR).step > base.step


def test_einsums_lose_more_with_more_tokens():
    gains = []
    for sequences in (4, 8, 16):
        einsum = predict(META, 512, sequences, einsum=True)
        gains.append(einsum.moe_layers / predict(META, 512, sequences, strategy=LINEAR).moe_layers)
    assert 1 < gains[0] < gains[1] < gains[2]


def test_a_sharded_trunk_and_recomputation_save_memory():
    described = describe(META, 0, use_checkpoint=False)
    replicated = planner.predict(described, training(), A100, 512, 8, 4)
    sharded = predict(META, 512, 4)
    saved = 16 * META.trunk_parameters * 511 / 512
    assert replicated.memory - sharded.memory > saved
    assert sharded.memory < A100.memory < replicated.memory
    assert describe(META, 0, use_checkpoint=True).kept < described.kept / 4
    assert predict(META, 64, 4).memory > 4 * sharded.memory  # fewer GPUs share the experts


def test_words():
    assert parse(["layers=32", "dim=4096", "hidden=16384", "experts=512"]) == META
    assert parse(["layers=2", "dim=8", "hidden=8", "every=1", "experts=4"]).moe_layers == 2


BAD_WORDS = {
    "depth=3": "depth=3: must be NAME=NUMBER, where NAME is one of layers, dim",
    "layers": "layers: '' is not a whole number",
    "layers=many": "layers=many: 'many' is not a whole number",
    "layers=0": "layers is 0, it must be at least 1",
    "experts=-1": "experts is -1, it must be at least 0",
    "top_k=3": r"top_k is 3, it must be at most experts \(2\)",
}


@pytest.mark.parametrize("word", BAD_WORDS)
def test_bad_words_are_one_line(word):
    words = ["layers=2", "dim=8", "hidden=8", "experts=2", word]
    with pytest.raises(UserError, match=BAD_WORDS[word]) as error:
        parse(words)
    assert "\n" not in str(error.value)


def test_missing_numbers_are_one_line():
    with pytest.raises(UserError, match="needs dim=NUMBER, hidden=NUMBER"):
        parse(["layers=2"])


def test_the_document_states_what_the_planner_predicts():
    """The rows of docs/explanation/planner.md: speed-up of the step over the einsum form."""
    lines = (ROOT / "docs/explanation/planner.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| model, ")]
    assert len(rows) == 6
    for name, published, linear, best in rows:
        _, gpus, sequences = name.split(", ")
        gpus, sequences = int(gpus.split()[0]), int(sequences.split()[0])
        model = replace(META, experts=gpus)
        einsum = predict(model, gpus, sequences, einsum=True).step
        found = einsum / predict(model, gpus, sequences, strategy=LINEAR).step
        assert found == pytest.approx(float(linear), abs=0.00501), name
        found = einsum / predict(model, gpus, sequences).step
        assert found == pytest.approx(float(best), abs=0.00501), name
        assert float(published) == {8: 2.31, 512: 1.40}[gpus]
