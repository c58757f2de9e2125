"""The arithmetic of benchmarks/predict.py against cases computed by hand."""

from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.fixture
def predict(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    import predict

    return predict


def test_a_kernel_takes_as_long_as_its_scarcest_resource(predict):
    kernel = predict.Kernel
    # 4.8 GB at 4.8 TB/s
    assert kernel("copy", 4.8e9).seconds == pytest.approx(1e-3)
    # 64 FLOPs a byte: 64e9 / 64 = 1e9 bytes at 6.1 TB/s; the tensor cores alone 0.1 ms
    assert kernel("tile", flops=64e9, tile=(128, 128)).seconds == pytest.approx(1e9 / 6.1e12)
    # 128 FLOPs a byte: 65% of 989 TFLOP/s is slower than the L2 cache
    assert kernel("cuBLAS", flops=64e9).seconds == pytest.approx(64e9 / (0.65 * 989e12))
    assert kernel("short", 8.0, launches=3).seconds == pytest.approx(6e-6)


def test_instructions_add_to_the_product_unless_they_overlap(predict):
    product = predict.Kernel("product", flops=0.65 * 989e12 * 1e-3, instructions=67e12 / 2 * 5e-4)
    assert product.seconds == pytest.approx(1.5e-3)
    assert product._replace(overlaps=True).seconds == pytest.approx(1e-3)


def test_a_pass_waits_for_the_host_where_that_is_slower(predict):
    kernels = [predict.Kernel("short"), predict.Kernel("others", launches=9)]
    assert predict.pass_seconds(kernels) == pytest.approx(10 * 5e-6)
    kernels.append(predict.Kernel("copy", 4.8e9))
    assert predict.pass_seconds(kernels) == pytest.approx(1e-3 + 10 * 2e-6)


@pytest.mark.parametrize(
    ("commit", "dropout", "launches"),
    [("now", False, (12, 29)), ("now", True, (13, 30)), ("before", False, (28, 56))],
)
def test_launches_are_those_that_were_counted(predict, commit, dropout, launches):
    """By benchmarks/launches.py, K = 1 and capacity 1.25 on one rank."""
    case = predict.Case(18432, 8, dropout, commit)
    ahead = sum(kernel.launches for kernel in predict.forward(case))
    back = sum(kernel.launches for kernel in predict.backward(case))
    assert (ahead, ahead + back) == launches


def test_rows_that_fill_tiles(predict):
    # 576 rows an expert: 4.5 tiles of 128 and half of one, 640 rows
    assert predict.Case(18432, 32, False).wasted == pytest.approx(64 / 640)
    # 144 rows an expert: tiles of 64 rows now, of 128 before
    assert predict.Case(4608, 32, False).wasted == pytest.approx(32 / 176)
    assert predict.Case(4608, 32, False, "before").wasted == pytest.approx(64 / 208)


def test_kept_bytes_of_a_token(predict):
    # tokens in bf16 and fp32 (512 * 6), the hidden layer in bf16 (2048 * 2)
    # Tutel: 1.25 rows of 2 * (2 * 512 + 2 * 2048) and the mask's 2048, and fp32 tokens
    for dropout, tutel in ((False, 1.25 * 10240 + 2048), (True, 1.25 * 12288 + 2048)):
        kept = predict.kept_bytes(predict.Case(18432, 8, dropout))
        assert [size / 18432 for size in kept] == [7168, tutel]
    before = predict.kept_bytes(predict.Case(18432, 8, True, "before"))
    assert before[0] / 18432 == 7168 + 4096
