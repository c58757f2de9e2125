// Window attention, softmax(scale q k^T + bias + mask) v for each window and head, and its gradients.
// swinv2_moe/models/cpp_window_attention.py calls this and says what is computed. It is compiled with the experts' kernels,
// whose products it uses.
//
// A thread goes through the windows of one head after the other, so that the bias and its gradient stay in its caches.
// Nothing of [N, N] is kept for the backward pass, which computes the probabilities again from their log-sum-exp.
//
// N tokens of a window, h heads, D channels of a head

#include <array>
#include <cmath>
#include <numeric>

#include "product.hpp"

namespace {

struct Sizes {
  long windows, masks, tokens, heads, channels, cosine, threads;

  long token_stride() const { return 3 * heads * channels; }  // from one token's q, k and v to the next
  long padded_channels() const { return (channels + 15) / 16 * 16; }
  long padded_tokens() const { return (tokens + 15) / 16 * 16; }
};

// Memory of one thread, in rows of padded size: unit vectors of queries and keys [N, D], their inverse lengths [N], the
// scores, then the probabilities, and their gradients [N, N], the gradients of unit vectors [N, D], and two operands of a
// product. P: the type of products.
template <class P>
struct Room {
  float *q, *k, *inverse_q, *inverse_k, *scores, *slopes, *gradients;
  int32_t *a, *b;

  static std::array<long, 9> words(const Sizes& s) {
    const long rows = s.tokens * s.padded_channels(), square = s.tokens * s.padded_tokens();
    const long a = std::max(Packed<P, kA>::words(s.tokens, s.channels), Packed<P, kA>::words(s.tokens, s.tokens));
    const long b = std::max(Packed<P, kB>::words(s.tokens, s.channels), Packed<P, kB>::words(s.channels, s.tokens));
    return {rows, rows, s.padded_tokens(), s.padded_tokens(), square, square, rows, a, b};
  }
  static long total(const Sizes& s) {
    const auto parts = words(s);
    return std::accumulate(parts.begin(), parts.end(), 0L);
  }
  Room(float* place, const Sizes& s) {
    float** const floats[] = {&q, &k, &inverse_q, &inverse_k, &scores, &slopes, &gradients};
    const auto parts = words(s);  // multiples of 64 bytes
    for (int i = 0; i < 7; place += parts[i++]) *floats[i] = place;
    a = reinterpret_cast<int32_t*>(place);
    b = a + parts[7];
  }
};

// One divided by the lengths of the rows of q or k; 1 without cosine.
template <class T>
void inverse_lengths(const T* rows, const Sizes& s, float* inverse) {
  for (long i = 0; i < s.tokens; i++, rows += s.token_stride()) {
    inverse[i] = 1.0f;
    if (!s.cosine) continue;
    V squares = broadcast(0.0f);
    for (long d = 0; d < s.channels; d += 16) {
      const V v = load(rows + d, s.channels - d);
      squares = multiply_add(v, v, squares);
    }
    inverse[i] = 1.0f / std::sqrt(std::max(sum_of(squares), 1e-24f));
  }
}

// to [N, D] = the rows, each times its number and `factor`.
template <class T>
void scaled_rows(const T* rows, const Sizes& s, const float* numbers, float factor, float* to) {
  for (long i = 0; i < s.tokens; i++, rows += s.token_stride(), to += s.padded_channels())
    for (long d = 0; d < s.channels; d += 16)
      store(to + d, load(rows + d, s.channels - d) * broadcast(factor * numbers[i]));
}

// The products of q and k as they are, which rounds nothing in their own type. Lengths come afterwards, with the bias.
template <class T, class P>
void multiply_queries(const Room<P>& room, const Sizes& s, const T* qkv) {
  const T* keys = qkv + s.heads * s.channels;
  const auto a = Packed<P, kA>(room.a, s.tokens, s.channels).template pack<kAlongK>(qkv, s.token_stride());
  const auto b = Packed<P, kB>(room.b, s.tokens, s.channels).template pack<kAlongK>(keys, s.token_stride());
  product_into(a, b, Ahead(), room.scores, s.padded_tokens(), false, false);
  inverse_lengths(qkv, s, room.inverse_q);
  inverse_lengths(keys, s, room.inverse_k);
}

// What the scores of a row are made of.
struct Row {
  float* products;
  const float *lengths, *bias, *mask;  // inverse lengths of the keys; mask may be null
  V factor;

  template <class P>
  Row(const Room<P>& room, const Sizes& s, long i, float scale, const float* bias, const float* mask)
      : products(room.scores + i * s.padded_tokens()), lengths(room.inverse_k), bias(bias + i * s.tokens),
        mask(mask ? mask + i * s.tokens : nullptr), factor(broadcast(scale * room.inverse_q[i])) {}

  // 16 scores from j on; past the end as small as possible.
  INLINE V scores(long j, long count) const {
    V v = multiply_add(load(products + j) * load(lengths + j), factor, load(bias + j, count));
    if (mask) v = v + load(mask + j, count);
    if (count < 16) v = first_or(v, count, broadcast(-INFINITY));
    return v;
  }
};

// One window and head.
template <class T, class P>
void attend(const Room<P>& room, const Sizes& s, const T* qkv, const float* bias, const float* mask, float scale, T* out,
            float* lse) {
  const long N = s.tokens, D = s.channels;
  multiply_queries(room, s, qkv);
  float* inverse_sums = room.inverse_q;  // row i has used its number there when it writes this one
  for (long i = 0; i < N; i++) {
    const Row row(room, s, i, scale, bias, mask);
    V most = broadcast(-INFINITY), sum = broadcast(0.0f);
    for (long j = 0; j < N; j += 16) {
      const V v = row.scores(j, N - j);
      most = larger(most, v);
      store(row.products + j, v);
    }
    const float top = reduced(most, [](float a, float b) { return std::max(a, b); });
    for (long j = 0; j < N; j += 16) {
      const V v = exp_of_negative(load(row.products + j) - broadcast(top));
      sum = sum + v;
      store(row.products + j, v);
    }
    const float total = sum_of(sum);
    lse[i] = top + std::log(total);
    inverse_sums[i] = 1.0f / total;
  }
  const auto a = Packed<P, kA>(room.a, N, N).template pack<kAlongK>(room.scores, s.padded_tokens());
  const auto b = Packed<P, kB>(room.b, D, N).template pack<kAcrossK>(qkv + 2 * s.heads * D, s.token_stride());
  product(a, b, Ahead(), [](long, long) {}, [&](long i, long j, long count, V v) {
    store(out + i * s.heads * D + j, v * broadcast(inverse_sums[i]), count);
  });
}

// to = the gradient of rows from that of their unit vectors, in `room.gradients`, and `scale`. Returns the sum of the inner
// products of unit vectors and gradients: that of a scale, if the rows are queries.
template <class T, class P>
float through_lengths(const Room<P>& room, const Sizes& s, const float* units, const float* inverse, float scale, T* to) {
  float all = 0.0f;
  for (long i = 0; i < s.tokens; i++, to += s.token_stride()) {
    const float *g = room.gradients + i * s.padded_channels(), *u = units + i * s.padded_channels();
    V along = broadcast(0.0f);
    for (long d = 0; d < s.channels; d += 16) along = multiply_add(load(g + d, s.channels - d), load(u + d), along);
    const float part = sum_of(along);
    all += part;
    const V minus = broadcast(s.cosine ? -part : 0.0f), factor = broadcast(scale * inverse[i]);
    for (long d = 0; d < s.channels; d += 16)
      store(to + d, multiply_add(load(u + d), minus, load(g + d)) * factor, s.channels - d);
  }
  return all;
}

// One window and head; the gradient of the bias is added to, and that of the scale returned.
template <class T, class P>
float differentiate(const Room<P>& room, const Sizes& s, const T* grad, const T* qkv, const float* bias, const float* mask,
                    float scale, const T* out, const float* lse, T* grad_qkv, float* grad_bias) {
  const long N = s.tokens, D = s.channels, M = s.heads * D, stride = s.padded_tokens();
  multiply_queries(room, s, qkv);
  scaled_rows(qkv, s, room.inverse_q, scale, room.q);
  scaled_rows(qkv + M, s, room.inverse_k, 1.0f, room.k);
  const auto a = Packed<P, kA>(room.a, N, D).template pack<kAlongK>(grad, M);
  const auto b = Packed<P, kB>(room.b, N, D).template pack<kAlongK>(qkv + 2 * M, s.token_stride());
  product_into(a, b, Ahead(), room.slopes, stride, false, false);
  for (long i = 0; i < N; i++) {
    V product = broadcast(0.0f);
    for (long d = 0; d < D; d += 16)
      product = multiply_add(load(grad + i * M + d, D - d), load(out + i * M + d, D - d), product);
    const V mean = broadcast(sum_of(product)), total = broadcast(lse[i]);
    const Row row(room, s, i, scale, bias, mask);
    float *slope = room.slopes + i * stride, *sum = grad_bias + i * N;
    for (long j = 0; j < N; j += 16) {
      const V p = exp_of_negative(row.scores(j, N - j) - total);
      const V v = p * (load(slope + j) - mean);
      store(row.products + j, p);
      store(slope + j, v);
      store(sum + j, load(sum + j, N - j) + v, N - j);
    }
  }
  const auto square = Packed<P, kA>(room.a, N, N);
  const auto rows = Packed<P, kB>(room.b, D, N);
  const auto soon = [](long, long) {};
  square.template pack<kAcrossK>(room.scores, stride);
  rows.template pack<kAcrossK>(grad, M);
  product(square, rows, Ahead(), soon,
          [&](long j, long d, long count, V v) { store(grad_qkv + 2 * M + j * s.token_stride() + d, v, count); });
  square.template pack<kAcrossK>(room.slopes, stride);
  rows.template pack<kAcrossK>(room.q, s.padded_channels());
  product_into(square, rows, Ahead(), room.gradients, s.padded_channels(), false, false);
  through_lengths(room, s, room.k, room.inverse_k, 1.0f, grad_qkv + M);
  square.template pack<kAlongK>(room.slopes, stride);
  rows.template pack<kAcrossK>(room.k, s.padded_channels());
  product_into(square, rows, Ahead(), room.gradients, s.padded_channels(), false, false);
  scaled_rows(qkv, s, room.inverse_q, 1.0f, room.q);
  return through_lengths(room, s, room.q, room.inverse_q, scale, grad_qkv);
}

// run(head, window) for this thread's part of all pairs, which follow each other.
template <class Run>
void share(const Sizes& s, long thread, Run run) {
  const long pairs = s.heads * s.windows;
  for (long i = thread * pairs / s.threads; i < (thread + 1) * pairs / s.threads; i++) run(i / s.windows, i % s.windows);
}

template <class T>
void forward(const Sizes& s, float* space, const T* qkv, const float* bias, const float* mask, const float* scale, T* out,
             float* lse) {
  using P = ProductType<T>;
  const long N = s.tokens, D = s.channels, words = Room<P>::total(s);
#pragma omp parallel for num_threads(s.threads) schedule(static, 1)
  for (long thread = 0; thread < s.threads; thread++) {
    const Mode<P> mode;
    const Room<P> room(space + thread * words, s);
    share(s, thread, [&](long head, long window) {
      attend(room, s, qkv + window * N * s.token_stride() + head * D, bias + head * N * N,
             mask ? mask + window % s.masks * N * N : nullptr, scale[head], out + (window * N * s.heads + head) * D,
             lse + (window * s.heads + head) * N);
    });
  }
}

// `parts` [threads + h - 1, N N + 1]: the gradients of bias and scale by thread and head; a later pair has a later part.
template <class T>
void backward(const Sizes& s, float* space, const T* grad, const T* qkv, const float* bias, const float* mask,
              const float* scale, const T* out, const float* lse, T* grad_qkv, float* parts, float* grad_bias,
              float* grad_scale) {
  using P = ProductType<T>;
  const long N = s.tokens, D = s.channels, words = Room<P>::total(s), square = N * N;
#pragma omp parallel for num_threads(s.threads) schedule(static, 1)
  for (long thread = 0; thread < s.threads; thread++) {
    const Mode<P> mode;
    const Room<P> room(space + thread * words, s);
    long before = -1;
    share(s, thread, [&](long head, long window) {
      float* part = parts + (thread + head) * (square + 1);
      if (head != before) std::fill_n(part, square + 1, 0.0f);
      before = head;
      const long token = (window * N * s.heads + head) * D, triple = window * N * s.token_stride() + head * D;
      part[square] += differentiate(room, s, grad + token, qkv + triple, bias + head * square,
                                    mask ? mask + window % s.masks * square : nullptr, scale[head], out + token,
                                    lse + (window * s.heads + head) * N, grad_qkv + triple, part);
    });
  }
  const long pairs = s.heads * s.windows;
#pragma omp parallel for num_threads(s.threads)
  for (long head = 0; head < s.heads; head++) {
    std::fill_n(grad_bias + head * square, square, 0.0f);
    grad_scale[head] = 0.0f;
    for (long thread = 0; thread < s.threads; thread++) {
      const long first = std::max(thread * pairs / s.threads, head * s.windows);
      if (first >= std::min((thread + 1) * pairs / s.threads, (head + 1) * s.windows)) continue;
      const float* part = parts + (thread + head) * (square + 1);
      for (long i = 0; i < square; i++) grad_bias[head * square + i] += part[i];
      grad_scale[head] += part[square];
    }
  }
}

}  // namespace

extern "C" {

// Numbers of 4 bytes that a thread needs.
long attention_space(long tokens, long channels, long bf16_rows) {
  const Sizes s = {0, 0, tokens, 0, channels, 0, 0};
  return bf16_rows ? Room<ProductType<bf16>>::total(s) : Room<float>::total(s);
}

void attention_forward(float* space, const void* qkv, const float* bias, const float* mask, const float* scale, void* out,
                       float* lse, long windows, long masks, long tokens, long heads, long channels, long cosine,
                       long threads, long bf16_rows) {
  const Sizes s = {windows, masks, tokens, heads, channels, cosine, threads};
  const auto run = [&](auto type) {
    using T = decltype(type);
    forward(s, space, static_cast<const T*>(qkv), bias, mask, scale, static_cast<T*>(out), lse);
  };
  bf16_rows ? run(bf16()) : run(float());
}

void attention_backward(float* space, const void* grad, const void* qkv, const float* bias, const float* mask,
                        const float* scale, const void* out, const float* lse, void* grad_qkv, float* parts,
                        float* grad_bias, float* grad_scale, long windows, long masks, long tokens, long heads,
                        long channels, long cosine, long threads, long bf16_rows) {
  const Sizes s = {windows, masks, tokens, heads, channels, cosine, threads};
  const auto run = [&](auto type) {
    using T = decltype(type);
    backward(s, space, static_cast<const T*>(grad), static_cast<const T*>(qkv), bias, mask, scale,
             static_cast<const T*>(out), lse, static_cast<T*>(grad_qkv), parts, grad_bias, grad_scale);
  };
  bf16_rows ? run(bf16()) : run(float());
}
}
