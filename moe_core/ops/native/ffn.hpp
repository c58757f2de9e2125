// What ffn.cpp offers to Python (../ffn/cpp.py) and to the tests.

#pragma once

#include <cstdint>

extern "C" {

// As _Problem in ../ffn/cpp.py. The pointers are the tensors of FFNInputs in ../ffn/inputs.py, in their order.
struct Problem {
  const void *rows, *w1;
  const float* b1;  // a bias may be null
  const void* w2;
  const float* b2;
  const void* w3;  // null unless the experts are gated
  const float* b3;
  const int32_t* ends;
  const int16_t* noise;
  long num_experts, model_dim, hidden_dim, threads, rows_bf16, weights_bf16, packed, activation, least;
  // Of each weight: numbers from one expert, hidden unit and model dim to the next.
  long w1_strides[3], w2_strides[3], w3_strides[3];
  // The same of their gradients. One of the last two is 1, and w3's are w1's.
  long grad_w1_strides[3], grad_w2_strides[3];
  float scale;
};

int request_tiles();
long bf16_product_bytes();
long forward_space(const Problem*);
long backward_space(const Problem*);
void pack_weight(const float* w, void* to, long E, long H, long M, long is_w2, long to_bf16, long threads);
void experts_forward(const Problem*, char* memory, void* out, void* hidden);
void experts_backward(const Problem*, char* memory, const void* grad, const void* hidden, void* grad_rows,
                      void* grad_w1, float* grad_b1, void* grad_w2, float* grad_b2, void* grad_w3, float* grad_b3);
}
