// BF16 expert weights: [experts + 1, rows, K], row major. Any even K; 16-byte loads where K is a multiple of 8.
#pragma once
#include "m3/bf16.h"

namespace m3::formats {

struct Bf16 {
  // Steps of a wave in flight; a step of gate and up is 128 bytes a fragment row, and registers hold them.
  static constexpr int kDepth = 2 / platform::kFragmentRows;

  // A lane's share of 16 rows x 128 K: for each of its rows, the runs of four 32-deep tile steps.
  struct Block {
    platform::FragmentBf16 run[4];
  };

  // K of the first value of a lane's run in tile step `step` of a block: the four groups of a step are neighbours, so that four lanes
  // read 64 bytes of a row together.
  M3_DEVICE_METHOD static int run_k(int step, int group) { return 32 * step + 8 * group; }

  struct Matrices {
    const unsigned char* weights;
    const unsigned char* scales;  // none
    int rows;
    int k;

    // 16 rows from `first_row` on of `expert`, K block `block`. Rows past the matrix repeat its last one; K past its end is 0.
    M3_DEVICE_METHOD Block load(int expert, int first_row, int block) const {
      const int lane = platform::lane_index(), group = platform::fragment_group(lane);
      Block loaded;
      M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
        const int wanted = first_row + platform::fragment_row(lane, chunk);
        const long long row = static_cast<long long>(expert) * rows + (wanted < rows ? wanted : rows - 1);
        const Bits16* values = reinterpret_cast<const Bits16*>(weights) + row * k;
        M3_UNROLL for (int step = 0; step < 4; ++step) loaded.run[step].chunk[chunk] = load_run(values, 128 * block + run_k(step, group));
      }
      return loaded;
    }

    M3_DEVICE_METHOD Bytes16 load_run(const Bits16* values, int first) const {
      if (k % 8 == 0 && first + 8 <= k) return platform::load_streamed(values + first);
      Bytes16 run{};
      for (int i = 0; i < 8; ++i) {
        if (first + i < k) run.word[i / 2] |= static_cast<Bits32>(values[first + i]) << (16 * (i % 2));
      }
      return run;
    }
  };

  M3_DEVICE_METHOD static void widen(const Block& block, platform::FragmentBf16 (&fragment)[4]) {
    M3_UNROLL for (int step = 0; step < 4; ++step) fragment[step] = block.run[step];
  }
};

}  // namespace m3::formats
