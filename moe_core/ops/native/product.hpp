// Products of matrices on a CPU, in fp32 or in bf16.
//
// Both operands are packed into blocks of 16 x 16 words of 32 bits that lie one after the other. So the loops read
// memory in order, whatever its layout was, and one type becomes the other on the way. A word is one fp32 number, or two
// bf16 numbers that follow each other along the contracted dimension k.

#pragma once

#include "vectors.hpp"

namespace {

// 1. Operands of a product C [i, j] = sum over k of A [i, k] B [k, j]

#if defined(__AMX_BF16__)
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kPairs = true;  // an instruction adds products of two pairs of bf16 numbers
#else
constexpr bool kPairs = false;
#endif

// The type in which rows of type T are multiplied.
template <class T>
using ProductType = std::conditional_t<kPairs, T, float>;

// A tile of C in registers is kTileRows x (16 kTileColumns): 28, 12 or 24 registers for the sums.
constexpr long kTileRows = kLanes == 16 ? 14 : 6, kTileColumns = kLanes == 16 ? 2 : 1;

// How a product in P divides i, j and k: an operand's panel is up to `height` wide and has a block for each `depth`.
template <class P>
struct Shape {
  // AMX: [16 or 32, 32] of C at once
  static constexpr bool tiles = kTiles && std::is_same<P, bf16>::value;
  static constexpr long numbers = 4 / sizeof(P);           // of a word
  static constexpr long depth = 16 * numbers, a_height = tiles ? 16 : kTileRows == 14 ? 14 : 12;
  static constexpr long a_panels = tiles ? 2 : 1, b_panels = kTileColumns;
  static constexpr long stretch = tiles ? 512 * numbers : kLanes == 16 ? 192 * numbers : 256 * numbers;
};

// 16 words along k, from row `p`, of which `count` numbers are there.
template <class S>
INLINE Words along(const S* p, long count, float) {
  const V v = load(p, count);
  Words words;
  std::memcpy(&words, &v, sizeof words);
  return words;
}
INLINE Words along(const float* p, long count, bf16) { return narrowed(load(p, count), load(p + 16, count - 16)); }
INLINE Words along(const bf16* p, long count, bf16) {
#if defined(__AVX512BW__)
  const __mmask32 there = count >= 32 ? ~0u : (1u << std::max(count, 0L)) - 1;
  return {(WordLanes)_mm512_maskz_loadu_epi16(there, p)};
#endif
  Words words = {};
  if (count >= 32) std::memcpy(&words, p, sizeof words);
  else if (count > 0) std::memcpy(&words, p, count * sizeof(bf16));
  return words;
}
// The words of `rows` rows at one k: from p, and for bf16 from p + stride; `left`: how many k there are.
template <class S>
INLINE Words across(const S* p, long, long left, long rows, float) {
  return along(p, left > 0 ? rows : 0, float());
}
INLINE Words across(const float* p, long stride, long left, long rows, bf16) {
  return joined(load(p, left > 0 ? rows : 0), load(p + stride, left > 1 ? rows : 0));
}
INLINE Words across(const bf16* p, long stride, long left, long rows, bf16) {
  Words words = load_halves(p, left > 0 ? rows : 0);
  const Words upper = load_halves(p + stride, left > 1 ? rows : 0);
  EACH_PIECE words.p[i] |= upper.p[i] << 16;
  return words;
}

enum Side { kA, kB };
enum Contiguous { kAlongK, kAcrossK };  // how the numbers lie in memory that are to be packed

template <class P, Side side>
struct Packed {
  static constexpr long height = side == kA ? Shape<P>::a_height : 16;
  static constexpr bool balanced = height != 16;  // panels of nearly equal height
  int32_t* data;
  long extent, depth, panels, blocks, stride;  // stride: blocks from one panel to the next

  Packed(int32_t* data, long extent, long depth, long stride = 0)
      : data(data), extent(extent), depth(depth), panels((extent + height - 1) / height),
        blocks((depth + Shape<P>::depth - 1) / Shape<P>::depth), stride(stride ? stride : blocks) {}
  static long words(long extent, long depth) {
    const Packed p(nullptr, extent, depth);
    return p.panels * p.blocks * 256;
  }
  // What belongs to [k0, k0 + count) of the contracted dimension; k0 is a multiple of a block's depth.
  Packed along_k(long k0, long count) const {
    return Packed(data + k0 / Shape<P>::depth * 256, extent, count, stride);
  }
  const int32_t* panel(long p) const { return data + p * stride * 256; }
  long start(long p) const { return balanced ? p * extent / panels : p * height; }
  long end(long p) const { return balanced ? (p + 1) * extent / panels : std::min((p + 1) * height, extent); }

  // AMX reads A along k; everything else reads the words of one k.
  template <Contiguous contiguous, class S>
  INLINE static void block(int32_t* to, const S* from, long stride, long count, long left) {
    constexpr bool wanted_along_k = side == kA && Shape<P>::tiles;
    constexpr long step = Shape<P>::numbers;
    Words v[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      if constexpr (contiguous == kAlongK)
        v[i] = i < count ? along(from + i * stride, left, P()) : Words{};
      else
        v[i] = across(from + i * step * stride, stride, left - i * step, count, P());
    }
    if ((contiguous == kAlongK) != wanted_along_k) transpose(v);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) store_words(to + 16 * i, v[i]);
  }

  // source: [extent, depth] if contiguous along k, else [depth, extent]; its rows `row` apart.
  template <Contiguous contiguous, class S>
  const Packed& pack(const S* source, long row) const {
    const long outer = contiguous == kAlongK ? panels : blocks, inner = contiguous == kAlongK ? blocks : panels;
    for (long o = 0; o < outer; o++) {  // in the order of the source
      for (long i = 0; i < inner; i++) {
        const long p = contiguous == kAlongK ? o : i, k = (contiguous == kAlongK ? i : o) * Shape<P>::depth;
        const long count = end(p) - start(p), left = depth - k;
        int32_t* to = data + (p * stride + k / Shape<P>::depth) * 256;
        const S* from = source + (contiguous == kAlongK ? start(p) * row + k : k * row + start(p));
        if (count == 16 && left >= Shape<P>::depth)
          block<contiguous>(to, from, row, 16, Shape<P>::depth);  // constants: without masks
        else
          block<contiguous>(to, from, row, count, left);
      }
    }
    return *this;
  }
};

// 2. Products

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
  INLINE void fetch(long line) const {  // GCC removes calls of functions that only prefetch
    if (line < lines) __builtin_prefetch(next + 64 * line, 0, 2);
  }
};

// Where a tile of C goes: its rows lie `stride` apart; or it is added to what is there.
struct Target {
  float* c;
  long stride;
  bool add;
};

using Packs = const int32_t*;

// sum + the number times each of 16 numbers, which are aligned
INLINE void add_products(V& sum, float number, const float* numbers) {
  EACH_PIECE sum.p[i] = number * reinterpret_cast<const Lanes*>(numbers)[i] + sum.p[i];
}
// sum + the word times each of 16 words
INLINE void add_products(V& sum, int32_t word, Packs words, float) {
  float number;
  std::memcpy(&number, &word, sizeof number);
  add_products(sum, number, reinterpret_cast<const float*>(words));
}
INLINE void add_products(V& sum, int32_t word, Packs words, bf16) {
#if defined(__AVX512BF16__)
  sum.p[0] = _mm512_dpbf16_ps(sum.p[0], (__m512bh)_mm512_set1_epi32(word), (__m512bh)_mm512_load_si512(words));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const bfloat16x8_t pair = vreinterpretq_bf16_s32(vdupq_n_s32(word));
  EACH_PIECE sum.p[i] = vbfdotq_f32(sum.p[i], pair, vreinterpretq_bf16_s32(vld1q_s32(words + 4 * i)));
#endif
}

// [rows, 16 columns] of C, from some rows of a panel of A and one or two panels of B.
template <class P, int columns, int rows>
void tile_of(Target to, Packs a, const Packs* b, long words, Ahead ahead) {
  V sums[rows][columns];
#pragma GCC unroll 14
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
    for (int j = 0; j < columns; j++) sums[i][j] = {};
  Packs panels[columns];
  for (int j = 0; j < columns; j++) panels[j] = b[j];
  for (long k = 0; k < words; k++, a += 16) {
    __builtin_prefetch(a + 32 * 16);
    ahead.fetch(k);
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
      for (int j = 0; j < columns; j++) add_products(sums[i][j], a[i], panels[j], P());
#pragma GCC unroll 2
    for (int j = 0; j < columns; j++) {
      __builtin_prefetch(panels[j] + 8 * 16);
      panels[j] += 16;
    }
  }
  auto c = to.c;
#pragma GCC unroll 14
  for (int i = 0; i < rows; i++, c += to.stride)
#pragma GCC unroll 2
    for (int j = 0; j < columns; j++) {
      if (to.add) sums[i][j] = sums[i][j] + load(c + 16 * j);
      store(c + 16 * j, sums[i][j]);
    }
}

template <class P, int columns, class Rows>
struct Tiles;
template <class P, int columns, int... rows>
struct Tiles<P, columns, std::integer_sequence<int, rows...>> {
  using Tile = void (*)(Target, Packs, const Packs*, long, Ahead);
  static constexpr Tile of_rows[] = {nullptr, tile_of<P, columns, rows + 1>...};
};

// `panels`: of B, one or kTileColumns
template <class P, std::enable_if_t<!Shape<P>::tiles, int> = 0>
void tile(Target to, const Packed<P, kA>& a, long panel, const Packs* b, long panels, long rows,
          Ahead ahead) {
  using Rows = std::make_integer_sequence<int, kTileRows>;
  const auto of_rows = panels == 1 ? Tiles<P, 1, Rows>::of_rows : Tiles<P, kTileColumns, Rows>::of_rows;
  const long words = (a.depth + Shape<P>::numbers - 1) / Shape<P>::numbers;
  long start = 0;
  if (Shape<P>::a_height > kTileRows && rows > kTileRows) {  // in two parts
    start = rows / 2;
    of_rows[start](to, a.panel(panel), b, words, ahead);
    to.c += start * to.stride;
    ahead = Ahead();
  }
  of_rows[rows - start](to, a.panel(panel) + start, b, words, ahead);
}

#if defined(__AMX_BF16__)
// [16 or 32, 16 or 32] of C, from one or two panels of A and of B.
template <class P, std::enable_if_t<Shape<P>::tiles, int> = 0>
void tile(Target to, const Packed<P, kA>& a, long panel, const Packs* b, long panels, long rows,
          Ahead ahead) {
  const bool both = rows > 16, wide = panels > 1;
  Packs a0 = a.panel(panel), a1 = a.panel(panel + both), b0 = b[0], b1 = b[1];
  const long bytes = to.stride * 4;
  auto below = to.c + 16 * to.stride;
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
    for (long line = 0; line < now.lines; line++) now.fetch(line);
    _tile_loadd(4, a0 + 256 * k, 64);
    _tile_loadd(6, b0 + 256 * k, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (wide) {
      _tile_loadd(7, b1 + 256 * k, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (both) {
      _tile_loadd(5, a1 + 256 * k, 64);
      _tile_dpbf16ps(2, 5, 6);
      if (wide) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, to.c, bytes);
  _tile_stored(1, to.c + 16, bytes);
  if (both) {
    _tile_stored(2, below, bytes);
    _tile_stored(3, below + 16, bytes);
  }
}
#endif

// How this thread computes. Numbers below 1e-38, of which the slopes of an activation have many, are 0, since each of
// them would take as long as a hundred others. AMX wants to know what tiles look like.
template <class P>
struct Mode {
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  Mode() {
    _mm_setcsr(before | 0x8040);  // flush results to zero, take operands as zero
    set_tiles();
  }
  ~Mode() {
#if defined(__AMX_BF16__)
    if (Shape<P>::tiles) _tile_release();
#endif
    _mm_setcsr(before);
  }
#elif defined(__aarch64__)
  uint64_t before;
  Mode() {
    asm volatile("mrs %0, fpcr" : "=r"(before));
    asm volatile("msr fpcr, %0" : : "r"(before | 1 << 24));
  }
  ~Mode() { asm volatile("msr fpcr, %0" : : "r"(before)); }
#endif
  void set_tiles() {
#if defined(__AMX_BF16__)
    if (!Shape<P>::tiles) return;
    struct {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    std::fill_n(config.row_bytes, 8, 64);
    std::fill_n(config.rows, 8, 16);
    asm volatile("" : : "r"(&config) : "memory");  // GCC's intrinsic names only 8 of the bytes that it reads
    _tile_loadconfig(&config);
#endif
  }
};

// `soon(i, j, count)` announces C [i, j : j + count]; `use(i, j, count, v)` takes it by 16 numbers, or `into` a whole
// tile. The smaller operand is read again and again.
template <class P, class Soon, class Use>
void product(const Packed<P, kA>& a, const Packed<P, kB>& b, Ahead ahead, Soon soon, Use use,
             Target into = {}) {
  constexpr long step = Shape<P>::a_panels, wide = Shape<P>::b_panels;
  const long a_steps = (a.panels + step - 1) / step, b_steps = (b.panels + wide - 1) / wide;
  const bool a_outer = a.extent > b.extent;
  const long share = (ahead.lines + a_steps * b_steps - 1) / (a_steps * b_steps);
  alignas(64) float c[32 * 32];
  for (long outer = 0; outer < (a_outer ? a_steps : b_steps); outer++) {
    for (long inner = 0; inner < (a_outer ? b_steps : a_steps); inner++) {
      const long pa = (a_outer ? outer : inner) * step, pb = (a_outer ? inner : outer) * wide;
      const long i0 = a.start(pa), rows = a.end(std::min(pa + step, a.panels) - 1) - i0, j0 = pb * 16;
      const long columns = std::min(b.extent - j0, 16 * wide);
      const long panels = std::min(b.panels - pb, wide);
      Packs b_panels[2] = {b.panel(pb), b.panel(pb + panels - 1)};
      for (long i = 0; i < rows; i++) soon(i0 + i, j0);
      const bool whole = columns == 16 * wide && (step == 1 || rows % 16 == 0);  // AMX writes 16 rows
      const bool direct = into.c && whole;
      Target to = {c, 32, false};
      if (direct) to = {into.c + i0 * into.stride + j0, into.stride, into.add};
      tile(to, a, pa, b_panels, panels, rows, ahead.take(share));
      if (direct) continue;
      for (long j = 0; j < columns; j += 16)
        for (long i = 0; i < rows; i++) use(i0 + i, j0 + j, std::min(columns - j, 16L), load(c + 32 * i + j));
    }
  }
}

// C, whose rows lie `stride` apart, or its sum with what is there. `last`: nobody reads it soon, so that the caches are
// left to others.
template <class P>
void product_into(const Packed<P, kA>& a, const Packed<P, kB>& b, Ahead ahead, float* c, long stride,
                  bool add, bool last) {
  const bool aligned = reinterpret_cast<uintptr_t>(c) % 64 == 0 && stride % 16 == 0;
  const bool past_caches = last && !add && aligned;
  const auto soon = [&](long i, long j) {
    if (past_caches) return;
    for (long ahead = 0; ahead < kTileColumns; ahead++) __builtin_prefetch(c + i * stride + j + 16 * ahead, 1);
  };
  const auto use = [&](long i, long j, long count, V v) {
    float* place = c + i * stride + j;
    if (past_caches && count == 16) return stream(place, v);
    store(place, add ? v + load(place, count) : v, count);
  };
  product(a, b, ahead, soon, use, past_caches ? Target{} : Target{c, stride, add});
}

// `product` in stretches of k so short that panels stay in the L1 cache. `so_far`: room for [a.extent, b.extent].
template <class P, class Soon, class Use>
void long_product(const Packed<P, kA>& a, const Packed<P, kB>& b, Ahead ahead, float* so_far,
                  Soon soon, Use use) {
  constexpr long step = Shape<P>::stretch;
  long k0 = 0;
  for (; a.depth - k0 > step * 3 / 2; k0 += step)
    product_into(a.along_k(k0, step), b.along_k(k0, step), k0 ? Ahead() : ahead, so_far, b.extent, k0 > 0, false);
  const auto last_a = a.along_k(k0, a.depth - k0);
  const auto last_b = b.along_k(k0, b.depth - k0);
  const float* before = k0 ? so_far : nullptr;
  product(last_a, last_b, k0 ? Ahead() : ahead, soon, [=, extent = b.extent](long i, long j, long count, V v) {
    use(i, j, count, before ? v + load(before + i * extent + j, count) : v);
  });
}

// to [columns] = the sum over the rows of `from` [rows, columns], and what is there.
template <class T>
void sum_rows(const T* from, long rows, long columns, float* to, bool add) {
  for (long j = 0; j < columns; j += 16) {
    V sum = add ? load(to + j, columns - j) : broadcast(0.0f);
    for (long i = 0; i < rows; i++) sum = sum + load(from + i * columns + j, columns - j);
    store(to + j, sum, columns - j);
  }
}

}  // namespace
