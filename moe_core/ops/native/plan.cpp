// The dispatch plan in one pass over the choices. ../plan/op.py says what is computed.
//
// T tokens, E experts, K top-k, N rows

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// A number for which a larger `x` has a smaller one. What is no number counts as the largest, as in torch.
uint32_t key_of(float x) {
  if (x != x) return 0;
  if (x == 0) x = 0;  // not -0
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits >> 31 ? bits : ~bits & 0x7fffffff;
}

}  // namespace

extern "C" {

// The order [rows, T] of the numbers [rows, T] of each row: descending, equal ones by their index. A radix sort in three
// passes.
void descending(const float* numbers, int64_t* order, long rows, long T) {
  constexpr int kBits = 11;
  struct Entry {
    uint32_t key, index;
  };
  std::vector<Entry> from(T), to(T);
  for (long row = 0; row < rows; row++) {
    for (long i = 0; i < T; i++) from[i] = {key_of(numbers[row * T + i]), static_cast<uint32_t>(i)};
    for (int shift = 0; shift < 32; shift += kBits) {
      std::array<uint32_t, 1 << kBits> next = {};
      const auto digit = [&](Entry entry) { return entry.key >> shift & (next.size() - 1); };
      for (const Entry entry : from) next[digit(entry)]++;
      uint32_t end = 0;
      for (uint32_t& start : next) {
        const uint32_t count = start;
        start = end, end += count;
      }
      for (const Entry entry : from) to[next[digit(entry)]++] = entry;
      std::swap(from, to);
    }
    for (long i = 0; i < T; i++) order[row * T + i] = from[i].index;
  }
}

// Places are counted in the order of precedence. `order` (null: 0, 1, ...) are the tokens in it
// [K, T], or [T] with a stride of 0. Each expert keeps at most `limit` choices; without `kept` (null) it keeps all.
// Returns 1 if an id is no expert's, or more than N choices are kept.
long make_plan(const int64_t* ids, const int64_t* order, int64_t* choices, int32_t* ends, int64_t* slots,
               bool* kept, int64_t* counts, long T, long K, long E, long N, long order_stride, long limit) {
  std::fill(counts, counts + E, 0);
  for (long c = 0; c < T * K; c++) {
    if (ids[c] < 0 || ids[c] >= E) return 1;
    counts[ids[c]]++;
  }
  std::vector<long> next(E), stop(E);  // of each expert's rows
  long end = 0;
  for (long e = 0; e < E; e++) {
    next[e] = end;
    end += std::min<int64_t>(counts[e], limit);
    stop[e] = end;
    ends[e] = static_cast<int32_t>(end);
  }
  if (end > N) return 1;
  for (long k = 0; k < K; k++) {
    for (long i = 0; i < T; i++) {
      const long choice = (order ? order[k * order_stride + i] : i) * K + k, e = ids[choice];
      const bool fits = next[e] < stop[e];
      const long row = fits ? next[e]++ : 0;
      slots[choice] = row;
      if (fits) choices[row] = choice;
      if (kept) kept[choice] = fits;
    }
  }
  std::fill(choices + end, choices + N, 0);
  return 0;
}
}
