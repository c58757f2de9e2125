// Runs the experts' kernel from tokens to tokens on a problem from stdin, forward and backward, and writes the results to
// stdout. A program of its own, so that it also runs in an emulator of another CPU and with the sanitizers.
//
// stdin:  the integers tokens, top-k, experts, model dim, hidden dim, rows of the hidden layer, activation, threads, rows
//         of the plan, with gates, with biases, gated, in bf16; then tokens, gates, w1, b1, w2, b2, w3, b3, choices, ends,
//         grad. With bf16 tokens and grad are in it.
// stdout: out, and the gradients of what there is of tokens, gates, w1, b1, w2, b2, w3, b3

#include <algorithm>

#include "memory.hpp"
#include "moe_ffn.hpp"

namespace {

float* numbers(long count) { return reinterpret_cast<float*>(memory(count * 4)); }
float* read_numbers(long count) { return reinterpret_cast<float*>(read(count * 4)); }
void write(const float* start, long count) { std::fwrite(start, 4, count, stdout); }

}  // namespace

int main() {
  const int64_t* n = reinterpret_cast<int64_t*>(read(13 * 8));
  const long T = n[0], K = n[1], E = n[2], M = n[3], H = n[4], N = n[8];
  const bool with_gates = n[9], biased = n[10], gated = n[11];
  const long bytes = n[12] ? 2 : 4;
  MoEProblem p = {};
  p.num_tokens = T, p.top_k = K, p.num_experts = E, p.model_dim = M, p.hidden_dim = H, p.hidden_rows = n[5];
  p.activation = n[6], p.threads = n[7], p.in_bf16 = n[12];
  const long sizes[] = {
      T * M, with_gates ? T * K : -1, E * H * M, biased ? E * H : -1, E * H * M, biased ? E * M : -1,
      gated ? E * H * M : -1, gated && biased ? E * H : -1};  // -1: it is not there
  const float** const inputs[] = {nullptr, &p.gates, &p.w1, &p.b1, &p.w2, &p.b2, &p.w3, &p.b3};
  p.tokens = read(T * M * bytes);
  for (int i = 1; i < 8; i++) *inputs[i] = sizes[i] < 0 ? nullptr : read_numbers(sizes[i]);
  p.choices = reinterpret_cast<int64_t*>(read(N * 8));
  p.ends = reinterpret_cast<int32_t*>(read(E * 4));
  const char* grad = read(T * M * bytes);

  float *out = numbers(T * M), *again = numbers(T * M);
  char* hidden = memory((1 + gated) * p.hidden_rows * H * bytes);
  if (moe_forward(&p, memory(moe_space(&p, 0)), again, nullptr)) return 4;
  if (moe_forward(&p, memory(moe_space(&p, 0)), out, hidden)) return 4;
  if (!std::equal(out, out + T * M, again)) return 5;
  write(out, T * M);

  float* to[8];
  for (int i = 0; i < 8; i++) {
    to[i] = sizes[i] < 0 ? nullptr : numbers(sizes[i]);
    if (i > 0 && to[i]) std::fill_n(to[i], sizes[i], 0.0f);  // what belongs to no row is left to Python
  }
  if (moe_backward(&p, memory(moe_space(&p, 1)), grad, hidden, to[0], to[1], to[2], to[3], to[4], to[5], to[6], to[7]))
    return 4;
  for (int i = 0; i < 8; i++)
    if (to[i]) write(to[i], sizes[i]);
  return 0;
}
