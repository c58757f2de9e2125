// The primitives of a memory channel. ../channel.py says what they do and checks the arguments.

#include <cstring>

#include "segment.hpp"

using namespace comm;

extern "C" {

long comm_segment_bytes(long num_ranks, long buffer_bytes) {
  return kNumLanes * num_ranks * num_ranks * static_cast<long>(sizeof(Counter)) + num_ranks * buffer_bytes;
}

void* comm_buffer(const Group* group, long owner) { return group->buffer(owner); }

// The copy needs no order of its own: the signal that follows it, now or later, releases it.
void comm_put(const Group* group, long peer, long offset, const void* source, long bytes, long with_signal) {
  std::memcpy(group->buffer(peer) + offset, source, bytes);
  if (with_signal) signal(*group, kSignals, peer);
}

void comm_signal(const Group* group, long peer) { signal(*group, kSignals, peer); }

// 0, or 1 after the timeout.
long comm_wait(const Group* group, long peer) { return !wait(*group, kSignals, peer); }

// Dissemination: in step k every rank signals the rank 2^k ahead and waits for the one 2^k behind. After log2(P) steps it
// has heard of all. Every step acquires what the step before released, so all writes before the barrier are visible
// after it. Returns -1, or the rank that did not come.
long comm_barrier(const Group* group) {
  for (long step = 1; step < group->num_ranks; step *= 2) {
    const long ahead = (group->rank + step) % group->num_ranks;
    const long behind = (group->rank - step + group->num_ranks) % group->num_ranks;
    signal(*group, kBarrier, ahead);
    if (!wait(*group, kBarrier, behind)) return behind;
  }
  return -1;
}
}
