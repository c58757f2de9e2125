// What ffn_int8.cpp offers to Python (../int8_ffn/cpp.py) and to the tests.

#pragma once

#include <cstdint>

extern "C" {

// As _Linear and _Problem in ../int8_ffn/cpp.py.
struct Int8Linear {
  int32_t* weight;             // by pack_int8
  const float *scales, *sums;  // [E, outputs]
  const float* bias;           // [E, outputs], or null
};
struct Int8Problem {
  const void* rows;  // [N, M] in fp32 or bf16
  Int8Linear linear1, linear2, linear3;  // [H, M], [M, H], [H, M]; the third one is null where experts are not gated
  const int32_t* ends;  // [E]
  long num_experts, model_dim, hidden_dim, threads, rows_bf16, activation;
};

// Words of 32 bits that an expert's weight [outputs, inputs] takes when packed.
long int8_weight_words(long outputs, long inputs);
// weight [E, outputs, inputs]
void pack_int8(const int8_t* weight, int32_t* to, long num_experts, long outputs, long inputs, long threads);
// Rows of an expert that a thread takes at once.
long int8_row_step(const Int8Problem*);
// Bytes of memory that a call works in.
long int8_space(const Int8Problem*);
void int8_experts(const Int8Problem*, char* memory, void* out);
}
