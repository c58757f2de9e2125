// Runs window attention on a problem from stdin, forward and backward, and writes the results to stdout. A program of its
// own, so that it also runs in an emulator of another CPU and with the sanitizers.
//
// stdin:  the integers windows, masks (0: none), tokens, heads, channels, cosine, threads, in bf16; then qkv, bias, mask,
//         scale, grad. With bf16 qkv and grad are in it.
// stdout: out and the gradients of qkv, bias and scale

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "memory.hpp"

extern "C" {
long attention_space(long, long, long);
void attention_forward(float*, const void*, const float*, const float*, const float*, void*, float*, long, long, long, long,
                       long, long, long, long);
void attention_backward(float*, const void*, const void*, const float*, const float*, const float*, const void*,
                        const float*, void*, float*, float*, float*, long, long, long, long, long, long, long, long);
}

namespace {

float* floats(long count) { return reinterpret_cast<float*>(memory(count * 4)); }
const float* read_floats(long count) { return reinterpret_cast<float*>(read(count * 4)); }
void write(const void* start, long bytes) { std::fwrite(start, 1, bytes, stdout); }

}  // namespace

int main() {
  const int64_t* n = reinterpret_cast<int64_t*>(read(8 * 8));
  const long B = n[0], W = std::max<long>(n[1], 1), N = n[2], h = n[3], D = n[4], threads = n[6], bytes = n[7] ? 2 : 4;
  const long rows = B * N * h * D * bytes;
  const char* qkv = read(3 * rows);
  const float *bias = read_floats(h * N * N), *mask = n[1] ? read_floats(W * N * N) : nullptr, *scale = read_floats(h);
  const char* grad = read(rows);
  float* space = floats(threads * attention_space(N, D, n[7]));
  char *out = memory(rows), *grad_qkv = memory(3 * rows);
  float *lse = floats(B * h * N), *parts = floats((threads + h - 1) * (N * N + 1));
  float *grad_bias = floats(h * N * N), *grad_scale = floats(h);
  attention_forward(space, qkv, bias, mask, scale, out, lse, B, W, N, h, D, n[5], threads, n[7]);
  attention_backward(space, grad, qkv, bias, mask, scale, out, lse, grad_qkv, parts, grad_bias, grad_scale, B, W, N, h, D,
                     n[5], threads, n[7]);
  write(out, rows), write(grad_qkv, 3 * rows), write(grad_bias, h * N * N * 4), write(grad_scale, h * 4);
}
