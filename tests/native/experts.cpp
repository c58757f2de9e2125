// Runs the experts' kernel on a problem from stdin, forward and backward, and writes the results to stdout. Another number
// of threads must give the same bits. A program of its own, so that it also runs in an emulator of another CPU and with
// the sanitizers.
//
// stdin:  the integers tokens, top-k, experts, model dim, hidden dim, rows of the hidden layer, activation, threads, rows
//         of the plan, with gates, with biases, gated, in bf16, weights in bf16, transposed, packed, seed and least noise
//         of dropout; its scale in fp64 (0: none); then tokens, gates, w1, b1, w2, b2, w3, b3, choices, ends, grad. With
//         bf16 tokens and grad are in it.
// stdout: out, with packed weights once more, and the gradients of what there is of tokens, gates, w1, b1, w2, b2, w3, b3

#include <algorithm>
#include <cstring>

#include "ffn.hpp"
#include "memory.hpp"

namespace {

float* numbers(long count) { return reinterpret_cast<float*>(memory(count * 4)); }
void write(const float* start, long count) { std::fwrite(start, 4, count, stdout); }

// The results of a forward pass [T, M]; hidden may be null.
float* forward(const Problem& p, char* hidden) {
  float* out = numbers(p.num_tokens * p.model_dim);
  if (experts_forward(&p, memory(experts_space(&p, 0)), out, hidden)) std::exit(4);
  return out;
}

struct Gradients {
  float* to[8];

  Gradients(const Problem& p, const char* grad, const char* hidden, const long* sizes) {
    for (int i = 0; i < 8; i++) {
      to[i] = sizes[i] < 0 ? nullptr : numbers(sizes[i]);
      if (i > 0 && to[i]) std::fill_n(to[i], sizes[i], 0.0f);  // what belongs to no row is left to Python
    }
    if (experts_backward(&p, memory(experts_space(&p, 1)), grad, hidden, to[0], to[1], to[2], to[3], to[4], to[5], to[6],
                         to[7]))
      std::exit(4);
  }
};

bool same(const float* a, const float* b, long count) { return std::memcmp(a, b, count * 4) == 0; }

}  // namespace

int main() {
  const int64_t* n = reinterpret_cast<int64_t*>(read(18 * 8));
  const long T = n[0], K = n[1], E = n[2], M = n[3], H = n[4], N = n[8], bytes = n[12] ? 2 : 4, weight_bytes = n[13] ? 2 : 4;
  const bool with_gates = n[9], biased = n[10], gated = n[11], transposed = n[14], packed = n[15];
  Problem p = {};
  p.num_tokens = T, p.top_k = K, p.num_experts = E, p.model_dim = M, p.hidden_dim = H, p.hidden_rows = n[5];
  p.activation = n[6], p.threads = n[7], p.in_bf16 = n[12], p.weights_bf16 = n[13], p.seed = n[16], p.least = n[17];
  p.scale = static_cast<float>(*reinterpret_cast<double*>(read(8)));
  for (long* strides : {p.w1_strides, p.w2_strides, p.w3_strides})
    strides[0] = H * M, strides[1] = transposed ? 1 : M, strides[2] = transposed ? H : 1;
  const long sizes[] = {
      T * M, with_gates ? T * K : -1, E * H * M, biased ? E * H : -1, E * H * M, biased ? E * M : -1,
      gated ? E * H * M : -1, gated && biased ? E * H : -1};  // -1: it is not there
  const void* inputs[8];
  for (int i = 0; i < 8; i++) {
    const bool matrix = i == 2 || i == 4 || i == 6;
    inputs[i] = sizes[i] < 0 ? nullptr : read(sizes[i] * (i == 0 ? bytes : matrix ? weight_bytes : 4));
  }
  const auto fp32 = [&](int i) { return static_cast<const float*>(inputs[i]); };
  p.tokens = inputs[0], p.gates = fp32(1), p.w1 = inputs[2], p.b1 = fp32(3), p.w2 = inputs[4], p.b2 = fp32(5);
  p.w3 = inputs[6], p.b3 = fp32(7);
  p.choices = reinterpret_cast<int64_t*>(read(N * 8));
  p.ends = reinterpret_cast<int32_t*>(read(E * 4));
  const char* grad = read(T * M * bytes);
  const long hidden_bytes = (1 + gated) * p.hidden_rows * H * bytes;
  Problem other = p;
  other.threads = p.threads == 1 ? 2 : 1;

  char *hidden = memory(hidden_bytes), *other_hidden = memory(hidden_bytes);
  const float* out = forward(p, hidden);
  for (const float* again : {forward(p, nullptr), forward(other, other_hidden)})
    if (!same(out, again, T * M)) return 5;
  write(out, T * M);

  if (packed) {
    Problem by_packs = p;
    for (const void** w : {&by_packs.w1, &by_packs.w2, &by_packs.w3}) {
      if (!*w) continue;
      char* to = memory(E * H * M * (p.in_bf16 ? bf16_product_bytes() : 4));
      pack_weight(static_cast<const float*>(*w), to, E, H, M, w == &by_packs.w2, p.in_bf16, p.threads);
      *w = to;
    }
    by_packs.packed = 1;
    const float* found = forward(by_packs, nullptr);
    by_packs.threads = other.threads;
    if (!same(found, forward(by_packs, nullptr), T * M)) return 5;
    write(found, T * M);
  }

  const Gradients to(p, grad, hidden, sizes), again(other, grad, other_hidden, sizes);
  for (int i = 0; i < 8; i++) {
    if (!to.to[i]) continue;
    if (!same(to.to[i], again.to[i], sizes[i])) return 6;
    write(to.to[i], sizes[i]);
  }
  return 0;
}
