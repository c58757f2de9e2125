// What ffn.cpp offers to Python (../ffn/cpp.py) and to the tests.

#pragma once

#include <cstdint>

extern "C" {

// As _Problem in ../ffn/cpp.py.
struct Problem {
  const void *rows, *w1, *w2;
  const float *b1, *b2;
  const int32_t* ends;
  const int16_t* noise;
  long num_experts, model_dim, hidden_dim, threads, rows_bf16, weights_bf16, packed, activation, least;
  float scale;
};

int request_tiles();
long bf16_product_bytes();
long forward_space(const Problem*);
long backward_space(const Problem*);
void pack_weights(const float* w1, const float* w2, void* to_w1, void* to_w2, long E, long H, long M, long to_bf16,
                  long threads);
void experts_forward(const Problem*, char* memory, void* out, void* hidden);
void experts_backward(const Problem*, char* memory, const void* grad, const void* hidden, void* grad_rows,
                      void* grad_w1, void* grad_w2, float* grad_b1, float* grad_b2);
}
