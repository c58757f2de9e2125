// Vectors of 16 fp32 numbers, and of 16 words of 32 bits, on any CPU that GCC or Clang has vectors for.
//
// A vector is one to four registers of the CPU, by their width. What a set of instructions does better than plain
// vector arithmetic is here too: AVX-512, AVX-512 bf16, NEON bf16.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kPieces = 16 / kLanes;

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordLanes __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfLanes __attribute__((vector_size(2 * kLanes)));

struct bf16 {
  uint16_t bits;
};
struct V {
  Lanes p[kPieces];
};
struct Words {
  WordLanes p[kPieces];
};
struct Ints {
  IntLanes p[kPieces];
};

#define EACH_PIECE _Pragma("GCC unroll 4") for (int i = 0; i < kPieces; i++)
#define INLINE __attribute__((always_inline)) inline

// 1. Arithmetic

INLINE V broadcast(float x) {
  V v;
  EACH_PIECE v.p[i] = x - Lanes{};  // not x + 0, which is not -0 for -0
  return v;
}
INLINE V operator+(V a, V b) {
  EACH_PIECE a.p[i] += b.p[i];
  return a;
}
INLINE V operator-(V a, V b) {
  EACH_PIECE a.p[i] -= b.p[i];
  return a;
}
INLINE V operator*(V a, V b) {
  EACH_PIECE a.p[i] *= b.p[i];
  return a;
}
INLINE V operator/(V a, V b) {
  EACH_PIECE a.p[i] /= b.p[i];
  return a;
}
// a b + c, in one rounding where the CPU has such an instruction
INLINE V multiply_add(V a, V b, V c) {
  EACH_PIECE c.p[i] = a.p[i] * b.p[i] + c.p[i];
  return c;
}
// The polynomial of these coefficients in x, that of the highest power first.
template <class... Coefficients>
INLINE V polynomial(V x, float first, Coefficients... others) {
  V sum = broadcast(first);
  ((sum = multiply_add(sum, x, broadcast(others))), ...);
  return sum;
}
// For each number: z > limit ? yes : no. A z that is not a number takes `no`.
INLINE V above(V z, float limit, V yes, V no) {
  EACH_PIECE yes.p[i] = z.p[i] > limit ? yes.p[i] : no.p[i];
  return yes;
}
INLINE V absolute(V z) {
  EACH_PIECE z.p[i] = (Lanes)((WordLanes)z.p[i] & 0x7fffffffu);
  return z;
}
INLINE V smaller(V a, V b) {
  EACH_PIECE a.p[i] = a.p[i] < b.p[i] ? a.p[i] : b.p[i];
  return a;
}
INLINE V larger(V a, V b) {
  EACH_PIECE a.p[i] = a.p[i] > b.p[i] ? a.p[i] : b.p[i];
  return a;
}
template <class Reduce>
INLINE float reduced(V v, Reduce reduce) {
  float numbers[16];
  std::memcpy(numbers, &v, sizeof v);
#pragma GCC unroll 4
  for (int half = 8; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) numbers[i] = reduce(numbers[i], numbers[i + half]);
  return numbers[0];
}
// The first `count` numbers of v, the others from `rest`.
INLINE V first_or(V v, long count, V rest) {
  std::memcpy(&rest, &v, count * sizeof(float));
  return rest;
}
INLINE float sum_of(V v) {
  return reduced(v, [](float a, float b) { return a + b; });
}
INLINE V rough_reciprocal(V x) {  // relative error 2^-14
#if defined(__AVX512F__)
  return {(Lanes)_mm512_rcp14_ps(x.p[0])};
#else
  return broadcast(1.0f) / x;
#endif
}
INLINE V reciprocal(V x) {
  const V y = rough_reciprocal(x);
  return kLanes == 16 ? y * (broadcast(2.0f) - x * y) : y;
}
// 2^x, with a relative error of 1e-4
INLINE V rough_exp2(V x) {
#if defined(__AVX512F__)
  const V r = {(Lanes)_mm512_reduce_ps(x.p[0], _MM_FROUND_TO_NEG_INF)};  // x - floor(x)
  const V y = polynomial(r, 0.0780248281f, 0.226066738f, 0.695833658f, 0.999925224f);
  return {(Lanes)_mm512_scalef_ps(y.p[0], x.p[0])};
#else
  const V shift = broadcast(12582912.0f), low = larger(x, broadcast(-126.0f)), scaled = low + shift;  // as below
  V y = polynomial(low - (scaled - shift), 0.0551717746f, 0.242611372f, 0.69326097f, 0.999928027f);
  EACH_PIECE y.p[i] = (Lanes)((WordLanes)y.p[i] + ((WordLanes)scaled.p[i] << 23));
  return above(x, 126.0f, broadcast(__builtin_inff()), y);
#endif
}

// exp(x) for x <= 0; below -87 it is 0, as numbers below 1e-38 are elsewhere here.
INLINE V exp_of_negative(V x) {
  const V shift = broadcast(12582912.0f), scaled = x * broadcast(1.44269504f) + shift;  // 1.5 * 2^23: rounds to an integer
  const V n = scaled - shift;
  V r = multiply_add(n, broadcast(-0.693359375f), x);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  V y = polynomial(r, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f);
  // 2^n: the low bits of `scaled` are n
  EACH_PIECE y.p[i] *= (Lanes)(((WordLanes)scaled.p[i] + 127) << 23);
  EACH_PIECE y.p[i] = x.p[i] < -87.0f ? Lanes{} : y.p[i];
  return y;
}

// 2. bf16

// The bits of each number in bf16, rounded to the nearest, ties to even.
INLINE Words rounded(V v) {
  Words bits;
  EACH_PIECE {
    const WordLanes word = (WordLanes)v.p[i], upper = word >> 16;
    const WordLanes nearest = (word + 0x7fff + (upper & 1)) >> 16;
    bits.p[i] = v.p[i] == v.p[i] ? nearest : upper | 0x40;
  }
  return bits;
}
// 16 words of two bf16 numbers: in the lower half that of `low`, in the upper half that of `high`.
INLINE Words joined(V low, V high) {
#if defined(__AVX512BF16__)
  const __m512i ranks = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i order = _mm512_add_epi32(_mm512_mullo_epi32(ranks, _mm512_set1_epi32(0x10001)),
                                         _mm512_set1_epi32(0x100000));  // r, r + 16
  const __m512i numbers = (__m512i)_mm512_cvtne2ps_pbh(high.p[0], low.p[0]);
  return {(WordLanes)_mm512_permutexvar_epi16(order, numbers)};
#else
  Words words = rounded(low);
  const Words upper = rounded(high);
  EACH_PIECE words.p[i] |= upper.p[i] << 16;
  return words;
#endif
}
// 16 words of two bf16 numbers that follow each other in the 32 numbers of `first` and `second`.
INLINE Words narrowed(V first, V second) {
#if defined(__AVX512BF16__)
  return {(WordLanes)_mm512_cvtne2ps_pbh(second.p[0], first.p[0])};
#else
  const Words a = rounded(first), b = rounded(second);
  uint32_t bits[32], words[16];
  std::memcpy(bits, &a, sizeof a), std::memcpy(bits + 16, &b, sizeof b);
  for (int i = 0; i < 16; i++) words[i] = bits[2 * i] | bits[2 * i + 1] << 16;
  Words narrow;
  std::memcpy(&narrow, words, sizeof narrow);
  return narrow;
#endif
}

// 3. Memory; `count`: the numbers of 16 that are there, the others read as 0 and are not written

#if defined(__AVX512F__)
INLINE __mmask16 first(long count) { return count >= 16 ? 0xffff : (1u << std::max(count, 0L)) - 1; }

INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE V load(const float* p, long count) { return {_mm512_maskz_loadu_ps(first(count), p)}; }
INLINE Words load_halves(const bf16* p, long count = 16) {
  return {(WordLanes)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(count), p))};
}
INLINE Ints load(const int32_t* p) { return {(IntLanes)_mm512_loadu_si512(p)}; }
INLINE void store(int32_t* p, Ints v) { _mm512_storeu_si512(p, (__m512i)v.p[0]); }
INLINE void store(float* p, V v) { _mm512_storeu_ps(p, v.p[0]); }
INLINE void store(float* p, V v, long count) { _mm512_mask_storeu_ps(p, first(count), v.p[0]); }
INLINE void store(bf16* p, V v, long count = 16) {
#if defined(__AVX512BF16__)
  const __m256i bits = (__m256i)_mm512_cvtneps_pbh(v.p[0]);
#else
  const __m256i bits = _mm512_cvtepi32_epi16((__m512i)rounded(v).p[0]);
#endif
  _mm256_mask_storeu_epi16(p, first(count), bits);
}
#else
template <class T>
INLINE void copy_first(T* to, const T* from, long count) {
  if (count > 0) std::memcpy(to, from, count * sizeof(T));
}
INLINE V load(const float* p, long count = 16) {
#if defined(__AVX2__)
  if (count < 16) {  // GCC would call memcpy
    const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    V v;
    EACH_PIECE v.p[i] = _mm256_maskload_ps(p + 8 * i, _mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8 * i), places));
    return v;
  }
#endif
  float numbers[16] = {};
  if (count < 16) copy_first(numbers, p, count), p = numbers;
  V v;
  EACH_PIECE std::memcpy(&v.p[i], p + i * kLanes, sizeof v.p[i]);
  return v;
}
INLINE Ints load(const int32_t* p) {
  Ints v;
  EACH_PIECE std::memcpy(&v.p[i], p + i * kLanes, sizeof v.p[i]);
  return v;
}
INLINE void store(int32_t* p, Ints v) {
  EACH_PIECE std::memcpy(p + i * kLanes, &v.p[i], sizeof v.p[i]);
}
INLINE Words load_halves(const bf16* p, long count = 16) {
  bf16 numbers[16] = {};
  if (count < 16) copy_first(numbers, p, count), p = numbers;
  Words words;
  EACH_PIECE {
    HalfLanes halves;
    std::memcpy(&halves, p + i * kLanes, sizeof halves);
    words.p[i] = __builtin_convertvector(halves, WordLanes);
  }
  return words;
}
INLINE void store(float* p, V v, long count = 16) {
  if (count < 16) return copy_first(p, reinterpret_cast<const float*>(&v), count);
  EACH_PIECE std::memcpy(p + i * kLanes, &v.p[i], sizeof v.p[i]);
}
INLINE void store(bf16* p, V v, long count = 16) {
  const Words bits = rounded(v);
  bf16 numbers[16];
  EACH_PIECE {
    const HalfLanes halves = __builtin_convertvector(bits.p[i], HalfLanes);
    std::memcpy(numbers + i * kLanes, &halves, sizeof halves);
  }
  copy_first(p, numbers, std::min(count, 16L));
}
#endif

INLINE V load(const bf16* p, long count = 16) {
  const Words words = load_halves(p, count);
  V v;
  EACH_PIECE v.p[i] = (Lanes)(words.p[i] << 16);
  return v;
}
INLINE void store_words(int32_t* p, Words words) {  // p is aligned to 64 bytes
  EACH_PIECE* reinterpret_cast<WordLanes*>(p + i * kLanes) = words.p[i];
}
// Past the caches, where the CPU can; p is aligned to 64 bytes.
INLINE void stream(float* p, V v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, v.p[0]);
#elif defined(__AVX2__)
  EACH_PIECE _mm256_stream_ps(p + i * kLanes, v.p[i]);
#else
  store(p, v);
#endif
}
inline void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// 4. Transposition

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, WordLanes{__VA_ARGS__})
#endif

// Lane j of a result of two vectors: a number below kLanes is a lane of the first, others are of the second. All but the
// last two stay within groups of four lanes.
struct LowWords {
  static constexpr unsigned of(unsigned j) { return j / 4 * 4 + j % 4 / 2 + j % 2 * kLanes; }
};
struct HighWords {
  static constexpr unsigned of(unsigned j) { return LowWords::of(j) + 2; }
};
struct LowPairs {
  static constexpr unsigned of(unsigned j) { return j / 4 * 4 + j % 2 + j % 4 / 2 * kLanes; }
};
struct HighPairs {
  static constexpr unsigned of(unsigned j) { return LowPairs::of(j) + 2; }
};
struct EvenGroups {
  static constexpr unsigned of(unsigned j) { return j / 4 * 8 + j % 4; }
};
struct OddGroups {
  static constexpr unsigned of(unsigned j) { return EvenGroups::of(j) + 4; }
};

template <class Places, unsigned... j>
INLINE WordLanes shuffled(WordLanes a, WordLanes b, std::integer_sequence<unsigned, j...>) {
  return SHUFFLE(a, b, Places::of(j)...);
}
template <class First, class Second>
INLINE void shuffle(WordLanes a, WordLanes b, WordLanes& first, WordLanes& second) {
  first = shuffled<First>(a, b, std::make_integer_sequence<unsigned, kLanes>());
  second = shuffled<Second>(a, b, std::make_integer_sequence<unsigned, kLanes>());
}

// kLanes rows of kLanes words
INLINE void transpose_lanes(WordLanes v[kLanes]) {
  WordLanes t[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 2) shuffle<LowWords, HighWords>(v[i], v[i + 1], t[i], t[i + 1]);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 4) {
    shuffle<LowPairs, HighPairs>(t[i], t[i + 2], v[i], v[i + 1]);
    shuffle<LowPairs, HighPairs>(t[i + 1], t[i + 3], v[i + 2], v[i + 3]);
  }
  if constexpr (kLanes == 8) {
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
      shuffle<EvenGroups, OddGroups>(v[i], v[i + 4], t[i], t[i + 4]);
      v[i] = t[i], v[i + 4] = t[i + 4];
    }
  }
  if constexpr (kLanes == 16) {
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
      shuffle<EvenGroups, OddGroups>(v[i], v[i + 4], t[i], t[i + 4]);
      shuffle<EvenGroups, OddGroups>(v[i + 8], v[i + 12], t[i + 8], t[i + 12]);
      shuffle<EvenGroups, OddGroups>(t[i], t[i + 8], v[i], v[i + 8]);
      shuffle<EvenGroups, OddGroups>(t[i + 4], t[i + 12], v[i + 4], v[i + 12]);
    }
  }
}
INLINE void transpose(Words v[16]) {
  Words turned[16];
#pragma GCC unroll 4
  for (int row = 0; row < kPieces; row++) {
#pragma GCC unroll 4
    for (int piece = 0; piece < kPieces; piece++) {
      WordLanes square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) square[i] = v[row * kLanes + i].p[piece];
      transpose_lanes(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) turned[piece * kLanes + i].p[row] = square[i];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) v[i] = turned[i];
}

}  // namespace
