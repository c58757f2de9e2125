"""ThreadSanitizer finds no race in the primitives, and finds one where their order is weakened.

Threads stand for the ranks: it cannot watch memory that processes share.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[4] / "moe_core" / "comm" / "native"

PROGRAM = """
#include "channel.cpp"

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

void rank_main(char* segment, long ranks, long rank) {
  const int processes[] = {-1, -1, -1};
  // rank 0 sleeps at once
  const Group group{segment, ranks, rank, 64, 10 * rank, 60.0, processes};
  for (long turn = 0; turn < 2000; turn++) {
    long received;
    comm_put(&group, (rank + 1) % ranks, 0, &turn, sizeof turn, 1);
    if (comm_wait(&group, (rank + ranks - 1) % ranks)) abort();
    std::memcpy(&received, comm_buffer(&group, rank), sizeof received);
    if (received != turn) abort();
    if (comm_barrier(&group) >= 0) abort();
  }
}

int main() {
  const long ranks = 3, bytes = comm_segment_bytes(ranks, 64);
  char* segment = static_cast<char*>(aligned_alloc(kCacheLine, bytes));
  std::memset(segment, 0, bytes);
  std::vector<std::thread> threads;
  for (long rank = 0; rank < ranks; rank++) threads.emplace_back(rank_main, segment, ranks, rank);
  for (auto& thread : threads) thread.join();
}
"""


def run(directory: Path) -> subprocess.CompletedProcess:
    """Compile the program with the sources in `directory` and run it."""
    source, program = directory / "program.cpp", directory / "program"
    source.write_text(PROGRAM)
    compiler = ["g++", "-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    compiled = subprocess.run([*compiler, str(source), "-o", str(program)], capture_output=True)
    if compiled.returncode:
        pytest.skip("no ThreadSanitizer")
    # It needs addresses that are not randomised as much as some kernels do.
    command = ["setarch", "-R", str(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.fixture
def sources(tmp_path) -> Path:
    if not shutil.which("g++") or not shutil.which("setarch"):
        pytest.skip("no g++ or no setarch")
    for path in NATIVE.iterdir():
        shutil.copy(path, tmp_path)
    return tmp_path


def test_no_race(sources):
    result = run(sources)
    assert result.returncode == 0, result.stderr
    assert "data race" not in result.stderr


def test_a_weaker_order_is_a_race(sources):
    header = sources / "segment.hpp"
    weaker = re.sub(r"memory_order_(seq_cst|acquire)", "memory_order_relaxed", header.read_text())
    header.write_text(weaker)
    assert "data race" in run(sources).stderr
