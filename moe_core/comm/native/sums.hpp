// Sums of two arrays, in the elements' own type as torch.distributed's.

#pragma once

#include <cstdint>
#include <cstring>

namespace comm {

enum Dtype { kFloat32, kFloat64, kBfloat16, kInt32, kInt64 };

inline float to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Rounds to nearest, ties to even.
inline uint16_t to_bfloat16(float value) {
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof wide);
  if (value != value) return 0x7fc0;
  return static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

template <class T>
void add_as(char* to, const char* from, long bytes) {
  T* sums = reinterpret_cast<T*>(to);
  const T* terms = reinterpret_cast<const T*>(from);
  for (long i = 0; i < bytes / static_cast<long>(sizeof(T)); i++) sums[i] += terms[i];
}

inline void add_bfloat16(char* to, const char* from, long bytes) {
  uint16_t* sums = reinterpret_cast<uint16_t*>(to);
  const uint16_t* terms = reinterpret_cast<const uint16_t*>(from);
  for (long i = 0; i < bytes / 2; i++) sums[i] = to_bfloat16(to_float(sums[i]) + to_float(terms[i]));
}

// The integers are unsigned here, where overflow wraps around.
inline void add(long dtype, char* to, const char* from, long bytes) {
  switch (dtype) {
    case kFloat32:
      return add_as<float>(to, from, bytes);
    case kFloat64:
      return add_as<double>(to, from, bytes);
    case kBfloat16:
      return add_bfloat16(to, from, bytes);
    case kInt32:
      return add_as<uint32_t>(to, from, bytes);
    default:
      return add_as<uint64_t>(to, from, bytes);
  }
}

}  // namespace comm
