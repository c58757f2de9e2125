// The dispatch plan in one pass over the choices. ../plan/op.py says what is computed.
//
// T tokens, E experts, K top-k, N rows

#include <algorithm>
#include <cstdint>
#include <vector>

extern "C" {

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
