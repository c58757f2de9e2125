// Runs routing on a problem from stdin, forward and backward, and writes the results to stdout. A program of its own, so
// that it also runs in an emulator of another CPU.
//
// stdin:  the integers tokens, experts, top-k, normalize, sigmoid, threads, has noise, loss, eighths of the loss's
//         noise; then logits, noise, and the gradients of gates, probs and sums
// stdout: ids, gates, probs, sums and the gradient of the logits

#include <cstdint>
#include <cstdio>

#include "memory.hpp"

extern "C" {
void route_forward(const float*, const float*, int64_t*, float*, float*, float*, float*, long, long, long, long, long, long,
                   long, double, double);
void route_backward(const int64_t*, const float*, const float*, const float*, const float*, const float*, const float*,
                    const float*, const float*, float*, long, long, long, long, long, long, long, double, double);
}

namespace {

float* floats(long count) { return reinterpret_cast<float*>(memory(count * 4)); }
const float* read_floats(long count) { return reinterpret_cast<float*>(read(count * 4)); }
void write(const void* start, long bytes) { std::fwrite(start, 1, bytes, stdout); }

}  // namespace

int main() {
  const int64_t* n = reinterpret_cast<int64_t*>(read(9 * 8));
  const long T = n[0], E = n[1], K = n[2];
  const float *logits = read_floats(T * E), *noise = read_floats(T * E), *by_gates = read_floats(T * K);
  const float *by_probs = read_floats(T * E), *by_sums = read_floats(2 * E);
  int64_t* ids = reinterpret_cast<int64_t*>(memory(T * K * 8));
  float *gates = floats(T * K), *probs = floats(T * E), *sums = floats(2 * E), *grad = floats(T * E);
  float* scores = n[3] && n[4] ? floats(T * K) : nullptr;
  if (!n[6]) noise = nullptr;
  route_forward(logits, noise, ids, gates, scores, probs, sums, T, E, K, n[3], n[4], n[5], n[7], 1.0, n[8] / 8.0);
  route_backward(ids, gates, scores, probs, logits, noise, by_gates, by_probs, by_sums, grad, T, E, K, n[3], n[4], n[5],
                 n[7], 1.0, n[8] / 8.0);
  write(ids, T * K * 8), write(gates, T * K * 4), write(probs, T * E * 4), write(sums, 2 * E * 4);
  write(grad, T * E * 4);
}
