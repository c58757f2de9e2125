// Runs the experts' kernels on a problem from stdin, forward and backward, and writes the results to stdout. A program
// of its own, so that it also runs in an emulator of another CPU.
//
// stdin:  the integers experts, rows, model dim, hidden dim, activation, rows in bf16, weights in bf16, threads, packed,
//         gated, layout; then rows, w1, b1, w2, b2, of gated experts w3 and b3, ends, grad. Layout 0: weights [E, H, M];
//         1: w1 and w3 in one tensor [E, 2, H, M], w2 [E, M, H]; 2: w1 and w3 in one tensor [E, M, H, 2], w2 [E, M, H]
// stdout: out, and the gradients of rows, w1, w2, b1, b2, of gated experts w3 and b3; those of weights are [E, M, H] where
//         the weights are

#include <cstdint>
#include <cstdio>

#include "ffn.hpp"
#include "memory.hpp"

namespace {

void write(const void* start, long bytes) { std::fwrite(start, 1, bytes, stdout); }
void set(long* strides, long expert, long unit, long model) {
  strides[0] = expert, strides[1] = unit, strides[2] = model;
}
float* floats(long count) { return reinterpret_cast<float*>(memory(count * 4)); }

}  // namespace

int main() {
  const int64_t* n = reinterpret_cast<int64_t*>(read(11 * 8));
  const long E = n[0], N = n[1], M = n[2], H = n[3], weight = n[6] ? 2 : 4, number = n[5] ? 2 : 4;
  Problem p = {};
  p.num_experts = E, p.model_dim = M, p.hidden_dim = H, p.activation = n[4], p.rows_bf16 = n[5], p.weights_bf16 = n[6];
  p.threads = n[7];
  const bool gated = n[9];
  const long layout = n[10], step = layout ? 2 * H * M : H * M;  // from one expert to the next
  p.rows = read(N * M * number);
  const char* w1 = read(E * step * weight);
  p.w1 = w1;
  p.b1 = reinterpret_cast<float*>(read(E * H * 4));
  p.w2 = read(E * H * M * weight);
  p.b2 = reinterpret_cast<float*>(read(E * M * 4));
  const auto set_first = [&](long* strides) { layout == 2 ? set(strides, step, 2, 2 * H) : set(strides, step, M, 1); };
  const auto set_own = [&](long* strides, bool transposed) {
    transposed ? set(strides, H * M, 1, H) : set(strides, H * M, M, 1);
  };
  set_first(p.w1_strides);
  set_own(p.w2_strides, layout);
  set_own(p.grad_w1_strides, layout == 2);
  set_own(p.grad_w2_strides, layout);
  if (gated) {
    p.w3 = layout ? w1 + (layout == 2 ? 1 : H * M) * weight : read(E * H * M * weight);
    p.b3 = reinterpret_cast<float*>(read(E * H * 4));
    set_first(p.w3_strides);
  }
  p.ends = reinterpret_cast<int32_t*>(read(E * 4));
  const char* grad = read(N * M * number);
  char *out = memory(N * M * number), *hidden = memory((1 + gated) * N * H * number);
  if (n[8]) {
    const bool pairs = p.rows_bf16 && bf16_product_bytes() == 2;
    Problem packed = p;
    const auto pack = [&](const void* from, bool is_w2) -> const void* {
      if (!from) return nullptr;
      char* to = memory(E * H * M * 4);
      pack_weight(static_cast<const float*>(from), to, E, H, M, is_w2, p.rows_bf16, p.threads);
      return to;
    };
    packed.w1 = pack(p.w1, false), packed.w2 = pack(p.w2, true), packed.w3 = pack(p.w3, false);
    packed.packed = 1, packed.weights_bf16 = pairs;
    experts_forward(&packed, memory(forward_space(&packed)), out, nullptr);
    write(out, N * M * number);
  }
  experts_forward(&p, memory(forward_space(&p)), out, hidden);
  write(out, N * M * number);
  const long bytes = E * H * M * weight;
  char *by_rows = memory(N * M * number), *by_w1 = memory(bytes), *by_w2 = memory(bytes);
  char* by_w3 = gated ? memory(bytes) : nullptr;
  float *by_b1 = floats(E * H), *by_b2 = floats(E * M), *by_b3 = gated ? floats(E * H) : nullptr;
  experts_backward(&p, memory(backward_space(&p)), grad, hidden, by_rows, by_w1, by_b1, by_w2, by_b2, by_w3, by_b3);
  write(by_rows, N * M * number);
  write(by_w1, bytes);
  write(by_w2, bytes);
  write(by_b1, E * H * 4);
  write(by_b2, E * M * 4);
  if (!gated) return 0;
  write(by_w3, bytes);
  write(by_b3, E * H * 4);
}
