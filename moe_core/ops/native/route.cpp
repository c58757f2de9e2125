// Routing from logits in one pass: probabilities, choices, gate values and the sums of the loss, and the gradients of
// that. ../route/cpp.py says what is computed.
//
// T tokens, E experts, K top-k

#include <cfloat>
#include <cmath>
#include <vector>

#include "activations.hpp"
#include "product.hpp"

namespace {

// Tokens of a partial sum. They do not depend on the number of threads, so neither do the results.
inline long chunk_of(long T) { return std::max(256L, T / 32 / 16 * 16); }

// The auxiliary loss: its number in ../backend.py.
enum Loss { kNone, kGshard, kLoadImportance, kTutel };

struct Routing {
  int64_t* ids;
  float *gates, *scores, *probs;  // scores: of the chosen experts, or null
  long E, K;
  bool sigmoid, normalize;
  long loss;
  float noise_std, loss_noise_std;

  bool compares() const { return loss >= kLoadImportance; }  // logits with a threshold
};

// The largest of the keys [E, 16] of each of 16 tokens, and its expert; of equal keys the lowest expert.
V largest(const float* keys, long E, int32_t* experts) {
  V top = broadcast(-INFINITY);
  Ints at = {};
  for (int32_t e = 0; e < E; e++) {
    const V key = load(keys + 16 * e);
    EACH_PIECE at.p[i] = key.p[i] > top.p[i] ? IntLanes{} + e : at.p[i];
    top = larger(key, top);
  }
  store(experts, at);
  return top;
}

// Memory for 16 tokens.
struct Space {
  struct alignas(64) Row {
    float of_tokens[16];
  };
  long E, K;
  std::vector<Row> rows;
  Space(long E, long K) : E((E + 15) / 16 * 16), K(K), rows(6 * this->E + 3 * K) {}
  float* logits() { return rows.data()->of_tokens; }  // and then probabilities
  float* keys() { return logits() + 16 * E; }
  float* sums() { return logits() + 32 * E; }
  float* noise() { return logits() + 48 * E; }
  float* clean() { return logits() + 64 * E; }  // logits without noise
  float* loads() { return logits() + 80 * E; }
  float* gates() { return logits() + 96 * E; }
  float* scores() { return gates() + 16 * K; }
  int32_t* experts() { return reinterpret_cast<int32_t*>(scores() + 16 * K); }
};

// to [E, 16] = from [n, E], and 0 for the other tokens
void across(float* to, const float* from, long n, long E) {
  Packed<float, kB>(reinterpret_cast<int32_t*>(to), n, E).pack<kAlongK>(from, E);
}

void add(float* sum, V term, V is_token) { store(sum, multiply_add(term, is_token, load(sum))); }

// probs [E, 16] = the softmax of the logits of 16 tokens
void softmax(const float* logits, float* probs, long E) {
  V top = broadcast(-INFINITY), total = broadcast(0.0f);
  for (long e = 0; e < E; e++) top = larger(load(logits + 16 * e), top);
  for (long e = 0; e < E; e++) {
    const V p = exp_of_negative(load(logits + 16 * e) - top);
    total = total + p;
    store(probs + 16 * e, p);
  }
  const V scale = broadcast(1.0f) / total;
  for (long e = 0; e < E; e++) store(probs + 16 * e, load(probs + 16 * e) * scale);
}

// How far a logit (Tutel: a probability) is above the threshold, in standard deviations. Beyond 14 all is as at 14.
INLINE V margin(const Routing& r, V logit, V prob, V threshold) {
  const V z = ((r.loss == kTutel ? prob : logit) - threshold) / broadcast(r.loss_noise_std);
  return smaller(broadcast(14.0f), larger(broadcast(-14.0f), z));  // what is no number stays
}

// The probabilities of space.clean(), and the expected loads, of tokens whose last choice has the logit `threshold`.
void add_importance_and_load(const Routing& r, Space& space, V threshold, V is_token) {
  const V zero = broadcast(0.0f), one = broadcast(1.0f);
  float *logits = space.clean(), *probs = space.keys();
  softmax(logits, probs, r.E);
  for (long e = 0; e < r.E; e++) {
    const V z = load(logits + 16 * e), p = load(probs + 16 * e);
    V of_load = zero;
    if (r.loss_noise_std > 0)
      of_load = Normal(margin(r, z, p, threshold)).below;
    else  // a step
      EACH_PIECE of_load.p[i] = (r.loss == kTutel ? p : z).p[i] >= threshold.p[i] ? one.p[i] : zero.p[i];
    add(space.sums() + 16 * e, p, is_token);
    add(space.loads() + 16 * e, of_load, is_token);
  }
}

// The choices of `count` of 16 tokens from t on, and their probabilities, and the sums of the loss, which are added to
// space.sums() and space.loads(). `first` [E] counts the first choices.
void choose(const Routing& r, Space& space, long t, long count, float* first) {
  const V zero = broadcast(0.0f), one = broadcast(1.0f), infinity = broadcast(INFINITY), lowest = broadcast(-FLT_MAX);
  float *logits = space.logits(), *keys = space.keys(), *gates = space.gates(), *scores = space.scores();
  // NaN counts as infinity. -infinity marks an expert that is already chosen, so no key may be that.
  for (long e = 0; e < r.E; e++) {
    V z = load(logits + 16 * e);
    EACH_PIECE z.p[i] = z.p[i] == z.p[i] ? z.p[i] : infinity.p[i];
    store(keys + 16 * e, larger(z, lowest));
  }
  V top, last;
  for (long k = 0; k < r.K; k++) {
    int32_t* experts = space.experts() + 16 * k;
    const V next = largest(keys, r.E, experts);
    if (k == 0) top = next;
    for (long i = 0; i < 16; i++) {
      gates[16 * k + i] = logits[16 * experts[i] + i];
      keys[16 * experts[i] + i] = -INFINITY;
    }
    last = load(gates + 16 * k);
  }

  V total = zero;
  for (long e = 0; e < r.E; e++) {
    const V p = exp_of_negative(load(logits + 16 * e) - top);
    total = total + p;
    store(logits + 16 * e, p);
  }
  const V scale = one / total, is_token = first_or(one, count, zero);
  for (long e = 0; e < r.E; e += 16) {
    Words columns[16];
    for (long j = 0; j < 16; j++) {
      const V p = load(logits + 16 * (e + j)) * scale;
      std::memcpy(columns + j, &p, sizeof p);
      if (!r.compares()) add(space.sums() + 16 * (e + j), p, is_token);
    }
    transpose(columns);
    for (long i = 0; i < count; i++) {
      V row;
      std::memcpy(&row, columns + i, sizeof row);
      store(r.probs + (t + i) * r.E + e, row, std::min(16L, r.E - e));
    }
  }

  if (r.compares()) add_importance_and_load(r, space, last, is_token);

  V sum = zero;
  for (long k = 0; k < r.K; k++) {
    V z = load(gates + 16 * k), gate;
    if (r.sigmoid) {
      z = larger(lowest, z);
      const V small = exp_of_negative(zero - absolute(z)), unit = one / (one + small);
      gate = above(z, 0.0f, one, small) * unit;
      store(scores + 16 * k, gate);
      // Scores of logits that are all far below 0 have lost their quotients.
      if (r.normalize) gate = above(z, 0.0f, one, exp_of_negative(z - smaller(top, zero))) * unit;
    } else {
      gate = exp_of_negative(z - top) * scale;
    }
    store(gates + 16 * k, gate);
    sum = sum + gate;
  }
  for (long k = 0; k < r.K && r.normalize; k++) store(gates + 16 * k, load(gates + 16 * k) / sum);
  for (long i = 0; i < count; i++) {
    first[space.experts()[i]] += 1;
    for (long k = 0; k < r.K; k++) {
      r.ids[(t + i) * r.K + k] = space.experts()[16 * k + i];
      r.gates[(t + i) * r.K + k] = gates[16 * k + i];
      if (r.scores) r.scores[(t + i) * r.K + k] = scores[16 * k + i];
    }
  }
}

// The gradients [E] of the logits of token t. `by_sums` [E], `by_probs` [T, E], `by_gates` [T, K]: those of the results.
void logits_backward(const Routing& r, const float* by_gates, const float* by_probs, const float* by_sums, long t,
                     float* to) {
  const float *p = r.probs + t * r.E, *gates = r.gates + t * r.K, *scores = r.scores ? r.scores + t * r.K : gates;
  const auto by_prob = [&](long e) {
    const V sums = by_sums ? load(by_sums + e, r.E - e) : broadcast(0.0f);
    return by_probs ? sums + load(by_probs + t * r.E + e, r.E - e) : sums;
  };
  V product = broadcast(0.0f);
  for (long e = 0; e < r.E; e += 16) product = multiply_add(load(p + e, r.E - e), by_prob(e), product);
  float mean = 0, total = sum_of(product);
  const auto by_choice = [&](long k) { return by_gates ? gates[k] * (by_gates[t * r.K + k] - mean) : 0; };
  for (long k = 0; k < r.K && by_gates && r.normalize; k++) mean += gates[k] * by_gates[t * r.K + k];
  for (long k = 0; k < r.K && !r.sigmoid; k++) total += by_choice(k);
  for (long e = 0; e < r.E; e += 16)
    store(to + e, load(p + e, r.E - e) * (by_prob(e) - broadcast(total)), std::min(16L, r.E - e));
  for (long k = 0; k < r.K; k++) to[r.ids[t * r.K + k]] += by_choice(k) * (r.sigmoid ? 1 - scores[k] : 1);
}

// Adds to `to` [T, E] the gradients by importance and load, by_sums [2, E], of `count` of 16 tokens from t on.
void losses_backward(const Routing& r, Space& space, const float* logits, const float* noise, const float* by_sums, long t,
                     long count, float* to) {
  float thresholds[16] = {}, slopes[16];
  const auto last = [&](long i) { return (t + i) * r.E + r.ids[(t + i + 1) * r.K - 1]; };
  for (long i = 0; i < count; i++)
    thresholds[i] = logits[last(i)] + (noise ? r.noise_std * noise[last(i)] : 0);
  const V threshold = load(thresholds), factor = broadcast(0.398942280f / r.loss_noise_std);
  float *clean = space.clean(), *probs = space.keys();
  across(clean, logits + t * r.E, count, r.E);
  softmax(clean, probs, r.E);

  V product = broadcast(0.0f), total = product;
  const auto by_prob = [&](long e, V slope) { return r.loss == kTutel ? slope + broadcast(by_sums[e]) : broadcast(by_sums[e]); };
  for (long e = 0; e < r.E; e++) {
    const V p = load(probs + 16 * e);
    V slope = broadcast(0.0f);
    if (r.loss_noise_std > 0)
      slope = Normal(margin(r, load(clean + 16 * e), p, threshold)).density * factor * broadcast(by_sums[r.E + e]);
    total = total + slope;
    product = multiply_add(p, by_prob(e, slope), product);
    store(clean + 16 * e, slope);
  }
  store(slopes, total);
  for (long e = 0; e < r.E; e += 16) {
    Words columns[16] = {};
    for (long j = 0; j < 16; j++) {
      const V slope = load(clean + 16 * (e + j)), p = load(probs + 16 * (e + j));
      if (e + j == r.E) break;
      V grad = p * (by_prob(e + j, slope) - product);
      if (r.loss == kLoadImportance) grad = grad + slope;
      std::memcpy(columns + j, &grad, sizeof grad);
    }
    transpose(columns);
    for (long i = 0; i < count; i++) {
      V row;
      std::memcpy(&row, columns + i, sizeof row);
      float* place = to + (t + i) * r.E + e;
      store(place, load(place, r.E - e) + row, std::min(16L, r.E - e));
    }
  }
  for (long i = 0; i < count; i++) to[last(i)] -= slopes[i];
}

}  // namespace

extern "C" {

// loss_noise_std: the standard deviation of the noise in the loss
void route_forward(const float* logits, const float* noise, int64_t* ids, float* gates, float* scores, float* probs,
                   float* sums, long T, long E, long K, long normalize, long sigmoid, long threads, long loss,
                   double noise_std, double loss_noise_std) {
  const Routing r = {ids,  gates, scores, probs, E, K, sigmoid != 0, normalize != 0,
                     loss, static_cast<float>(noise_std), static_cast<float>(loss_noise_std)};
  const long chunk = chunk_of(T), chunks = (T + chunk - 1) / chunk;
  std::vector<float> partial(chunks * 2 * E);
#pragma omp parallel num_threads(std::max(1L, std::min(threads, chunks)))
  {
    Space space(E, K);
    float *both = space.logits(), *drawn = space.noise();
#pragma omp for schedule(static)
    for (long c = 0; c < chunks; c++) {
      float* of_chunk = partial.data() + c * 2 * E;
      std::fill(space.sums(), space.sums() + 16 * E, 0.0f);
      std::fill(space.loads(), space.loads() + 16 * E, 0.0f);
      for (long t = c * chunk; t < std::min(T, (c + 1) * chunk); t += 16) {
        const long n = std::min(16L, T - t);
        across(both, logits + t * E, n, E);
        if (r.compares()) std::memcpy(space.clean(), both, 16 * E * sizeof(float));
        if (noise) {
          across(drawn, noise + t * E, n, E);
          // Two loops, since the product is rounded before the sum, as in torch.
          for (long i = 0; i < 16 * E; i += 16) store(drawn + i, load(drawn + i) * broadcast(r.noise_std));
          for (long i = 0; i < 16 * E; i += 16) store(both + i, load(both + i) + load(drawn + i));
        }
        choose(r, space, t, n, of_chunk + E);
      }
      for (long e = 0; e < E; e++) of_chunk[e] = sum_of(load(space.sums() + 16 * e));
      for (long e = 0; e < E && r.compares(); e++) of_chunk[E + e] = sum_of(load(space.loads() + 16 * e));
    }
  }
  sum_rows(partial.data(), chunks, 2 * E, sums, false);
}

// by_sums: null without a loss
void route_backward(const int64_t* ids, const float* gates, const float* scores, const float* probs, const float* logits,
                    const float* noise, const float* by_gates, const float* by_probs, const float* by_sums, float* grad,
                    long T, long E, long K, long normalize, long sigmoid, long threads, long loss, double noise_std,
                    double loss_noise_std) {
  const Routing r = {const_cast<int64_t*>(ids), const_cast<float*>(gates), const_cast<float*>(scores),
                     const_cast<float*>(probs), E, K, sigmoid != 0, normalize != 0,
                     by_sums ? loss : 0L, static_cast<float>(noise_std), static_cast<float>(loss_noise_std)};
#pragma omp parallel num_threads(T * E < 1 << 15 ? 1 : threads)
  {
    Space space(E, K);
#pragma omp for schedule(static)
    for (long start = 0; start < T; start += 16) {
      const long count = std::min(16L, T - start);
      for (long t = start; t < start + count; t++)
        logits_backward(r, by_gates, by_probs, r.loss == kGshard ? by_sums : nullptr, t, grad + t * E);
      if (r.compares()) losses_backward(r, space, logits, noise, by_sums, start, count, grad);
    }
  }
}
}
