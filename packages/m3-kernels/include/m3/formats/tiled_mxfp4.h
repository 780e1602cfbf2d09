// MXFP4 expert weights in tiles, for targets that copy weights into shared memory: what a wave multiplies in one step, 16 rows by 128 K, lies
// together, codes first, and the steps of a tile follow each other. m3_kernels.formats.tiled makes the layout and describes it.
// Scale codes are at most 128: larger ones are refused when the layout is made.
#pragma once
#include "m3/bf16.h"

namespace m3::formats {

struct TiledMxfp4 {
  static constexpr bool kCopied = true;
  static constexpr int kCodeBytes = 1024, kScaleBytes = 64, kStepBytes = kCodeBytes + kScaleBytes;

  // Activations lie as they are: a word's codes are spread so that its pairs come out in order.
  M3_DEVICE_METHOD static constexpr int element(int place) { return place; }

  // A lane's share of a step: for each of its rows one group of 32 codes and the group's scale.
  struct Block {
    Bytes16 codes[platform::kFragmentRows];
    Bits32 scale[platform::kFragmentRows];
  };

  // A lane's 16 bytes are 32 consecutive K, so its runs in the four tile steps follow each other.
  M3_DEVICE_METHOD static constexpr int run_k(int step, int group) { return 32 * group + 8 * step; }

  // Rows r and r + 8 of a group are a pair: their codes lie 512 bytes apart, their scales are neighbours.
  M3_DEVICE_METHOD static void read(Block& into, const unsigned char* step) {
    const int lane = platform::lane_index(), group = platform::fragment_group(lane);
    M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
      const int row = platform::fragment_row(lane, chunk), pair = 4 * (row % 8) + group;
      into.codes[chunk] = *reinterpret_cast<const Bytes16*>(step + row / 8 * 512 + 16 * pair);
      into.scale[chunk] = step[kCodeBytes + 2 * pair + row / 8];
    }
  }

  M3_DEVICE_METHOD static void widen(const Block& block, platform::RowsBf16 (&rows)[4]) {
    M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
      const Bits32 factor = platform::spread_fp4_factor(block.scale[chunk]);
      M3_UNROLL for (int run = 0; run < 4; ++run) platform::widen_spread_fp4(block.codes[chunk].word[run], factor, rows[run].chunk[chunk].word);
    }
  }
};

}  // namespace m3::formats
