// Routing, its backward pass and the dispatch plan, in one pass over memory each; routing.py says what is computed.
//
// Tokens are computed in groups of 16, side by side: a group's part of a [T, E] is read as [E, 16], and a vector holds
// the same expert's numbers of all 16.
//
// T tokens, E experts, K top-k, N rows, n tokens of a group

#include <limits>
#include <vector>

#include "product_x86.hpp"

namespace {

constexpr long kBlock = 256;  // tokens that one thread adds up: the same bits whatever the number of threads
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// 1. Groups of tokens

inline __m512 all(float value) { return _mm512_set1_ps(value); }
inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }

// [n, E] -> [E, 16], 0 where there is no token.
void read_group(const float* tokens, float* group, long E, long n) {
  __m512i v[16];
  for (long e = 0; e < E; e += 16) {
    for (long i = 0; i < 16; i++)
      v[i] = i < n ? _mm512_castps_si512(load(tokens + i * E + e, first(E - e))) : _mm512_setzero_si512();
    transpose(v);
    for (long j = 0; j < std::min(E - e, 16L); j++) _mm512_storeu_si512(group + (e + j) * 16, v[j]);
  }
}

// [E, 16] -> [n, E].
void write_group(const float* group, float* tokens, long E, long n) {
  __m512i v[16];
  for (long e = 0; e < E; e += 16) {
    for (long j = 0; j < 16; j++)
      v[j] = e + j < E ? _mm512_loadu_si512(group + (e + j) * 16) : _mm512_setzero_si512();
    transpose(v);
    for (long i = 0; i < n; i++) store(tokens + i * E + e, first(E - e), _mm512_castsi512_ps(v[i]));
  }
}

// Where in [E, 16] each token's number of its own expert lies.
inline __m512i cells(__m512i experts) {
  const __m512i token = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_add_epi32(_mm512_slli_epi32(experts, 4), token);
}
inline __m512 at(const float* group, __m512i experts) { return _mm512_i32gather_ps(cells(experts), group, 4); }
inline void add_at(float* group, __m512i experts, __m512 v) {
  _mm512_i32scatter_ps(group, cells(experts), _mm512_add_ps(at(group, experts), v), 4);
}

// A column of [n, K].
inline __m512i column(const int64_t* ids, long K, long n) {
  int32_t v[16] = {};
  for (long i = 0; i < n; i++) v[i] = static_cast<int32_t>(ids[i * K]);
  return _mm512_loadu_si512(v);
}
inline __m512 column(const float* numbers, long K, long n) {
  float v[16] = {};
  for (long i = 0; i < n; i++) v[i] = numbers[i * K];
  return load(v);
}
inline void set_column(int64_t* ids, long K, long n, __m512i column) {
  int32_t v[16];
  _mm512_storeu_si512(v, column);
  for (long i = 0; i < n; i++) ids[i * K] = v[i];
}
inline void set_column(float* numbers, long K, long n, __m512 column) {
  float v[16];
  store(v, column);
  for (long i = 0; i < n; i++) numbers[i * K] = v[i];
}

// 2. Routing

void softmax(const float* logits, float* probs, long E) {
  __m512 largest = all(-kInfinity), total = all(0);
  for (long e = 0; e < E; e++) largest = _mm512_max_ps(largest, load(logits + e * 16));
  for (long e = 0; e < E; e++) {
    const __m512 p = exp_of_negative(_mm512_sub_ps(load(logits + e * 16), largest));
    total = _mm512_add_ps(total, p);
    store(probs + e * 16, p);
  }
  for (long e = 0; e < E; e++) store(probs + e * 16, _mm512_div_ps(load(probs + e * 16), total));
}

// The gradient of the probabilities -> that of the logits.
void softmax_backward(const float* probs, float* grad, long E) {
  __m512 mean = all(0);
  for (long e = 0; e < E; e++) mean = _mm512_fmadd_ps(load(probs + e * 16), load(grad + e * 16), mean);
  for (long e = 0; e < E; e++)
    store(grad + e * 16, _mm512_mul_ps(load(probs + e * 16), _mm512_sub_ps(load(grad + e * 16), mean)));
}

// A token's experts in the order of falling logits, NaN before all, and of rising numbers where logits are equal:
// whatever they are, no expert comes twice.
struct Choice {
  __m512 logit = all(kInfinity);
  __m512i expert = _mm512_set1_epi32(-1);

  Choice next(const float* logits, long E) const {
    Choice best;
    __mmask16 found = 0;
    for (long e = 0; e < E; e++) {
      const __m512i number = _mm512_set1_epi32(static_cast<int>(e));
      __m512 v = load(logits + e * 16);
      v = _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), all(kInfinity));
      const __mmask16 equal = _mm512_cmp_ps_mask(v, logit, _CMP_EQ_OQ) & _mm512_cmpgt_epi32_mask(number, expert);
      const __mmask16 left = equal | _mm512_cmp_ps_mask(v, logit, _CMP_LT_OQ);
      const __mmask16 better = left & (~found | _mm512_cmp_ps_mask(v, best.logit, _CMP_GT_OQ));
      best.logit = _mm512_mask_mov_ps(best.logit, better, v);
      best.expert = _mm512_mask_mov_epi32(best.expert, better, number);
      found |= better;
    }
    return best;
  }
};

enum Loss { kNone, kGshard, kLoadImportance, kLoadImportanceTutel };

// Of one group, all [E, 16]. The clean ones are the noisy ones where no others are given.
struct Group {
  float *noisy, *probs, *clean, *clean_probs;

  static constexpr long size = 4 * 16;  // for each expert
  Group(float* memory, long E, bool with_clean)
      : noisy(memory), probs(memory + E * 16), clean(noisy), clean_probs(probs) {
    if (with_clean) clean = probs + E * 16, clean_probs = clean + E * 16;
  }
};

struct Router {
  long E, K;
  bool normalize;
  Loss loss;
  float noise_std;

  bool measures_load() const { return loss == kLoadImportance || loss == kLoadImportanceTutel; }

  // Gate values and ids [n, K]; what the loss needs is added to `sums` [2, E, 16].
  void forward(const Group& group, int64_t* ids, float* gates, float* sums, long n) const {
    Choice choice;
    __m512 total = all(0);
    for (long k = 0; k < K; k++) {
      choice = choice.next(group.noisy, E);
      const __m512 p = at(group.probs, choice.expert);
      total = _mm512_add_ps(total, p);
      set_column(ids + k, K, n, choice.expert);
      set_column(gates + k, K, n, p);
      if (k == 0 && loss == kGshard) add_at(sums + E * 16, choice.expert, _mm512_maskz_mov_ps(first(n), all(1)));
    }
    if (normalize)
      for (long k = 0; k < K; k++) set_column(gates + k, K, n, _mm512_div_ps(column(gates + k, K, n), total));
    if (loss == kNone) return;
    for (long e = 0; e < E; e++) add(sums + e * 16, load(group.clean_probs + e * 16), first(n));
    if (measures_load()) add_load(group, choice.expert, sums + E * 16, n);
  }

  // `grad` and `grad_clean` [E, 16] come with the gradient of the probabilities and with 0, and leave with those of the
  // logits.
  void backward(const Group& group, const int64_t* ids, const float* grad_gates, const float* grad_sums, float* grad,
                float* grad_clean, long n) const {
    if (grad_gates) add_gradient_of_gates(group, ids, grad_gates, grad, n);
    if (loss == kGshard)
      for (long e = 0; e < E; e++) add(grad + e * 16, all(grad_sums[e]));
    softmax_backward(group.probs, grad, E);
    if (!measures_load()) return;
    const __m512i last = column(ids + K - 1, K, n);
    for (long e = 0; e < E; e++) store(grad_clean + e * 16, all(grad_sums[e]));
    if (loss == kLoadImportanceTutel) add_gradient_of_load(group, last, grad_sums + E, grad_clean, grad);
    softmax_backward(group.clean_probs, grad_clean, E);
    if (loss == kLoadImportance) add_gradient_of_load(group, last, grad_sums + E, grad_clean, grad);
  }

 private:
  static void add(float* sum, __m512 v, __mmask16 mask = 0xffff) { store(sum, mask, _mm512_add_ps(load(sum), v)); }

  // What is compared with the noisy logit of a token's last choice.
  const float* compared(const Group& group) const {
    return loss == kLoadImportanceTutel ? group.clean_probs : group.clean;
  }

  void add_load(const Group& group, __m512i last, float* sums, long n) const {
    const __m512 threshold = at(group.noisy, last);
    for (long e = 0; e < E; e++) {
      const __m512 margin = _mm512_sub_ps(load(compared(group) + e * 16), threshold);
      const __mmask16 reached = _mm512_cmp_ps_mask(margin, all(0), _CMP_GE_OQ);
      add(sums + e * 16, noise_std > 0 ? likelihood(margin) : _mm512_maskz_mov_ps(reached, all(1)), first(n));
    }
  }
  __m512 likelihood(__m512 margin) const {
    const __m512 z = _mm512_div_ps(margin, all(noise_std));
    return Normal(_mm512_min_ps(all(14), _mm512_max_ps(all(-14), z))).below;  // 0 and 1 from there on; NaN stays
  }

  // To the gradient of what is compared, and to that of the noisy logits.
  void add_gradient_of_load(const Group& group, __m512i last, const float* grad_load, float* grad_compared,
                            float* grad) const {
    if (!(noise_std > 0)) return;
    const __m512 threshold = at(group.noisy, last);
    __m512 total = all(0);
    for (long e = 0; e < E; e++) {
      const __m512 z = _mm512_div_ps(_mm512_sub_ps(load(compared(group) + e * 16), threshold), all(noise_std));
      const __m512 density = exp_of_negative(_mm512_mul_ps(_mm512_mul_ps(z, z), all(-0.5f)));
      const __m512 slope = _mm512_mul_ps(density, all(0.398942280f / noise_std * grad_load[e]));
      add(grad_compared + e * 16, slope);
      total = _mm512_sub_ps(total, slope);
    }
    add_at(grad, last, total);
  }

  // gate_k = p_k / s with s = sum_j p_j: dp_k = (dgate_k - sum_j dgate_j p_j / s) / s
  void add_gradient_of_gates(const Group& group, const int64_t* ids, const float* grad_gates, float* grad,
                             long n) const {
    __m512 total = all(0), mean = all(0);
    for (long k = 0; k < K; k++) {
      const __m512 p = at(group.probs, column(ids + k, K, n));
      total = _mm512_add_ps(total, p);
      mean = _mm512_fmadd_ps(column(grad_gates + k, K, n), p, mean);
    }
    mean = _mm512_div_ps(mean, total);
    for (long k = 0; k < K; k++) {
      const __m512 v = column(grad_gates + k, K, n);
      add_at(grad, column(ids + k, K, n), normalize ? _mm512_div_ps(_mm512_sub_ps(v, mean), total) : v);
    }
  }
};

// use(t, n, memory) for each group of tokens [t, t + n), with this thread's memory, which is 0 to begin with; after a
// block's groups done(block, memory).
template <class Use, class Done>
void for_groups(long T, long E, long memory_size, long threads, Use use, Done done) {
  const long useful = std::clamp(T * E >> 14, 1L, threads);  // few numbers: waking threads would take longer
#pragma omp parallel num_threads(useful)
  {
    const Mode<float> mode;
    std::vector<float> memory(memory_size);
#pragma omp for schedule(static)
    for (long start = 0; start < T; start += kBlock) {
      const long end = std::min(T, start + kBlock);
      for (long t = start; t < end; t += 16) use(t, std::min(end - t, 16L), memory.data());
      done(start / kBlock, memory.data());
    }
  }
}

}  // namespace

extern "C" {

// `clean` may be null, where the logits are those of `noisy`.
void route_forward(const float* noisy, const float* clean, int64_t* ids, float* gates, float* probs, float* sums,
                   long T, long E, long K, long normalize, long loss, long threads, float noise_std) {
  const Router router{E, K, normalize != 0, static_cast<Loss>(loss), noise_std};
  const long blocks = (T + kBlock - 1) / kBlock;
  std::vector<float> of_blocks(blocks * 2 * E);
  auto route = [&](long t, long n, float* memory) {
    const Group group(memory + 2 * E * 16, E, clean);
    read_group(noisy + t * E, group.noisy, E, n);
    softmax(group.noisy, group.probs, E);
    write_group(group.probs, probs + t * E, E, n);
    if (clean) {
      read_group(clean + t * E, group.clean, E, n);
      softmax(group.clean, group.clean_probs, E);
    }
    router.forward(group, ids + t * K, gates + t * K, memory, n);
  };
  auto sum = [&](long block, float* memory) {
    for (long i = 0; i < 2 * E; i++) of_blocks[block * 2 * E + i] = _mm512_reduce_add_ps(load(memory + i * 16));
    std::fill(memory, memory + 2 * E * 16, 0.0f);
  };
  for_groups(T, E, (2 * 16 + Group::size) * E, threads, route, sum);
  std::fill(sums, sums + 2 * E, 0.0f);
  for (long i = 0; i < blocks * 2 * E; i++) sums[i % (2 * E)] += of_blocks[i];
}

// grad_gates and grad_probs may be null, grad_sums without a loss; grad_clean is null where `clean` is.
void route_backward(const float* noisy, const float* clean, const int64_t* ids, const float* probs,
                    const float* grad_gates, const float* grad_probs, const float* grad_sums, float* grad_noisy,
                    float* grad_clean, long T, long E, long K, long normalize, long loss, long threads,
                    float noise_std) {
  const Router router{E, K, normalize != 0, static_cast<Loss>(loss), noise_std};
  auto differentiate = [&](long t, long n, float* memory) {
    float *grad = memory, *of_clean = memory + E * 16;
    const Group group(memory + 2 * E * 16, E, clean);
    read_group(noisy + t * E, group.noisy, E, n);
    read_group(probs + t * E, group.probs, E, n);
    if (clean) {
      read_group(clean + t * E, group.clean, E, n);
      softmax(group.clean, group.clean_probs, E);
    }
    std::fill(memory, memory + 2 * E * 16, 0.0f);
    if (grad_probs) read_group(grad_probs + t * E, grad, E, n);
    router.backward(group, ids + t * K, grad_gates ? grad_gates + t * K : nullptr, grad_sums, grad, of_clean, n);
    if (clean) write_group(of_clean, grad_clean + t * E, E, n);
    for (long i = 0; !clean && i < E * 16; i++) grad[i] += of_clean[i];
    write_group(grad, grad_noisy + t * E, E, n);
  };
  for_groups(T, E, (2 * 16 + Group::size) * E, threads, differentiate, [](long, float*) {});
}

// 3. The dispatch plan: places are counted in the order of precedence. `order` (null: 0, 1, ...) are the tokens in it
// [K, T], or [T] with a stride of 0; `limits` [E] (null, with `kept`: nothing can drop) is each expert's capacity.
// Returns 1 if an id is no expert's, or more than N choices are kept.
long make_plan(const int64_t* ids, const int64_t* order, const int64_t* limits, int64_t* choices, int32_t* ends,
               int64_t* slots, bool* kept, int64_t* counts, long T, long K, long E, long N, long order_stride) {
  std::fill(counts, counts + E, 0);
  for (long c = 0; c < T * K; c++) {
    if (ids[c] < 0 || ids[c] >= E) return 1;
    counts[ids[c]]++;
  }
  std::vector<long> next(E), stop(E);  // of each expert's rows
  long end = 0;
  for (long e = 0; e < E; e++) {
    next[e] = end;
    end += limits ? std::min(counts[e], limits[e]) : counts[e];
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
