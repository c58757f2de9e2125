// The shared memory of the P ranks of one machine, and the signals between them.
//
// Layout of the segment: counters [2, P, P] (lane, sender, receiver), then the buffers of the P ranks.

#pragma once

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

namespace comm {

constexpr long kCacheLine = 64;
constexpr double kWatchSeconds = 0.05;  // between two looks at the process that a rank waits for

enum Lane { kSignals, kBarrier, kNumLanes };

// Signals from one rank to another. Each side writes a cache line of its own.
struct Counter {
  alignas(kCacheLine) std::atomic<uint32_t> sent;  // signals so far, modulo 2^32; written by the sender
  std::atomic<uint32_t> sleeping;                  // 1 while the receiver sleeps until `sent` changes
  alignas(kCacheLine) uint32_t received;           // signals waited for; read and written by the receiver alone
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "a futex is a 32-bit word");
static_assert(sizeof(Counter) == 2 * kCacheLine, "no two ranks write one cache line");

// One rank's view of the segment. channel.py declares the same fields.
struct Group {
  char* segment;
  long num_ranks, rank;
  long buffer_bytes;  // of each rank's buffer
  long spins;         // how often a wait looks before it sleeps
  double timeout;     // seconds of a wait
  const int* processes;  // [num_ranks] a pidfd of each rank; -1: none

  Counter& counter(Lane lane, long from, long to) const {
    const long row = lane * num_ranks + from;
    return reinterpret_cast<Counter*>(segment)[row * num_ranks + to];
  }
  char* buffer(long owner) const {
    const long counters = kNumLanes * num_ranks * num_ranks * sizeof(Counter);
    return segment + counters + owner * buffer_bytes;
  }
};

inline double seconds_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

// The word lies in memory that processes share, so these are not the _PRIVATE operations.
inline void futex_wake(std::atomic<uint32_t>* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// Sleeps while *word == value. The kernel compares once more before it sleeps, so no wake-up is lost.
inline void futex_wait(std::atomic<uint32_t>* word, uint32_t value, double seconds) {
  timespec limit;
  limit.tv_sec = static_cast<time_t>(seconds);
  limit.tv_nsec = static_cast<long>(1e9 * (seconds - limit.tv_sec));
  syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Release: whoever sees the new count also sees everything that this rank wrote before.
// Sequential consistency orders the count before the look at `sleeping`. The receiver sets `sleeping` before it looks at
// the count. So one of the two sees the other, and no sleeper is left behind.
inline void signal(const Group& group, Lane lane, long to) {
  Counter& counter = group.counter(lane, group.rank, to);
  counter.sent.fetch_add(1, std::memory_order_seq_cst);
  if (counter.sleeping.load(std::memory_order_seq_cst)) futex_wake(&counter.sent);
}

// A pidfd is readable once its process has ended. poll ignores -1.
inline bool has_ended(const Group& group, long rank) {
  pollfd process = {group.processes[rank], POLLIN, 0};
  return poll(&process, 1, 0) == 1 && (process.revents & POLLIN);
}

// Acquire: after the k-th wait, this rank sees everything that the sender wrote before its k-th signal.
// Returns false where no signal comes within the timeout, or the sender's process has ended without one.
inline bool wait(const Group& group, Lane lane, long from) {
  Counter& counter = group.counter(lane, from, group.rank);
  const uint32_t before = counter.received;
  for (long i = 0; i < group.spins; i++) {
    if (counter.sent.load(std::memory_order_acquire) != before) {
      counter.received = before + 1;
      return true;
    }
    pause_briefly();
  }
  const double limit = seconds_now() + group.timeout;
  counter.sleeping.store(1, std::memory_order_seq_cst);
  while (counter.sent.load(std::memory_order_seq_cst) == before) {
    const double left = limit - seconds_now();
    if (left <= 0) break;
    futex_wait(&counter.sent, before, std::min(left, kWatchSeconds));  // may also end early, by a signal handler
    if (has_ended(group, from)) break;  // it may have sent its last signal just before
  }
  counter.sleeping.store(0, std::memory_order_relaxed);
  if (counter.sent.load(std::memory_order_acquire) == before) return false;
  counter.received = before + 1;
  return true;
}

}  // namespace comm
