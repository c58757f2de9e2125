// Memory for what a program of the tests reads from stdin and computes.

#pragma once

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace {

#if defined(__AMX_BF16__)
const long allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
#endif

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
