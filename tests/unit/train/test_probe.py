"""The classifier on a frozen network: what it is fitted to, what it says of itself, and that a run
keeps it unless training is better."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from run_cases import interrupt_at, weights_of
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from trainer_cases import QUICKSTART, SMALL

from swinv2_moe.checkpoints.checkpoint import open_checkpoint, read_section, read_weights_of
from swinv2_moe.config import all_sections, load_config
from swinv2_moe.data.build import evaluation_loader
from swinv2_moe.data.sources import load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.measure import report
from swinv2_moe.measure.live_run import LiveRun
from swinv2_moe.measure.run_record import read_run
from swinv2_moe.models import build_model
from swinv2_moe.predict.prediction import as_csv
from swinv2_moe.predict.predictor import load_predictor
from swinv2_moe.ranks.world import World, expert_group, seed_everything
from swinv2_moe.start import frozen
from swinv2_moe.start.frozen import choose_size, extract_features, probe, set_classifier
from swinv2_moe.start.known import accuracy_in_words, interval
from swinv2_moe.start.probe import STRENGTHS, _folds, fit_classifier
from swinv2_moe.train.run import train
from swinv2_moe.train.step import TrainingStep

ALONE = World(0, 1, torch.device("cpu"))
PROBED = {"TRAIN.PROBE": True, "TRAIN.BEST_BY": "calibrated"}


def clusters(counts: list[int], spread: float, dims: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Features around a center for each class, far from 0 and with unequal scales."""
    random = np.random.default_rng(0)
    targets = np.repeat(np.arange(len(counts)), counts)
    centers = 3 * random.standard_normal((len(counts), dims))
    features = centers[targets] + spread * random.standard_normal((len(targets), dims))
    return (100 + features * 10.0 ** np.arange(dims)).astype(np.float32), targets


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    # by hand, from the formula
    [(82, 100, 73.3, 88.3), (0, 10, 0.0, 27.8), (10, 10, 72.2, 100.0), (1, 1, 20.7, 100.0)],
)
def test_the_interval_of_wilson(hits, count, low, high):
    assert interval(hits, count) == (pytest.approx(low, abs=0.05), pytest.approx(high, abs=0.05))


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """For 40 pictures, by the binomial distribution; near 0 and 1 the share is lower."""
    for truth in (0.1, 0.3, 0.5, 0.8, 0.9):
        covered = 0.0
        for hits in range(41):
            low, high = interval(hits, 40)
            chance = math.comb(40, hits) * truth**hits * (1 - truth) ** (40 - hits)
            covered += chance * (low <= 100 * truth <= high)
        assert covered > 0.92, truth


def test_an_accuracy_in_words():
    assert accuracy_in_words(82, 100) == "82 of 100 held-out pictures, 82% (73 to 88)"
    assert accuracy_in_words(0, 0) == "0 of 0 held-out pictures"
    with pytest.raises(ValueError, match="5 of 4"):
        interval(5, 4)


@pytest.mark.parametrize("counts", [[20, 20], [12, 15, 9], [8] * 5])
def test_a_classifier_of_clusters(counts):
    features, targets = clusters(counts, spread=0.3)
    found = fit_classifier(features, targets, len(counts))
    assert (found.weight @ features.T + found.bias[:, None]).argmax(0).tolist() == targets.tolist()
    assert found.hits >= len(targets) - 1
    assert found.tested == len(targets)
    expected = f"{found.hits} of {len(targets)} pictures in cross-validation"
    assert str(found).startswith(expected)


@pytest.mark.parametrize("counts", [[30, 30], [20, 20, 20]])
def test_it_is_the_regression_of_scikit_learn(counts):
    features, targets = clusters(counts, spread=4.0)
    found = fit_classifier(features, targets, len(counts))
    assert found.strength in STRENGTHS
    deviation = features.std(0).astype(np.float64)
    root = np.sqrt(deviation / np.sqrt((deviation**2).mean())).clip(0.25, 4)
    scaled = (features - features.mean(0)) / deviation * root
    model = LogisticRegression(C=found.strength, max_iter=200).fit(scaled, targets)
    expected = model.predict_log_proba(scaled)
    logits = torch.from_numpy(features @ found.weight.T + found.bias)
    # both stop where the gradient is small: 1e-4 of the sum of losses
    assert np.allclose(logits.log_softmax(1), expected, atol=1e-2)


def test_an_earlier_classifier_of_these_classes_is_used():
    """It knows the direction that 3 pictures a class hide among 200 features of noise."""
    random = np.random.default_rng(0)
    targets, tests = np.repeat(np.arange(4), 3), np.repeat(np.arange(4), 50)
    known = np.eye(4, 200)
    images, held = (
        (2 * known[of] + random.standard_normal((len(of), 200))).astype(np.float32)
        for of in (targets, tests)
    )

    def accuracy(found):
        return float(((held @ found.weight.T + found.bias).argmax(1) == tests).mean())

    without, with_known = (fit_classifier(images, targets, 4, rows) for rows in (None, known))
    assert accuracy(with_known) > accuracy(without) + 0.2
    assert with_known.log_loss < without.log_loss
    useless = fit_classifier(images, targets, 4, np.zeros((4, 200)))
    assert np.allclose(useless.weight, without.weight, atol=1e-6)


def test_features_that_never_vary_change_nothing():
    features, targets = clusters([12, 15, 9], spread=0.3)
    constant = np.full((len(features), 40), 7.0, np.float32)
    found = fit_classifier(features / 100, targets, 3)
    more = fit_classifier(np.concatenate([features / 100, constant], 1), targets, 3)
    # both stop where the gradient is small
    assert np.allclose(more.weight[:, :6], found.weight, rtol=1e-2, atol=1e-6)
    assert (more.strength, more.hits) == (found.strength, found.hits)


def test_many_classes_are_fitted_by_least_squares(monkeypatch):
    """200 classes of 6 pictures: nearly as good as the logistic regression, in one solution."""
    features, targets = clusters([6] * 200, spread=0.3, dims=20)
    logistic = fit_classifier(features, targets, 200)
    monkeypatch.setattr("swinv2_moe.start.probe._LARGE", 0)
    monkeypatch.setattr("swinv2_moe.start.probe.LogisticRegression", None)
    ridge = fit_classifier(features, targets, 200)
    assert ridge.tested == logistic.tested == len(targets)
    assert ridge.hits > 0.9 * len(targets)
    right = (features @ ridge.weight.T + ridge.bias).argmax(1) == targets
    assert right.mean() > 0.95
    assert ridge.log_loss < math.log(200) / 2
    two = fit_classifier(features[:12], targets[:12], 2)
    assert two.hits == 12


def test_noise_is_not_called_knowledge():
    """Labels that say nothing: the log loss stays near that of a guess, and so do the hits."""
    features, _ = clusters([60, 60], spread=1.0)
    targets = np.random.default_rng(1).integers(0, 2, 120)
    found = fit_classifier(features, targets, 2)
    assert found.log_loss > math.log(2) - 0.05
    assert interval(found.hits, found.tested)[0] < 50


def test_folds_are_even_and_a_single_picture_is_never_tested():
    targets = np.array([0] * 7 + [1] * 5 + [2] + [3] * 2)
    folds = _folds(targets, seed=0)
    assert folds[targets == 2].tolist() == [-1]
    for name in (0, 1, 3):
        counts = np.bincount(folds[targets == name], minlength=5)
        assert counts.max() - counts.min() <= 1
    features = np.random.default_rng(0).standard_normal((15, 3)).astype(np.float32)
    assert fit_classifier(features, targets, 4).tested == 14


def test_the_fewest_pictures():
    """One of each class: nothing can be tested. A feature without variance, a class without
    pictures: neither gives values that are not finite."""
    features = np.array([[1.0, 5.0], [2.0, 5.0]], np.float32)
    found = fit_classifier(features, np.array([0, 2]), 3)
    assert (found.tested, found.hits) == (0, 0)
    assert np.isfinite(found.weight).all()
    logits = features @ found.weight.T + found.bias
    assert logits.argmax(1).tolist() == [0, 2]
    assert str(found) == "0 of 0 pictures in cross-validation"


def test_the_model_has_the_classifier_of_its_features(make_config, tmp_path):
    sections = all_sections(make_config(tmp_path))
    sources = load_sources(sections.data)
    model = build_model(sections.model, 10)
    found = probe(model, sections, sources, ALONE, most=10**6)
    assert found.images == 160
    set_classifier(model, found.classifier)
    loader = evaluation_loader(sections.data, sources.val)
    features, _ = extract_features(model, loader, ALONE, torch.no_grad)
    expected = features.features @ found.classifier.weight.T + found.classifier.bias
    with torch.no_grad():
        logits = torch.cat([model(batch.images) for batch in loader]).numpy()
    # sums of 64 products in fp32, of logits of about 10
    assert np.allclose(logits, expected, rtol=1e-4, atol=1e-3)
    few = probe(model, sections, sources, ALONE, most=30)
    assert few.images == 30


def classifier_on_rank(rank: int, size: int) -> None:
    sections = all_sections(load_config(QUICKSTART, SMALL.split()))
    world = World(rank, size, torch.device("cpu"), dist.group.WORLD)
    seed_everything(0)
    model = build_model(sections.model, 10, expert_group(sections.model.experts, world))
    found = probe(model, sections, load_sources(sections.data), world, most=101)
    set_classifier(model, found.classifier)
    others = world.gather([found.images, found.classifier.weight.tobytes(), str(found.classifier)])
    assert others[0] == others[1]
    assert (found.images, found.classifier.tested) == (101, 101)


def test_every_rank_has_the_same_classifier(run_processes):
    """Each extracts a part of the features, with its part of the experts."""
    run_processes(classifier_on_rank, 2, 2, seconds=120)


def test_features_that_are_not_finite_are_told(make_config, tmp_path):
    sections = all_sections(make_config(tmp_path))
    model = build_model(sections.model, 10)
    with torch.no_grad():
        next(iter(model.parameters())).fill_(float("nan"))
    with pytest.raises(UserError, match="its features are not finite"):
        probe(model, sections, load_sources(sections.data), ALONE, most=100)


def test_the_size_of_the_lowest_log_loss(make_config, tmp_path, monkeypatch):
    """A larger image must be clearly better, one smaller than that of the weights by far; one that
    would take too long is not tried."""
    configs = [make_config(tmp_path, {"DATA.IMG_SIZE": side}) for side in (16, 32)]
    sizes = [all_sections(config) for config in configs]
    sources = load_sources(sizes[0].data)
    original = frozen.probe
    losses = {16: 1.0, 32: 0.99}
    seconds = {16: 1.0, 32: 4.0}

    def probed(model, sections, *more):
        found = original(model, sections, *more)
        side = sections.data.img_size
        classifier = found.classifier._replace(log_loss=losses[side])
        return found._replace(classifier=classifier, seconds=seconds[side])

    monkeypatch.setattr(frozen, "probe", probed)
    chosen, found, lines = choose_size(sizes, sources, ALONE, 16)
    assert (chosen, found.images) == (0, 160)
    assert sum("in cross-validation" in line for line in lines) == 2
    assert choose_size(sizes, sources, ALONE, 32)[0] == 1
    losses[32] = 1.2
    assert choose_size(sizes, sources, ALONE, 32)[0] == 0
    losses[32] = 0.9
    assert choose_size(sizes, sources, ALONE, 16)[0] == 1
    # a tenth of the time is 3 s, 4 are expected
    slow = [replace(one, train=replace(one.train, minutes=0.5)) for one in sizes]
    chosen, _, lines = choose_size(slow, sources, ALONE, 32)
    assert chosen == 0
    assert any(line.startswith("  32 px: not tried") for line in lines)


def test_a_checkpoint_is_used_at_its_temperature(make_config, tmp_path):
    """Its logits are divided where it is deployed, or a start; not where its run goes on."""
    config = make_config(tmp_path / "run", PROBED | {"MODEL.SWINV2.DEPTHS": [1, 1, 1]})
    train(config)
    source = open_checkpoint(tmp_path / "run/checkpoints/latest")
    stored = source.meta["temperature"]
    assert stored != 1.0
    model = build_model(all_sections(config).model, 10)
    weight, bias = model.classifier_names()
    read = read_weights_of(source, model)
    trained = read_section(source, "", model, model.state_dict())
    for name in (weight, bias):
        assert torch.equal(read[name], trained[name] / stored)
    others = trained.keys() - {weight, bias}
    assert all(torch.equal(read[name], trained[name]) for name in others)
    _check_what_is_unlike_the_digits(tmp_path / "run")


def _check_what_is_unlike_the_digits(run: Path) -> None:
    """In Python and CSV, and with no features of the checkpoint, not at all."""
    model = load_predictor(run)
    noise = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    digits = [(15.9 * digit).astype(np.uint8) for digit in load_digits().images[:50]]
    assert [type(one.is_unlike) for one in model.predict([noise])] == [bool]
    marked = [one.is_unlike for one in model.predict(digits)]
    assert sum(marked) < len(marked) / 2
    text = as_csv(model.predict([noise]))
    assert text.splitlines()[0].endswith(",unlike_training,error")
    assert text.splitlines()[1].split(",")[-2] in ("yes", "no")
    model._novelty = None
    assert [one.is_unlike for one in model.predict([noise])] == [None]


def validations(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "val_top1" in line]


def test_a_run_keeps_the_classifier_that_training_does_not_beat(make_config, tmp_path, capsys):
    run = tmp_path / "run"
    harmful = PROBED | {"TRAIN.BASE_LR": 50.0, "TRAIN.EPOCHS": 3}
    summary = train(make_config(run, harmful))
    first, *rest = validations(run)
    assert (first["epoch"], first["step"], first["val_top1"]) == (0, 0, summary["best_val_top1"])
    assert len(rest) == 3
    best = open_checkpoint(run / "checkpoints" / "best")
    assert (best.meta["step"], summary["best_epoch"]) == (0, 0)
    out = capsys.readouterr().out
    assert "the frozen network: " in out
    assert "result: the classifier on the frozen network, which training did not improve: " in out


def test_training_that_beats_the_classifier_is_kept(make_config, tmp_path, capsys, monkeypatch):
    """A classifier that gives every class the same logit is beaten by any training."""
    original = frozen.fit_classifier

    def ignorant(*args):
        found = original(*args)
        return found._replace(weight=0 * found.weight, bias=0 * found.bias)

    monkeypatch.setattr(frozen, "fit_classifier", ignorant)
    summary = train(make_config(tmp_path / "run", PROBED | {"TRAIN.EPOCHS": 4}))
    assert summary["best_epoch"] > 0
    assert f"result: the model after epoch {summary['best_epoch']}: " in capsys.readouterr().out


def test_a_run_that_was_stopped_after_the_probe_goes_on_exactly(make_config, tmp_path, monkeypatch):
    """In the first epoch, from the checkpoint of step 0: the classifier is not fitted again."""
    whole = train(make_config(tmp_path / "whole", PROBED))
    config = make_config(tmp_path / "run", PROBED)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert open_checkpoint(tmp_path / "run/checkpoints/latest").meta["step"] == 0
    monkeypatch.setattr(frozen, "probe", None)
    summary = train(config, "auto")
    assert summary["best_val_top1"] == whole["best_val_top1"]
    assert weights_of(tmp_path / "whole") == weights_of(tmp_path / "run")
    assert [line["epoch"] for line in validations(tmp_path / "run")] == [0, 1, 2]


def test_a_run_that_was_stopped_in_the_probe_begins_anew(make_config, tmp_path, monkeypatch):
    config = make_config(tmp_path / "run", PROBED)
    with monkeypatch.context() as patch:
        patch.setattr(frozen, "fit_classifier", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert train(config)["epochs"] == 2


def interrupted(*args):
    raise KeyboardInterrupt


def test_validations_are_as_rare_as_the_key_says(make_config, tmp_path):
    keys = PROBED | {"VAL_FREQ": 2, "TRAIN.EPOCHS": 5, "TRAIN.WARMUP_EPOCHS": 0}
    summary = train(make_config(tmp_path / "run", keys))
    found = validations(tmp_path / "run")
    assert [line["epoch"] for line in found] == [0, 2, 4, 5]
    assert [line["step"] for line in found] == [0, 10, 20, 25]
    watched = LiveRun(tmp_path / "run")
    watched.read()
    position = watched.position()
    assert (position.epoch, position.epoch_step, position.step) == (5, 0, 25)
    facts = report._facts(read_run(tmp_path / "run"))
    assert facts["epochs, steps"] == "5, 25"
    assert facts["top-1, best"] == f"{summary['best_val_top1']:.2f}%"
    assert (summary["epochs"], summary["steps"]) == (5, 25)


def test_training_ends_without_a_better_validation(make_config, tmp_path, capsys):
    keys = PROBED | {"TRAIN.BASE_LR": 50.0, "TRAIN.EPOCHS": 9, "TRAIN.PATIENCE": 2}
    config = make_config(tmp_path / "run", keys)
    summary = train(config)
    assert (summary["epochs"], summary["ended"]) == (2, "no better validation in 2 epochs")
    assert "training ends: no better validation in 2 epochs" in capsys.readouterr().out
    assert train(config, "auto")["epochs"] == 2  # finished
    more = make_config(tmp_path / "run", keys | {"TRAIN.PATIENCE": 3})
    assert train(more, "auto")["epochs"] == 3


def test_training_ends_when_its_time_is_over(make_config, tmp_path):
    """After each epoch: the next one would end too late. A limit of nothing allows one."""
    keys = PROBED | {"TRAIN.EPOCHS": 9, "TRAIN.MINUTES": 1e-6}
    config = make_config(tmp_path / "run", keys)
    summary = train(config)
    assert summary["epochs"] == 1
    assert "TRAIN.MINUTES" in summary["ended"]
    longer = make_config(tmp_path / "run", keys | {"TRAIN.MINUTES": 0.0, "TRAIN.EPOCHS": 3})
    assert train(longer, "auto")["epochs"] == 3


def test_batch_norms_keep_the_statistics_of_the_features(make_config, tmp_path):
    """With a probe as the start; their weights are trained."""
    network = {"MODEL.TYPE": "timm", "MODEL.NAME": "resnet10t", "DATA.IMG_SIZE": 32}
    network |= {"MODEL.MOE.NUM_EXPERTS": 0, "MODEL.MOE.BLOCKS": []}
    for probed in (True, False):
        keys = network | {"TRAIN.PROBE": probed, "TRAIN.BASE_LR": 1e-2}
        sections = all_sections(make_config(tmp_path, keys))
        step = TrainingStep(sections.train, ALONE, build_model(sections.model, 10), 10)
        norm = step.model.get_submodule("bn1")
        mean, weight = norm.running_mean.clone(), norm.weight.detach().clone()
        step.train()
        assert step.model.training
        step.model(torch.randn(4, 3, 32, 32))[0].sum().backward()
        assert torch.equal(norm.running_mean, mean) == probed
        assert norm.weight.grad is not None
        assert torch.equal(norm.weight, weight)
