// Runs one rank's program of a plan. ../plan.py says what a plan is, ../check.py what the interpreter relies on.
//
// A message travels in pieces of at most `piece_bytes`, one a round. Each slot exists twice, for even and for odd rounds.

#include <algorithm>
#include <cstring>

#include "segment.hpp"
#include "sums.hpp"

using namespace comm;

namespace {

enum Action { kPut, kSignal, kWait, kCopy, kAdd };
enum Kind { kNone, kInput, kSlot, kOutput };
enum Status { kDone, kTimeout, kWrongSize };

struct Place {
  int32_t kind, index;
};

struct Step {
  int32_t action, peer, with_signal;
  Place source, destination;
};

// The start of a slot, before its piece.
struct alignas(kCacheLine) Header {
  int64_t message_bytes;  // of all pieces
  int64_t rounds;         // of the longest message that the sender knows of
};

// One run of a program. runner.py declares the same fields.
struct Run {
  const Group* group;
  const Step* steps;
  long num_steps;
  long num_slots, piece_bytes, dtype;
  long round;   // of all runs so far
  long rounds;  // of this run: at first what this rank's messages need, at last what any rank's do
  const char* input;
  const long* input_offsets;  // [inputs + 1] in bytes
  char* output;
  const long* output_offsets;  // [outputs + 1] in bytes
  long failed_step, expected_bytes, arrived_bytes;
};

// One piece of a message.
struct Piece {
  const char* data;
  long bytes, message_bytes;
};

class Interpreter {
 public:
  Interpreter(Run& run, long piece) : run_(run), piece_(piece) {}

  Status steps() {
    for (long i = 0; i < run_.num_steps; i++) {
      const Status status = step(run_.steps[i]);
      if (status != kDone) {
        run_.failed_step = i;
        return status;
      }
    }
    return kDone;
  }

 private:
  Status step(const Step& step) {
    switch (step.action) {
      case kPut:
        write_slot(step.peer, step.destination.index, read(step.source));
        if (step.with_signal) signal(*run_.group, kSignals, step.peer);
        return kDone;
      case kSignal:
        signal(*run_.group, kSignals, step.peer);
        return kDone;
      case kWait:
        return wait(*run_.group, kSignals, step.peer) ? kDone : kTimeout;
      case kCopy:
        if (step.destination.kind == kSlot) {
          write_slot(run_.group->rank, step.destination.index, read(step.source));
          return kDone;
        }
        return deliver(step, [](char* to, const Piece& from) { std::memcpy(to, from.data, from.bytes); });
      default:
        return deliver(step, [this](char* to, const Piece& from) { add(run_.dtype, to, from.data, from.bytes); });
    }
  }

  // Into an output or, for partial sums that travel on, into a slot of this rank.
  template <class Write>
  Status deliver(const Step& step, Write write) {
    const Piece from = read(step.source);
    const Place& to = step.destination;
    char* target;
    if (to.kind == kOutput) {
      const long* offsets = run_.output_offsets + to.index;
      run_.expected_bytes = offsets[1] - offsets[0];
      target = run_.output + offsets[0] + piece_ * run_.piece_bytes;
    } else {
      run_.expected_bytes = read(to).message_bytes;
      target = payload(slot(run_.group->rank, to.index));
    }
    run_.arrived_bytes = from.message_bytes;
    if (run_.arrived_bytes != run_.expected_bytes) return kWrongSize;
    write(target, from);
    return kDone;
  }

  Piece read(const Place& place) {
    if (place.kind == kInput) {
      const long* offsets = run_.input_offsets + place.index;
      const long message_bytes = offsets[1] - offsets[0];
      return {run_.input + offsets[0] + piece_ * run_.piece_bytes, piece_of(message_bytes), message_bytes};
    }
    Header* header = slot(run_.group->rank, place.index);
    run_.rounds = std::max(run_.rounds, static_cast<long>(header->rounds));
    return {payload(header), piece_of(header->message_bytes), static_cast<long>(header->message_bytes)};
  }

  void write_slot(long owner, long index, const Piece& piece) { write(slot(owner, index), piece); }

  void write(Header* header, const Piece& piece) const {
    header->message_bytes = piece.message_bytes;
    header->rounds = run_.rounds;
    std::memcpy(payload(header), piece.data, piece.bytes);
  }

  long piece_of(long message_bytes) const {
    return std::clamp(message_bytes - piece_ * run_.piece_bytes, 0L, run_.piece_bytes);
  }

  Header* slot(long owner, long index) const {
    const long parity = run_.round % 2;
    const long slot_bytes = sizeof(Header) + run_.piece_bytes;
    return reinterpret_cast<Header*>(run_.group->buffer(owner) + (parity * run_.num_slots + index) * slot_bytes);
  }
  static char* payload(Header* header) { return reinterpret_cast<char*>(header + 1); }

  Run& run_;
  long piece_;
};

}  // namespace

extern "C" {

// The first round tells how many there are.
long comm_run(Run* run) {
  Status status = kDone;
  for (long piece = 0; (piece == 0 || piece < run->rounds) && status == kDone; piece++) {
    status = Interpreter(*run, piece).steps();
    run->round++;
  }
  return status;
}
}
