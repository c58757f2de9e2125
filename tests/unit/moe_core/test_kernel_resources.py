"""docs/results/kernels.csv is what the kernels need when they are compiled now."""

import kernel_resources as kernels
import pytest
from triton_cases import INTERPRETED

pytest.importorskip("triton")


def recorded(case: str, sm: int) -> list:
    """The rows of the file; skips where another version of Triton compiles."""
    import triton

    if INTERPRETED:
        pytest.skip("compiles, which the interpreter does not")
    version, rows = kernels.read()
    if triton.__version__ != version:
        pytest.skip(f"the file is of triton {version}, this is {triton.__version__}")
    return [row for row in rows if (row.case, row.sm) == (case, sm)]


def test_recorded_figures_are_those_of_the_kernels():
    for case in ("bfloat16, T = 18,432, E = 8, forward", "E = 8"):
        expected = recorded(case, 90)
        assert expected
        assert kernels.usages(case, 90) == expected


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_every_recorded_figure(sm):
    for case in kernels.cases():
        assert kernels.usages(case, sm) == recorded(case, sm), case


def test_the_file_has_every_case():
    _, rows = kernels.read()
    assert {(row.case, row.sm) for row in rows} == {
        (case, sm) for case in kernels.cases() for sm in kernels.ARCHITECTURES
    }


def test_the_table_marks_kernels_that_spill():
    spills = kernels.Usage("k", "case", 90, 4, 255, 8, 2048, 1)
    fits = spills._replace(sm=80, spilled=0)
    assert kernels.markdown([fits, spills]).splitlines() == [
        "| kernel | case | warps | sm_80 | sm_90 |",
        "| --- | --- | --- | --- | --- |",
        "| `k` | case | 4 | 255, 0, 2, 1 | 255, **8**, 2, 1 |",
    ]


@pytest.mark.parametrize(
    ("usage", "programs"),
    [
        # warps, registers, shared, columns of tensor memory
        ((8, 110, 98304, 0), 2),  # 65536 / (8 * 32 * 112) = 2.3; 228 KiB / 97 KiB = 2.4
        ((8, 255, 147456, 0), 1),  # 65536 / (8 * 32 * 256) = 1
        ((4, 24, 0, 0), 16),  # 64 warps / 4
        ((1, 24, 0, 0), 32),  # the most programs
        ((4, 128, 65536, 256), 2),  # 512 columns / 256
    ],
)
def test_programs_on_a_multiprocessor(usage, programs):
    assert kernels.programs_that_fit(kernels.ARCHITECTURES[90], *usage) == programs
