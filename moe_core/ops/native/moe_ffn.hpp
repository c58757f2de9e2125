// What moe_ffn.cpp offers to Python (../ffn/fused.py).

#pragma once

#include <cstdint>

extern "C" {

// As _Problem in ../ffn/fused.py. The pointers are contiguous tensors, those of MoEFFNInputs in ../ffn/inputs.py.
struct MoEProblem {
  const void* tokens;
  const float* gates;  // null if all are 1
  const float *w1, *b1, *w2, *b2, *w3, *b3;  // a bias may be null; w3 is null unless the experts are gated
  const int64_t* choices;
  const int32_t* ends;
  long num_tokens, top_k, num_experts, model_dim, hidden_dim, hidden_rows, activation, threads;
  long in_bf16;  // tokens, hidden layer and the results' gradient, and the products; otherwise fp32
};

// Bytes of memory that a call works in.
long moe_space(const MoEProblem*, long backward);
// Both return 1 if a choice is out of range.
long moe_forward(const MoEProblem*, char* memory, float* out, void* hidden);
// A gradient may be null: not needed. Those of experts without rows are not written.
long moe_backward(const MoEProblem*, char* memory, const void* grad, const void* hidden, float* grad_tokens,
                  float* grad_gates, float* grad_w1, float* grad_b1, float* grad_w2, float* grad_b2, float* grad_w3,
                  float* grad_b3);
}
