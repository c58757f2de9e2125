// Runs the experts' kernels in int8 on a problem from stdin and writes the result to stdout. A program of its own, so
// that it also runs in an emulator of another CPU.
//
// stdin:  the integers experts, rows, model dim, hidden dim, activation, rows in bf16, threads, gated; then rows, and for
//         w1, w2 and, of gated experts, w3 each the int8 weight [outputs, inputs], scales, sums and biases; then ends
// stdout: out

#include <cstdio>

#include "ffn_int8.hpp"
#include "memory.hpp"

namespace {

float* read_floats(long count) { return reinterpret_cast<float*>(read(4 * count)); }
Int8Linear read_linear(long experts, long outputs, long inputs) {
  Int8Linear linear = {};
  const int8_t* weight = reinterpret_cast<int8_t*>(read(experts * outputs * inputs));
  linear.weight = reinterpret_cast<int32_t*>(memory(4 * experts * int8_weight_words(outputs, inputs)));
  pack_int8(weight, linear.weight, experts, outputs, inputs, 2);
  linear.scales = read_floats(experts * outputs);
  linear.sums = read_floats(experts * outputs);
  linear.bias = read_floats(experts * outputs);
  return linear;
}

}  // namespace

int main() {
  const int64_t* n = reinterpret_cast<int64_t*>(read(8 * 8));
  const long E = n[0], N = n[1], M = n[2], H = n[3], number = n[5] ? 2 : 4;
  Int8Problem p = {};
  p.num_experts = E, p.model_dim = M, p.hidden_dim = H, p.activation = n[4], p.rows_bf16 = n[5], p.threads = n[6];
  p.rows = read(N * M * number);
  p.linear1 = read_linear(E, H, M);
  p.linear2 = read_linear(E, M, H);
  if (n[7]) p.linear3 = read_linear(E, H, M);
  p.ends = reinterpret_cast<int32_t*>(read(E * 4));
  char* out = memory(N * M * number);
  int8_experts(&p, memory(int8_space(&p)), out);
  std::fwrite(out, 1, N * M * number, stdout);
}
