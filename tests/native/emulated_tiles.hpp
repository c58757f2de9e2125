// AMX's tile instructions in plain C++, for CPUs without them: compile with -D__AMX_BF16__ -include this file.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#undef _tile_loadconfig
#undef _tile_release

namespace emulated {

inline thread_local uint32_t tiles[8][16][16];

inline float number(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void load(int tile, const void* from, long stride) {
  for (int row = 0; row < 16; row++) std::memcpy(tiles[tile][row], static_cast<const char*>(from) + row * stride, 64);
}
inline void store(int tile, void* to, long stride) {
  for (int row = 0; row < 16; row++) std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile][row], 64);
}
inline void zero(int tile) { std::memset(tiles[tile], 0, sizeof tiles[tile]); }
// c += a b; a's word holds numbers 2 k and 2 k + 1 of a row, b's those of a column
inline void multiply(int c, int a, int b) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) {
      float sum = number(tiles[c][i][j]);
      for (int k = 0; k < 16; k++) {
        const uint32_t x = tiles[a][i][k], y = tiles[b][k][j];
        sum += number(x << 16) * number(y << 16) + number(x & 0xffff0000) * number(y & 0xffff0000);
      }
      std::memcpy(&tiles[c][i][j], &sum, 4);
    }
}

}  // namespace emulated

#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_dpbf16ps(c, a, b) emulated::multiply(c, a, b)
#define _tile_loadconfig(config) ((void)(config))
#define _tile_release() ((void)0)
