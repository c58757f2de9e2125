// Runs the experts' kernels on a problem from stdin, forward and backward, and writes the results to stdout. A program
// of its own, so that it also runs in an emulator of another CPU.
//
// stdin:  the integers experts, rows, model dim, hidden dim, activation, rows in bf16, weights in bf16, threads, packed;
//         then rows, w1, b1, w2, b2, ends, grad
// stdout: out, and the gradients of rows, w1, w2, b1, b2

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "ffn.hpp"

namespace {

std::vector<std::unique_ptr<void, void (*)(void*)>> held;  // until the end

// Aligned as torch's memory is, and not a byte more: the address sanitizer sees what lies beyond.
char* memory(long bytes) {
  void* start = nullptr;
  if (posix_memalign(&start, 64, bytes)) std::exit(3);
  held.emplace_back(start, std::free);
  return static_cast<char*>(start);
}
char* read(long bytes) {
  char* start = memory(bytes);
  if (static_cast<long>(std::fread(start, 1, bytes, stdin)) != bytes) std::exit(2);
  return start;
}
void write(const void* start, long bytes) { std::fwrite(start, 1, bytes, stdout); }

}  // namespace

int main() {
  const int64_t* n = reinterpret_cast<int64_t*>(read(9 * 8));
  const long E = n[0], N = n[1], M = n[2], H = n[3], weight = n[6] ? 2 : 4, number = n[5] ? 2 : 4;
  Problem p = {};
  p.num_experts = E, p.model_dim = M, p.hidden_dim = H, p.activation = n[4], p.rows_bf16 = n[5], p.weights_bf16 = n[6];
  p.threads = n[7];
  p.rows = read(N * M * number);
  p.w1 = read(E * H * M * weight);
  p.b1 = reinterpret_cast<float*>(read(E * H * 4));
  p.w2 = read(E * H * M * weight);
  p.b2 = reinterpret_cast<float*>(read(E * M * 4));
  p.ends = reinterpret_cast<int32_t*>(read(E * 4));
  const char* grad = read(N * M * number);
  char *out = memory(N * M * number), *hidden = memory(N * H * number);
  if (n[8]) {
    const bool pairs = p.rows_bf16 && bf16_product_bytes() == 2;
    Problem packed = p;
    char *w1 = memory(E * H * M * 4), *w2 = memory(E * H * M * 4);
    pack_weights(static_cast<const float*>(p.w1), static_cast<const float*>(p.w2), w1, w2, E, H, M, p.rows_bf16, p.threads);
    packed.w1 = w1, packed.w2 = w2, packed.packed = 1, packed.weights_bf16 = pairs;
    experts_forward(&packed, memory(forward_space(&packed)), out, nullptr);
    write(out, N * M * number);
  }
  experts_forward(&p, memory(forward_space(&p)), out, hidden);
  write(out, N * M * number);
  char *rows = memory(N * M * number), *w1 = memory(E * H * M * weight), *w2 = memory(E * H * M * weight);
  float *b1 = reinterpret_cast<float*>(memory(E * H * 4)), *b2 = reinterpret_cast<float*>(memory(E * M * 4));
  experts_backward(&p, memory(backward_space(&p)), grad, hidden, rows, w1, w2, b1, b2);
  write(rows, N * M * number);
  write(w1, E * H * M * weight);
  write(w2, E * H * M * weight);
  write(b1, E * H * 4);
  write(b2, E * M * 4);
}
