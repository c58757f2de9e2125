// Rows summed into tokens and the gradients of that, in one pass over memory each; rows.py says what is computed.
//
// T tokens, K top-k, N rows, M model dim

#include "vectors.hpp"

namespace {

// Few numbers: waking threads would take longer.
inline long useful_threads(long numbers, long threads) { return numbers < 1 << 15 ? 1 : threads; }

template <class S, class D>
void sum_rows(const S* rows, const int64_t* slots, const bool* kept, const float* gates, D* out, long T, long K, long M,
              long threads) {
#pragma omp parallel for num_threads(useful_threads(T * M, threads))
  for (long t = 0; t < T; t++) {
    for (long j = 0; j < M; j += 16) {
      const long count = std::min(M - j, 16L);
      V sum = broadcast(0.0f);
      for (long c = t * K; c < t * K + K; c++) {
        if (kept && !kept[c]) continue;
        sum = multiply_add(load(rows + slots[c] * M + j, count), broadcast(gates ? gates[c] : 1.0f), sum);
      }
      store(out + t * M + j, sum, count);
    }
  }
}

// The first `used` rows hold the choices; `grad_gates` comes with zeros, for those that were dropped.
template <class S, class D>
void combine_backward(const D* grad, const S* rows, const int64_t* choices, const float* gates, S* grad_rows,
                      float* grad_gates, long N, long used, long K, long M, long threads) {
#pragma omp parallel for num_threads(useful_threads(N * M, threads))
  for (long n = 0; n < N; n++) {
    const long choice = n < used ? choices[n] : -1;
    V product = broadcast(0.0f);
    for (long j = 0; j < M; j += 16) {
      const long count = std::min(M - j, 16L);
      const V g = choice < 0 ? broadcast(0.0f) : load(grad + choice / K * M + j, count);
      if (choice >= 0) product = multiply_add(load(rows + n * M + j, count), g, product);
      store(grad_rows + n * M + j, choice < 0 ? g : g * broadcast(gates[choice]), count);
    }
    if (choice >= 0) grad_gates[choice] = sum_of(product);
  }
}

// run(S(), D()) for the dtypes of rows and of tokens.
template <class Run>
void typed(long rows_bf16, long tokens_bf16, Run run) {
  if (rows_bf16)
    tokens_bf16 ? run(bf16(), bf16()) : run(bf16(), float());
  else
    run(float(), float());
}

}  // namespace

extern "C" {

void rows_sum(const void* rows, const int64_t* slots, const bool* kept, const float* gates, void* out, long T, long K,
              long M, long threads, long rows_bf16, long out_bf16) {
  typed(rows_bf16, out_bf16, [&](auto s, auto d) {
    using S = decltype(s);
    using D = decltype(d);
    sum_rows(static_cast<const S*>(rows), slots, kept, gates, static_cast<D*>(out), T, K, M, threads);
  });
}

void rows_combine_backward(const void* grad, const void* rows, const int64_t* choices, const float* gates,
                           void* grad_rows, float* grad_gates, long N, long used, long K, long M, long threads,
                           long rows_bf16, long grad_bf16) {
  typed(rows_bf16, grad_bf16, [&](auto s, auto d) {
    using S = decltype(s);
    using D = decltype(d);
    combine_backward(static_cast<const D*>(grad), static_cast<const S*>(rows), choices, gates,
                     static_cast<S*>(grad_rows), grad_gates, N, used, K, M, threads);
  });
}
}
