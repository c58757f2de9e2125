// A collective of one rank: it sends a message to every rank and receives one from every rank.
//
// A rank has a slot for each rank's message. A message travels in pieces of at most `piece_bytes`, one a round. Each slot
// exists twice, for even and for odd rounds: before a rank writes the slots of round k + 2, it has heard in round k + 1 from
// every rank, which has read round k.

#include <algorithm>
#include <cstring>

#include "segment.hpp"
#include "sums.hpp"

using namespace comm;

namespace {

enum Status { kDone, kTimeout, kWrongSize };

// The start of a slot, before its piece.
struct alignas(kCacheLine) Header {
  int64_t message_bytes;  // of all pieces
  int64_t rounds;         // of the longest message that the sender knows of
};

struct Message {
  long first_byte, bytes;
};

// One collective. collectives.py declares the same fields.
struct Collective {
  const Group* group;
  long piece_bytes;
  long round;  // of all collectives so far
  long dtype;  // of the sum of the received messages; -1: they are not summed
  const char* input;
  const Message* sent;  // [num_ranks] in the input
  char* output;
  const Message* received;  // [num_ranks] in the output
  long failed_rank, arrived_bytes;

  long piece_of(long message_bytes, long first) const { return std::clamp(message_bytes - first, 0L, piece_bytes); }

  Header* slot(long owner, long source) const {
    const long index = round % 2 * group->num_ranks + source;
    const long slot_bytes = sizeof(Header) + piece_bytes;
    return reinterpret_cast<Header*>(group->buffer(owner) + index * slot_bytes);
  }
};

// The pieces that begin at byte `first` of each message. The first ones tell how many rounds there are.
Status one_round(Collective& c, long first, long& rounds) {
  const Group& group = *c.group;
  const long ranks = group.num_ranks, rank = group.rank;
  for (long distance = 1; distance < ranks; distance++) {
    const long to = (rank + distance) % ranks;
    const Message& message = c.sent[to];
    Header* header = c.slot(to, rank);
    header->message_bytes = message.bytes;
    header->rounds = rounds;
    std::memcpy(header + 1, c.input + message.first_byte + first, c.piece_of(message.bytes, first));
    signal(group, kSignals, to);
  }
  for (long distance = 1; distance < ranks; distance++) {
    c.failed_rank = (rank - distance + ranks) % ranks;
    if (!wait(group, kSignals, c.failed_rank)) return kTimeout;
  }
  for (long from = 0; from < ranks; from++) {  // sums are in the order of the ranks
    const char* piece = c.input + c.sent[rank].first_byte + first;
    c.arrived_bytes = c.sent[rank].bytes;
    if (from != rank) {
      const Header* header = c.slot(rank, from);
      piece = reinterpret_cast<const char*>(header + 1);
      c.arrived_bytes = header->message_bytes;
      rounds = std::max(rounds, static_cast<long>(header->rounds));
    }
    c.failed_rank = from;
    if (c.arrived_bytes != c.received[from].bytes) return kWrongSize;
    char* target = c.output + c.received[from].first_byte + first;
    const long bytes = c.piece_of(c.arrived_bytes, first);
    if (c.dtype >= 0 && from > 0) {
      add(c.dtype, target, piece, bytes);
    } else {
      std::memcpy(target, piece, bytes);
    }
  }
  return kDone;
}

}  // namespace

extern "C" {

long comm_run(Collective* collective) {
  Collective& c = *collective;
  long rounds = 1;
  for (long to = 0; to < c.group->num_ranks; to++) {
    rounds = std::max(rounds, (c.sent[to].bytes + c.piece_bytes - 1) / c.piece_bytes);
  }
  Status status = kDone;
  for (long i = 0; i < rounds && status == kDone; i++) {
    status = one_round(c, i * c.piece_bytes, rounds);
    c.round++;
  }
  return status;
}
}
