// Products of matrices on an x86 CPU with AVX-512, and in bf16 with AMX.
//
// Both operands are packed into blocks of 16 x 16 words of 32 bits that lie one after the other. So the loops read
// memory in order, whatever its layout was, and fp32 becomes bf16 on the way. A word is one fp32 number, or two bf16
// numbers that follow each other along the contracted dimension k.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace {

struct bf16 {
  uint16_t bits;
};

// 1. Vectors

inline __mmask16 first(long count) { return count >= 16 ? 0xffff : (1u << std::max(count, 0L)) - 1; }
inline __mmask32 first_of_32(long count) { return count >= 32 ? ~0u : (1u << std::max(count, 0L)) - 1; }

inline __m512 load(const float* p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
inline __m512 load(const bf16* p, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}
inline void store(float* p, __mmask16 mask, __m512 v) { _mm512_mask_storeu_ps(p, mask, v); }
inline void store(bf16* p, __mmask16 mask, __m512 v) {
  _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(v));
}

inline __m512 exp_of_negative(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // in this order NaN stays
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, n);
}

inline __m512 reciprocal(__m512 x) {
  const __m512 y = _mm512_rcp14_ps(x);
  return _mm512_mul_ps(y, _mm512_fnmadd_ps(x, y, _mm512_set1_ps(2.0f)));
}

struct Activated {
  __m512 value, slope;
};

// The standard normal distribution below z and sqrt(2 pi) times its density. Relative error of the smaller tail 5e-7:
// erfc(a / sqrt 2) exp(a^2 / 2) / 2 as a polynomial in 1 / (1 + 0.3 a), fitted to 2e-7.
struct Normal {
  __m512 below, density;

  explicit Normal(__m512 z) {
    const __m512 one = _mm512_set1_ps(1.0f), a = _mm512_abs_ps(z);
    density = exp_of_negative(_mm512_mul_ps(_mm512_mul_ps(a, a), _mm512_set1_ps(-0.5f)));
    const __m512 t = reciprocal(_mm512_fmadd_ps(a, _mm512_set1_ps(0.3f), one));
    __m512 tail = _mm512_set1_ps(0.0351786502f);
    for (float c : {-0.155142009f, 0.202815726f, -0.0504435711f, 0.126858339f, 0.100425489f, 0.120672747f,
                    0.119634531f})
      tail = _mm512_fmadd_ps(tail, t, _mm512_set1_ps(c));
    tail = _mm512_mul_ps(_mm512_mul_ps(tail, t), density);  // beyond a
    const __mmask16 positive = _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_GT_OQ);
    below = _mm512_mask_sub_ps(tail, positive, one, tail);
  }
};

struct Gelu {
  static Activated of(__m512 z) {
    const Normal normal(z);
    const __m512 slope = _mm512_fmadd_ps(_mm512_mul_ps(z, normal.density), _mm512_set1_ps(0.398942280f), normal.below);
    return {_mm512_mul_ps(z, normal.below), slope};
  }
};

struct Relu {
  static Activated of(__m512 z) {
    const __mmask16 positive = _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_NLE_UQ);  // or not a number
    return {_mm512_maskz_mov_ps(positive, z), _mm512_maskz_mov_ps(positive, _mm512_set1_ps(1.0f))};
  }
};

struct Silu {
  static Activated of(__m512 z) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 small = exp_of_negative(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(z)));
    const __mmask16 positive = _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_GT_OQ);
    const __m512 gate = _mm512_div_ps(_mm512_mask_mov_ps(small, positive, one), _mm512_add_ps(one, small));
    const __m512 value = _mm512_mul_ps(z, gate);
    return {value, _mm512_fmadd_ps(value, _mm512_sub_ps(one, gate), gate)};
  }
};

// The even and the odd quarters of a and b.
inline void quarters(__m512i a, __m512i b, __m512i& even, __m512i& odd) {
  even = _mm512_shuffle_i32x4(a, b, 0x88);
  odd = _mm512_shuffle_i32x4(a, b, 0xdd);
}

__attribute__((always_inline)) inline void transpose(__m512i v[16]) {
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; i++) {
    quarters(v[i], v[i + 4], t[i], t[i + 4]);
    quarters(v[i + 8], v[i + 12], t[i + 8], t[i + 12]);
    quarters(t[i], t[i + 8], v[i], v[i + 8]);
    quarters(t[i + 4], t[i + 12], v[i + 4], v[i + 12]);
  }
}

// 2. Operands of a product C [i, j] = sum over k of A [i, k] B [k, j]

// How a product in T divides i, j and k: an operand's panel is up to `height` wide and has a block for each `depth`.
template <class T>
struct Shape;
template <>
struct Shape<float> {
  static constexpr long depth = 16, a_height = 14, a_panels = 1, stretch = 192;
};
template <>
struct Shape<bf16> {
  static constexpr long depth = 32, a_height = 16, a_panels = 2, stretch = 1024;
};

// 16 words along k, from row `p`, of which `count` numbers are there.
inline __m512i along(const float* p, long count, float) { return _mm512_castps_si512(load(p, first(count))); }
inline __m512i along(const float* p, long count, bf16) {
  return (__m512i)_mm512_cvtne2ps_pbh(load(p + 16, first(count - 16)), load(p, first(count)));
}
inline __m512i along(const bf16* p, long count, bf16) { return _mm512_maskz_loadu_epi16(first_of_32(count), p); }

// The words of 16 rows at one k: from p, and for bf16 from p + stride.
inline __m512i across(const float* p, long, long count, __mmask16 mask, float) {
  return _mm512_castps_si512(load(p, count > 0 ? mask : 0));
}
inline __m512i pairs(__m512i low_then_high) {
  const __m512i ranks = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i order = _mm512_add_epi32(_mm512_mullo_epi32(ranks, _mm512_set1_epi32(0x10001)),
                                         _mm512_set1_epi32(0x100000));  // r, r + 16
  return _mm512_permutexvar_epi16(order, low_then_high);
}
inline __m512i across(const float* p, long stride, long count, __mmask16 mask, bf16) {
  return pairs((__m512i)_mm512_cvtne2ps_pbh(load(p + stride, count > 1 ? mask : 0), load(p, count > 0 ? mask : 0)));
}
inline __m512i across(const bf16* p, long stride, long count, __mmask16 mask, bf16) {
  const __m256i low = _mm256_maskz_loadu_epi16(count > 0 ? mask : 0, p);
  const __m256i high = _mm256_maskz_loadu_epi16(count > 1 ? mask : 0, p + stride);
  return pairs(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

enum Side { kA, kB };
enum Contiguous { kAlongK, kAcrossK };  // how the numbers lie in memory that are to be packed

template <class T, Side side>
struct Packed {
  static constexpr long height = side == kA ? Shape<T>::a_height : 16;
  static constexpr bool balanced = height != 16;  // panels of nearly equal height
  int32_t* data;
  long extent, depth, panels, blocks, stride;  // stride: blocks from one panel to the next

  Packed(int32_t* data, long extent, long depth, long stride = 0)
      : data(data), extent(extent), depth(depth), panels((extent + height - 1) / height),
        blocks((depth + Shape<T>::depth - 1) / Shape<T>::depth), stride(stride ? stride : blocks) {}
  static long words(long extent, long depth) {
    const Packed p(nullptr, extent, depth);
    return p.panels * p.blocks * 256;
  }
  // What belongs to [k0, k0 + count) of the contracted dimension; k0 is a multiple of a block's depth.
  Packed along_k(long k0, long count) const {
    return Packed(data + k0 / Shape<T>::depth * 256, extent, count, stride);
  }
  const int32_t* panel(long p) const { return data + p * stride * 256; }
  long start(long p) const { return balanced ? p * extent / panels : p * height; }
  long end(long p) const { return balanced ? (p + 1) * extent / panels : std::min((p + 1) * height, extent); }

  template <Contiguous contiguous, class S>
  __attribute__((always_inline)) static void block(int32_t* to, const S* from, long stride, long count, long left) {
    constexpr bool wanted_along_k = side == kA && sizeof(T) == 2;
    constexpr long step = sizeof(T) == 2 ? 2 : 1;  // numbers of a word
    __m512i v[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      if (contiguous == kAlongK)
        v[i] = i < count ? along(from + i * stride, left, T()) : _mm512_setzero_si512();
      else
        v[i] = across(from + i * step * stride, stride, left - i * step, first(count), T());
    }
    if ((contiguous == kAlongK) != wanted_along_k) transpose(v);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + 16 * i, v[i]);
  }

  // source: [extent, depth] if contiguous along k, else [depth, extent]; its rows `row` apart.
  template <Contiguous contiguous, class S>
  const Packed& pack(const S* source, long row) const {
    const long outer = contiguous == kAlongK ? panels : blocks, inner = contiguous == kAlongK ? blocks : panels;
    for (long o = 0; o < outer; o++) {  // in the order of the source
      for (long i = 0; i < inner; i++) {
        const long p = contiguous == kAlongK ? o : i, k = (contiguous == kAlongK ? i : o) * Shape<T>::depth;
        const long count = end(p) - start(p), left = depth - k;
        int32_t* to = data + (p * stride + k / Shape<T>::depth) * 256;
        const S* from = source + (contiguous == kAlongK ? start(p) * row + k : k * row + start(p));
        if (count == 16 && left >= Shape<T>::depth)
          block<contiguous>(to, from, row, 16, Shape<T>::depth);  // constants: without masks
        else
          block<contiguous>(to, from, row, count, left);
      }
    }
    return *this;
  }
};

// 3. Products

// Memory that is read next: it is fetched into the L2 cache while a product is computed.
struct Ahead {
  const char* next = nullptr;
  long lines = 0;  // of 64 bytes

  Ahead() = default;
  template <class W>
  Ahead(const W* p, long count) : next(reinterpret_cast<const char*>(p)), lines(count * sizeof(W) / 64) {}
  Ahead take(long count) {
    Ahead taken;
    taken.next = next, taken.lines = std::min(count, lines);
    next += 64 * taken.lines, lines -= taken.lines;
    return taken;
  }
};

// Where a tile of C goes: its rows lie `stride` apart; or it is added to what is there.
struct Target {
  float* c;
  long stride;
  bool add;
};

// [rows, 32] of C, from a panel of A and two of B.
template <int rows>
void tile_of(Target to, const int32_t* a, const int32_t* b0, const int32_t* b1, long depth, Ahead ahead) {
  __m512 left[rows], right[rows];
#pragma GCC unroll 14
  for (int i = 0; i < rows; i++) left[i] = right[i] = _mm512_setzero_ps();
  const float* x = reinterpret_cast<const float*>(a);
  for (long k = 0; k < depth; k++, x += 16, b0 += 16, b1 += 16) {
    const __m512 l = _mm512_load_ps(b0), r = _mm512_load_ps(b1);
    _mm_prefetch(b0 + 8 * 16, _MM_HINT_T0);
    _mm_prefetch(b1 + 8 * 16, _MM_HINT_T0);
    _mm_prefetch(x + 32 * 16, _MM_HINT_T0);
    if (k < ahead.lines) _mm_prefetch(ahead.next + 64 * k, _MM_HINT_T1);
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) {
      const __m512 s = _mm512_set1_ps(x[i]);
      left[i] = _mm512_fmadd_ps(s, l, left[i]);
      right[i] = _mm512_fmadd_ps(s, r, right[i]);
    }
  }
#pragma GCC unroll 14
  for (int i = 0; i < rows; i++) {
    float* c = to.c + i * to.stride;
    _mm512_storeu_ps(c, to.add ? _mm512_add_ps(left[i], _mm512_loadu_ps(c)) : left[i]);
    _mm512_storeu_ps(c + 16, to.add ? _mm512_add_ps(right[i], _mm512_loadu_ps(c + 16)) : right[i]);
  }
}

using Packs = const int32_t*;
using TileOf = void (*)(Target, Packs, Packs, Packs, long, Ahead);
constexpr TileOf kTiles[] = {nullptr,     tile_of<1>, tile_of<2>,  tile_of<3>,  tile_of<4>,
                             tile_of<5>,  tile_of<6>, tile_of<7>,  tile_of<8>,  tile_of<9>,
                             tile_of<10>, tile_of<11>, tile_of<12>, tile_of<13>, tile_of<14>};

void tile(Target to, const Packed<float, kA>& a, long panel, Packs b0, Packs b1, long rows, Ahead ahead) {
  kTiles[rows](to, a.panel(panel), b0, b1, a.depth, ahead);
}

// [16 or 32, 32] of C, from one or two panels of A.
void tile(Target to, const Packed<bf16, kA>& a, long panel, Packs b0, Packs b1, long rows, Ahead ahead) {
  const bool both = rows > 16;
  Packs a0 = a.panel(panel), a1 = a.panel(panel + both);
  const long bytes = to.stride * 4;
  float* below = to.c + 16 * to.stride;
  if (to.add) {
    _tile_loadd(0, to.c, bytes);
    _tile_loadd(1, to.c + 16, bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  if (to.add && both) {
    _tile_loadd(2, below, bytes);
    _tile_loadd(3, below + 16, bytes);
  } else {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (long k = 0; k < a.blocks; k++) {
    const Ahead now = ahead.take(4);  // more would keep the tiles waiting
    for (long line = 0; line < now.lines; line++) _mm_prefetch(now.next + 64 * line, _MM_HINT_T1);
    _tile_loadd(4, a0 + 256 * k, 64);
    _tile_loadd(6, b0 + 256 * k, 64);
    _tile_loadd(7, b1 + 256 * k, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, a1 + 256 * k, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, to.c, bytes);
  _tile_stored(1, to.c + 16, bytes);
  if (both) {
    _tile_stored(2, below, bytes);
    _tile_stored(3, below + 16, bytes);
  }
}

// How this thread computes: AMX wants to know what tiles look like, and numbers below 1e-38, of which the slopes of an
// activation have many, are 0, since each of them would take as long as a hundred others.
template <class T>
struct Mode {
  static constexpr bool tiles = std::is_same<T, bf16>::value;
  const unsigned before = _mm_getcsr();
  Mode() {
    _mm_setcsr(before | 0x8040);  // flush results to zero, take operands as zero
    if (!tiles) return;
    struct {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    std::fill_n(config.row_bytes, 8, 64);
    std::fill_n(config.rows, 8, 16);
    _tile_loadconfig(&config);
  }
  ~Mode() {
    if (tiles) _tile_release();
    _mm_setcsr(before);
  }
};

// `soon(i, j)` announces C [i, j : j + 32]; `use(i, j, mask, v)` takes it by 16 numbers, or `into` a whole tile. The
// smaller operand is read again and again.
template <class T, class Soon, class Use>
void product(const Packed<T, kA>& a, const Packed<T, kB>& b, Ahead ahead, Soon soon, Use use, Target into = {}) {
  constexpr long step = Shape<T>::a_panels;
  const long a_steps = (a.panels + step - 1) / step, b_steps = (b.panels + 1) / 2;
  const bool a_outer = a.extent > b.extent;
  const long share = (ahead.lines + a_steps * b_steps - 1) / (a_steps * b_steps);
  alignas(64) float c[32 * 32];
  for (long outer = 0; outer < (a_outer ? a_steps : b_steps); outer++) {
    for (long inner = 0; inner < (a_outer ? b_steps : a_steps); inner++) {
      const long pa = (a_outer ? outer : inner) * step, pb = (a_outer ? inner : outer) * 2;
      const bool both = pb + 1 < b.panels;
      const long i0 = a.start(pa), rows = a.end(std::min(pa + step, a.panels) - 1) - i0, j0 = pb * 16;
      for (long i = 0; i < rows; i++) soon(i0 + i, j0);
      const bool whole = b.extent - j0 >= 32 && (step == 1 || rows % 16 == 0);  // AMX writes 16 rows
      const bool direct = into.c && whole;
      const Target to = direct ? Target{into.c + i0 * into.stride + j0, into.stride, into.add} : Target{c, 32, false};
      tile(to, a, pa, b.panel(pb), b.panel(pb + both), rows, ahead.take(share));
      if (direct) continue;
      const __mmask16 left = first(b.extent - j0), right = both ? first(b.extent - j0 - 16) : 0;
      for (long i = 0; i < rows; i++) {
        use(i0 + i, j0, left, _mm512_load_ps(c + 32 * i));
        if (right) use(i0 + i, j0 + 16, right, _mm512_load_ps(c + 32 * i + 16));
      }
    }
  }
}

// C, whose rows lie `stride` apart, or its sum with what is there. `last`: nobody reads it soon, so that the caches are
// left to others.
template <class T, class C>
void product_into(const Packed<T, kA>& a, const Packed<T, kB>& b, Ahead ahead, C* c, long stride, bool add, bool last) {
  const bool aligned = reinterpret_cast<uintptr_t>(c) % 64 == 0 && stride % 16 == 0;
  const bool past_caches = last && !add && aligned && std::is_same<C, float>::value;
  Target into = {};
  if constexpr (std::is_same<C, float>::value)
    if (!past_caches) into = {c, stride, add};
  const auto soon = [&](long i, long j) {
    if (past_caches) return;
    __builtin_prefetch(c + i * stride + j, 1);
    __builtin_prefetch(c + i * stride + j + 16, 1);
  };
  const auto use = [&](long i, long j, __mmask16 mask, __m512 v) {
    C* place = c + i * stride + j;
    if (past_caches && mask == 0xffff)
      _mm512_stream_ps(reinterpret_cast<float*>(place), v);
    else
      store(place, mask, add ? _mm512_add_ps(v, load(place, mask)) : v);
  };
  product(a, b, ahead, soon, use, into);
}

// `product` in stretches of k so short that panels stay in the L1 cache. `so_far`: room for [a.extent, b.extent].
template <class T, class Soon, class Use>
void long_product(const Packed<T, kA>& a, const Packed<T, kB>& b, Ahead ahead, float* so_far, Soon soon, Use use) {
  constexpr long step = Shape<T>::stretch;
  long k0 = 0;
  for (; a.depth - k0 > step * 3 / 2; k0 += step)
    product_into(a.along_k(k0, step), b.along_k(k0, step), k0 ? Ahead() : ahead, so_far, b.extent, k0 > 0, false);
  const auto last_a = a.along_k(k0, a.depth - k0);
  const auto last_b = b.along_k(k0, b.depth - k0);
  product(last_a, last_b, k0 ? Ahead() : ahead, soon, [&](long i, long j, __mmask16 mask, __m512 v) {
    use(i, j, mask, k0 ? _mm512_add_ps(v, load(so_far + i * b.extent + j, mask)) : v);
  });
}

// to [columns] = the sum over the rows of `from` [rows, columns], and what is there.
template <class T>
void sum_rows(const T* from, long rows, long columns, float* to, bool add) {
  for (long j = 0; j < columns; j += 16) {
    const __mmask16 mask = first(columns - j);
    __m512 sum = add ? load(to + j, mask) : _mm512_setzero_ps();
    for (long i = 0; i < rows; i++) sum = _mm512_add_ps(sum, load(from + i * columns + j, mask));
    store(to + j, mask, sum);
  }
}

}  // namespace
