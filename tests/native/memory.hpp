// Memory for what a program of the tests reads from stdin and computes.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace {

std::vector<std::unique_ptr<void, void (*)(void*)>> held;  // until the end

// Aligned as torch's memory is, and not a byte more: the address sanitizer sees what lies beyond.
char* memory(long bytes) {
  void* start = nullptr;
  if (posix_memalign(&start, 64, bytes)) std::exit(3);
  held.emplace_back(start, std::free);
  return static_cast<char*>(start);
}
char* read(long bytes) {
  char* start = memory(bytes);
  if (static_cast<long>(std::fread(start, 1, bytes, stdin)) != bytes) std::exit(2);
  return start;
}

}  // namespace
