// The experts' networks on a CPU in integers, forward alone. ../int8_ffn/reference.py says what is computed. It is
// compiled once for each set of instructions.
//
// E experts, N rows, n rows of one expert, M model dim, H hidden dim

#include <omp.h>

#include <cmath>
#include <memory>
#include <vector>

#include "activations.hpp"
#include "ffn_int8.hpp"
#include "product.hpp"

namespace {

using P = Int8Product;
using Rows = Packed<P, kA>;
using Weight = Packed<P, kB>;

// Rows of an expert that a thread takes at once: more read the weights less often, fewer stay in the L2 cache.
constexpr long kMostRows = 224;

// 1. Rows in bytes

// value = unit (offset + scale * byte); the byte is unsigned. The unit is 1, but 2^64 for rows so large that a product
// would leave the range of fp32 on its way.
struct Range {
  float scale, offset, unit;
};

INLINE void store_bytes(uint8_t* p, Words words, long count) {
#if defined(__AVX512F__)
  _mm_mask_storeu_epi8(p, first(count), _mm512_cvtepi32_epi8((__m512i)words.p[0]));
#else
  typedef uint8_t ByteLanes __attribute__((vector_size(kLanes)));
  uint8_t bytes[16];
  EACH_PIECE {
    const ByteLanes lanes = __builtin_convertvector(words.p[i], ByteLanes);
    std::memcpy(bytes + i * kLanes, &lanes, sizeof lanes);
  }
  copy_first(p, bytes, std::min(count, 16L));
#endif
}

// A row's smallest and largest number become 0 and 255. One that holds a number that is not finite gets such an offset.
template <class T>
Range quantize(const T* row, long count, uint8_t* to) {
  V least = broadcast(INFINITY), most = broadcast(-INFINITY), zero = broadcast(0.0f);
  const V number = broadcast(load(row, 1).p[0][0]);
  for (long j = 0; j < count; j += 16) {
    V v = load(row + j, count - j);
    if (count - j < 16) v = first_or(v, count - j, number);  // not the zeros behind the last number
    least = smaller(least, v), most = larger(most, v);
    zero = multiply_add(v, broadcast(0.0f), zero);
  }
  float low = reduced(least, [](float a, float b) { return a < b ? a : b; });
  float high = reduced(most, [](float a, float b) { return a > b ? a : b; });
  const float unit = std::max(high, -low) > 0x1p64f ? 0x1p64f : 1.0f;
  low *= 1 / unit, high *= 1 / unit;
  const float range = high - low, scale = range > 1e-30f ? range / 255 : 1.0f;
  const V offset = broadcast(low), factor = broadcast(1 / scale), shrink = broadcast(1 / unit);
  const V shift = broadcast(12582912.0f);  // 1.5 * 2^23: the low bits of a sum with it are the nearest integer
  for (long j = 0; j < count; j += 16) {
    const V byte = (load(row + j, count - j) * shrink - offset) * factor + shift;
    Words bits;
    EACH_PIECE bits.p[i] = ((WordLanes)byte.p[i] ^ (kSignedRows ? 0x80u : 0u)) & 0xffu;
    store_bytes(to + j, bits, count - j);
  }
  const float signed_shift = kSignedRows ? 128 * scale : 0.0f;  // byte 128 is stored as 0
  return {scale, low + signed_shift + sum_of(zero), unit};
}

// 2. One expert

// One expert's weight [outputs, inputs].
struct Linear {
  Weight weight;
  const float *scales, *sums, *bias;

  Linear(const Int8Linear& all, long e, long outputs, long inputs)
      : weight(all.weight + e * Weight::words(outputs, inputs), outputs, inputs), scales(all.scales + e * outputs),
        sums(all.sums + e * outputs), bias(all.bias ? all.bias + e * outputs : nullptr) {}
};

// The memory of a thread.
struct Space {
  uint8_t* bytes;
  int32_t *packed, *sums;
  float* hidden;
  Range* ranges;
  long size;

  Space(char* base, long n, long H, long M) {
    const long K = std::max(H, M);
    size = 0;
    const auto take = [&](auto*& place, long bytes) {
      place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(base + size);
      size += (bytes + 63) / 64 * 64;
    };
    take(bytes, n * K);
    take(packed, 4 * Rows::words(n, K));
    take(sums, 4 * n * K);
    take(hidden, 4 * n * H);
    take(ranges, n * static_cast<long>(sizeof(Range)));
  }
};

// rows [n, K] in bytes, packed; their ranges are in `space`.
template <class T>
Rows packed_bytes(const T* rows, long n, long K, const Space& space) {
  for (long i = 0; i < n; i++) space.ranges[i] = quantize(rows + i * K, K, space.bytes + i * K);
  return Rows(space.packed, n, K).template pack<kAlongK>(space.bytes, K);
}

// rows times a weight, in fp32: use(i, j, count, v) takes 16 numbers of [n, outputs].
template <class Use>
void product_with(const Linear& linear, const Rows& rows, const Space& space, Use use) {
  const auto nothing = [](long, long) {};
  long_product(rows, linear.weight, Ahead(), space.sums, nothing, [&](long i, long j, long count, Ints sums) {
    const Range range = space.ranges[i];
    V v = to_float(sums) * (load(linear.scales + j, count) * broadcast(range.scale));
    v = multiply_add(load(linear.sums + j, count), broadcast(range.offset), v) * broadcast(range.unit);
    if (linear.bias) v = v + load(linear.bias + j, count);
    use(i, j, count, v);
  });
}

template <class Act, class T>
void experts(const Int8Problem& p, char* memory, const T* rows, T* out) {
  const long M = p.model_dim, H = p.hidden_dim, step = int8_row_step(&p);
  struct Item {
    long e, start, n;
  };
  std::vector<Item> items;
  for (long e = 0; e < p.num_experts; e++)
    for (long start = e ? p.ends[e - 1] : 0; start < p.ends[e]; start += step)
      items.push_back({e, start, std::min(step, p.ends[e] - start)});
#pragma omp parallel num_threads(p.threads)
  {
    const long size = Space(nullptr, step, H, M).size;
    const Space space(memory + size * omp_get_thread_num(), step, H, M);
    const Mode<P> mode;
#pragma omp for schedule(dynamic, 1) nowait
    for (size_t i = 0; i < items.size(); i++) {
      const Item item = items[i];
      const bool gated = p.linear3.weight != nullptr;
      const Rows x = packed_bytes(rows + item.start * M, item.n, M, space);
      product_with(Linear(p.linear1, item.e, H, M), x, space, [&](long i, long j, long count, V v) {
        store(space.hidden + i * H + j, gated ? v : Act::of(v).value, count);
      });
      if (gated) {
        product_with(Linear(p.linear3, item.e, H, M), x, space, [&](long i, long j, long count, V v) {
          float* place = space.hidden + i * H + j;
          store(place, Gated<Act>::of(load(place, count), v).value, count);
        });
      }
      const Rows h = packed_bytes(space.hidden, item.n, H, space);
      product_with(Linear(p.linear2, item.e, M, H), h, space, [&](long i, long j, long count, V v) {
        store(out + (item.start + i) * M + j, v, count);
      });
    }
  }
}

}  // namespace

// 3. What Python calls

extern "C" {

long int8_weight_words(long outputs, long inputs) { return Weight::words(outputs, inputs); }

void pack_int8(const int8_t* weight, int32_t* to, long num_experts, long outputs, long inputs, long threads) {
#pragma omp parallel for num_threads(threads)
  for (long e = 0; e < num_experts; e++) {
    Weight packed(to + e * Weight::words(outputs, inputs), outputs, inputs);
    packed.template pack<kAlongK>(weight + e * outputs * inputs, inputs);
  }
}

long int8_row_step(const Int8Problem* p) {
  const long rows = p->ends[p->num_experts - 1], share = rows / (4 * p->threads);
  return std::clamp(share / 14 * 14, 14L, kMostRows);
}

long int8_space(const Int8Problem* p) {
  return Space(nullptr, int8_row_step(p), p->hidden_dim, p->model_dim).size * p->threads;
}

void int8_experts(const Int8Problem* p, char* memory, void* out) {
  activated(p->activation, [&](auto act) {
    using Act = decltype(act);
    if (p->rows_bf16)
      experts<Act>(*p, memory, static_cast<const bf16*>(p->rows), static_cast<bf16*>(out));
    else
      experts<Act>(*p, memory, static_cast<const float*>(p->rows), static_cast<float*>(out));
  });
}
}
