// The matrix tile operation of the CPU target.
//
// The lanes of a wave lay down their fragments; the last one to come computes the tile for all, sixteen rows at a time. Each element is
// added on its own, K ascending, one rounding a product and one a sum, so that the width of the vectors cannot be seen in the result.
#pragma once
#include <cstring>

#include "m3/platform/cpu/block.h"
#include "m3/types.h"

// The same code for wider vectors, chosen when the library is loaded. ThreadSanitizer cannot run that early.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__OPTIMIZE__) && !defined(M3_TSAN) && !defined(M3_ASAN)
#define M3_WIDER_VECTORS __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define M3_WIDER_VECTORS
#endif

namespace m3::platform::cpu {

typedef Bits16 EightHalves __attribute__((vector_size(16)));
typedef Bits32 FourWords __attribute__((vector_size(16)));
typedef float SixteenFloats __attribute__((vector_size(64)));

// Eight rows of eight 16-bit values, turned: result i holds value i of every row.
inline void transpose(EightHalves (&x)[8]) {
  const EightHalves low{0, 8, 1, 9, 2, 10, 3, 11}, high{4, 12, 5, 13, 6, 14, 7, 15};
  for (int round = 0; round < 3; ++round) {
    EightHalves y[8];
    for (int i = 0; i < 4; ++i) {
      y[2 * i] = __builtin_shuffle(x[i], x[i + 4], low);
      y[2 * i + 1] = __builtin_shuffle(x[i], x[i + 4], high);
    }
    for (int i = 0; i < 8; ++i) x[i] = y[i];
  }
}

// A step of bf16 rows as fp32 columns: columns[k][row], k from the step's first.
inline void widen_rows_bf16(const Bytes16 (&rows)[4][kTile], float (*columns)[kTile]) {
  for (int group = 0; group < 4; ++group) {
    for (int half = 0; half < 2; ++half) {
      EightHalves x[8];
      std::memcpy(x, &rows[group][8 * half], sizeof x);
      transpose(x);
      const EightHalves zero{};
      for (int e = 0; e < 8; ++e) {
        const EightHalves lower = __builtin_shuffle(zero, x[e], EightHalves{0, 8, 1, 9, 2, 10, 3, 11});
        const EightHalves upper = __builtin_shuffle(zero, x[e], EightHalves{4, 12, 5, 13, 6, 14, 7, 15});
        std::memcpy(&columns[8 * group + e][8 * half], &lower, 16);
        std::memcpy(&columns[8 * group + e][8 * half + 4], &upper, 16);
      }
    }
  }
}

inline void widen_rows_f32(const Bytes16 (&rows)[4][kTile], float (*columns)[kTile]) {
  for (int group = 0; group < 4; ++group) {
    for (int e = 0; e < 4; ++e) {
      for (int row = 0; row < kTile; ++row) std::memcpy(&columns[4 * group + e][row], &rows[group][row].word[e], 4);
    }
  }
}

// sum[column][row] += a . b over `steps` steps of bf16 (`run` 8) or fp32 (`run` 4) values.
M3_WIDER_VECTORS inline void compute_tile(TileExchange& tile, int steps, int run, int columns) {
  alignas(64) float a[kTileDepth][kTile];
  alignas(64) float b[kTileDepth];
  for (int step = 0; step < steps; ++step) {
    if (run == 8) {
      widen_rows_bf16(tile.a[step], a + 32 * step);
    } else {
      widen_rows_f32(tile.a[step], a + 16 * step);
    }
  }
  const int depth = 4 * run * steps;
  for (int column = 0; column < columns; ++column) {
    if (run == 8) {
      const Bits16* values = reinterpret_cast<const Bits16*>(tile.b[column]);
      for (int k = 0; k < depth; ++k) {
        Bits16 half;
        std::memcpy(&half, values + k, 2);
        const Bits32 bits = static_cast<Bits32>(half) << 16;
        std::memcpy(&b[k], &bits, 4);
      }
    } else {
      std::memcpy(b, tile.b[column], static_cast<std::size_t>(depth) * sizeof(float));
    }
    SixteenFloats sum;
    std::memcpy(&sum, tile.sum[column], sizeof sum);
    for (int k = 0; k < depth; ++k) {
      SixteenFloats values;
      std::memcpy(&values, a[k], sizeof values);
      sum += values * b[k];
    }
    std::memcpy(tile.sum[column], &sum, sizeof sum);
  }
}

// Counts a lane's arrival at the tile; true for the last one, which then sees what all have laid down.
M3_SWITCHES_STACK inline bool arrives_last(TileExchange& tile, int lanes) {
  order_before(&tile.key);
  if (++tile.arrived < lanes) return false;
  tile.arrived = 0;
  order_after(&tile.key);
  return true;
}

}  // namespace m3::platform::cpu
