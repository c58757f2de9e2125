// What ffn.cpp offers to Python (../ffn/cpp.py) and to the tests.

#pragma once

#include <cstdint>

extern "C" {

// As _Problem in ../ffn/cpp.py. The pointers are tensors of MoEFFNInputs in ../ffn/inputs.py; all but the weights are
// contiguous.
struct Problem {
  const void* tokens;
  const float* gates;  // null if all are 1
  const void* w1;
  const float* b1;  // a bias may be null
  const void* w2;
  const float* b2;
  const void* w3;  // null unless the experts are gated
  const float* b3;
  const int64_t* choices;
  const int32_t* ends;
  long num_tokens, top_k, num_experts, model_dim, hidden_dim, hidden_rows, activation, threads;
  long in_bf16;  // tokens, hidden layer and the results' gradient, and the products; otherwise fp32
  long weights_bf16, packed;  // packed: by pack_weight, for the forward pass without a hidden layer
  // Of each weight: numbers from one expert, hidden unit and model dim to the next; the second or the third is 1.
  long w1_strides[3], w2_strides[3], w3_strides[3];
  long seed, least;  // of dropout: ../ffn/dropout.py
  float scale;       // 0: no dropout
};

int request_tiles();
long bf16_product_bytes();
// fp32 weights [E, H, M], H and M multiples of 32, to as many numbers in fp32 or bf16, in the order of products.
void pack_weight(const float* w, void* to, long E, long H, long M, long is_w2, long to_bf16, long threads);
// Bytes of memory that a call works in.
long experts_space(const Problem*, long backward);
// Both return 1 if a choice is out of range. hidden may be null: not kept.
long experts_forward(const Problem*, char* memory, float* out, void* hidden);
// A gradient may be null: not needed. Those of experts without rows are not written. Those of gates are added.
long experts_backward(const Problem*, char* memory, const void* grad, const void* hidden, float* grad_tokens,
                      float* grad_gates, float* grad_w1, float* grad_b1, float* grad_w2, float* grad_b2, float* grad_w3,
                      float* grad_b3);
}
