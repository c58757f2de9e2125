"""Average precision: weighted pictures give the library's value; intervals; drawn mistakes."""

import numpy as np
import pytest

pytest.importorskip("pycocotools")

from swinv2_moe.measure.average_precision import (
    Detections,
    _evaluated,
    coco_results,
    measure,
    weighted_precision,
)
from swinv2_moe.measure.report_detection import mistakes


def random_case(seed: int, pictures: int, classes: int = 3) -> tuple[dict, dict[int, Detections]]:
    """Objects, some of them crowds, and detections that are moved, doubled, wrong or missing."""
    generator = np.random.default_rng(seed)
    truth: dict = {
        "images": [
            {"id": i, "file_name": f"{i}.png", "width": 200, "height": 200}
            for i in range(1, pictures + 1)
        ],
        "categories": [{"id": 10 * k, "name": f"class {k}"} for k in range(1, classes + 1)],
        "annotations": [],
    }
    found = {}
    for image in range(1, pictures + 1):
        rows: list[tuple] = []
        for _ in range(generator.integers(0, 5)):
            label = int(generator.integers(classes))
            box = np.r_[generator.uniform(0, 120, 2), generator.uniform(5, 80, 2)]
            row = {"id": len(truth["annotations"]) + 1, "image_id": image}
            row |= {"category_id": 10 * (label + 1), "bbox": box.tolist()}
            row |= {"area": float(box[2] * box[3]), "iscrowd": int(generator.random() < 0.1)}
            truth["annotations"].append(row)
            for _ in range(generator.integers(0, 3)):
                moved = box + generator.normal(0, 4, 4)
                corners = np.r_[moved[:2], moved[:2] + np.abs(moved[2:]) + 1]
                wrong = generator.random() < 0.1
                rows.append((corners, generator.uniform(), (label + wrong) % classes))
        found[image] = Detections(
            np.array([row[0] for row in rows], np.float32).reshape(-1, 4),
            np.array([row[1] for row in rows], np.float32),
            np.array([row[2] for row in rows], np.int64),
        )
    return truth, found


@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_the_library(seed: int) -> None:
    truth, found = random_case(seed, pictures=25)
    result = measure(truth, found)
    (ours,) = weighted_precision(_evaluated(truth, found)[1], np.ones((1, 25), int))
    # the same sums of the same quotients in fp64, in another order
    assert 100 * ours.mean() == pytest.approx(result.ap, abs=1e-9)
    assert 100 * ours[0] == pytest.approx(result.ap50, abs=1e-9)
    assert result.interval50[0] < result.ap50 < result.interval50[1]
    assert result.objects == sum(not row["iscrowd"] for row in truth["annotations"])
    counts = [count for _, _, count in result.by_class]
    assert sum(counts) == result.objects


def test_a_picture_that_comes_twice_counts_twice() -> None:
    truth, found = random_case(1, pictures=6)
    weights = np.array([[2, 0, 1, 1, 0, 3]])
    images, annotations, several = [], [], {}
    for image, times in zip(truth["images"], weights[0], strict=True):
        for _ in range(times):
            number = len(images) + 1
            images.append(image | {"id": number})
            rows = [row for row in truth["annotations"] if row["image_id"] == image["id"]]
            annotations += [row | {"image_id": number} for row in rows]
            several[number] = found[image["id"]]
    for number, row in enumerate(annotations, 1):
        row["id"] = number
    repeated = truth | {"images": images, "annotations": annotations}
    (ours,) = weighted_precision(_evaluated(truth, found)[1], weights)
    assert 100 * ours.mean() == pytest.approx(measure(repeated, several).ap, abs=1e-9)


def one_object() -> dict:
    row = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [10, 10, 20, 20], "area": 400}
    return {
        "images": [{"id": i, "file_name": "a", "width": 60, "height": 60} for i in (1, 2)],
        "categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}],
        "annotations": [row | {"iscrowd": 0}],
    }


def test_nothing_found_and_all_found() -> None:
    nothing = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, int))
    result = measure(one_object(), {1: nothing, 2: nothing})
    assert (result.ap, result.ap50) == (0, 0)
    assert result.by_class == [(0, 0, 1), (None, None, 0)]
    box = np.array([[10, 10, 30, 30]], np.float32)
    right = Detections(box, np.array([0.9], np.float32), np.array([0]))
    result = measure(one_object(), {1: right, 2: nothing})
    assert result.ap == pytest.approx(100)
    assert "2 pictures of val, 1 objects" in result.in_words("val")


def test_classes_keep_their_order_whatever_their_ids_are() -> None:
    truth = one_object()
    truth["categories"] = [{"id": 7, "name": "b"}, {"id": 1, "name": "a"}]
    box = np.array([[10, 10, 30, 30]], np.float32)
    right = Detections(box, np.array([0.9], np.float32), np.array([1]))
    result = measure(truth, {1: right})
    assert result.by_class[0] == (None, None, 0)
    assert result.by_class[1] == (pytest.approx(100), pytest.approx(100), 1)
    assert [match["category_id"] for match in result.matches[1]] == [1]
    assert result.matches[2] == []


def test_results_in_coco_s_form() -> None:
    _, found = random_case(0, pictures=3)
    rows = coco_results(found, [10, 20, 30])
    assert len(rows) == sum(len(one.scores) for one in found.values())
    assert {row["category_id"] for row in rows} <= {10, 20, 30}
    assert [row["id"] for row in rows] == list(range(1, len(rows) + 1))


def test_mistakes_are_counted_and_drawn() -> None:
    truth = one_object()
    rows: list[dict] = [
        {"bbox": [0, 0, 10, 10], "category_id": 1, "iscrowd": 0},
        {"bbox": [20, 20, 10, 10], "category_id": 1, "iscrowd": 0},
        {"bbox": [40, 40, 10, 10], "category_id": 2, "iscrowd": 0},
        {"bbox": [50, 0, 10, 10], "category_id": 1, "iscrowd": 1},
    ]
    for number, row in enumerate(rows, 1):
        row |= {"id": number, "image_id": 1, "area": 100}
    truth["annotations"] = rows
    found = Detections(
        np.array(
            [[0, 0, 10, 10], [41, 41, 51, 51], [30, 0, 40, 10], [0, 0, 9, 9], [50, 0, 60, 10]],
            np.float32,
        ),
        np.array([0.9, 0.8, 0.7, 0.1, 0.6], np.float32),
        np.array([0, 1, 0, 0, 0]),
    )
    matches = measure(truth, {1: found}).matches[1]
    results = {row["id"]: row for row in coco_results({1: found}, [1, 2])}
    objects = {row["id"]: row for row in rows}
    cost, drawn, missed, wrong = mistakes(matches, results, objects, {1: "cat", 2: "dog"})
    assert (missed, wrong) == (1, 1)  # what lies in a crowd is neither
    assert cost == pytest.approx(1.7)
    assert sorted(box.text for box in drawn) == ["cat 70%", "cat 90%", "dog 80%", "missed cat"]
