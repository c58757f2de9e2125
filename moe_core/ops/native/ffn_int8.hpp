// What ffn_int8.cpp offers to Python (../int8_ffn/cpp.py) and to the tests.

#pragma once

#include <cstdint>

extern "C" {

// As _Problem in ../int8_ffn/cpp.py.
struct Int8Problem {
  const void* rows;                                  // [N, M] in fp32 or bf16
  int32_t *w1, *w2;                                  // by pack_int8
  const float *scale1, *sum1, *b1, *scale2, *sum2, *b2;  // [E, H] and [E, M]; b1 and b2 may be null
  const int32_t* ends;                               // [E]
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
