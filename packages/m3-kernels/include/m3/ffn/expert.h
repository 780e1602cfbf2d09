// What the two expert stages share: the columns of a slot, their activations, and the products of a group of K blocks.
#pragma once
#include "m3/ffn/norm.h"
#include "m3/ffn/stream.h"
#include "m3/ffn/table.h"

namespace m3::ffn {

// Columns that a task multiplies at a time; a slot with more takes its weights again.
constexpr int kPassColumns = platform::kTileColumns;

// Columns of a slot.
template <class Shape>
M3_DEVICE_INLINE int slot_columns(const Shared<Shape>& shared, int slot) {
  return shared.slot_first[slot + 1] - shared.slot_first[slot];
}

// The global scale of an expert's matrix; 1, and nothing to multiply by, in formats that have none.
template <class Format>
M3_DEVICE_INLINE float global_scale(const float* scales, int expert) {
  if constexpr (Format::kHasGlobalScale) return platform::load_kept(scales + expert);
  return 1.0f;
}
template <class Format>
M3_DEVICE_INLINE float scaled(float sum, float scale) {
  return Format::kHasGlobalScale ? sum * scale : sum;
}

// Where the activations that a lane multiplies lie, from some K block on. Past the last column of a pass it is the last one again: a
// column's sums depend on that column alone, and nobody reads those sums.
struct Activations {
  const unsigned char* runs;
  int block;

  // `values_of(c)` is the start of column c of the slot, of which the pass begins with `first_column` and has `count`.
  template <class Format, class ValuesOf>
  M3_DEVICE_METHOD static Activations of(int first_column, int count, int block, ValuesOf values_of) {
    const int lane = platform::lane_index(), column = platform::fragment_column(lane, 0);
    const Bits16* values = values_of(first_column + (column < count ? column : count - 1));
    return {reinterpret_cast<const unsigned char*>(values + Format::run_k(0, platform::fragment_group(lane)) + kBlockK * block), block};
  }

  // The runs of the i-th K block; 0 from `end` on. `whole`: every step of every group has a K block.
  template <class Format>
  M3_DEVICE_METHOD void load(platform::ColumnsBf16 (&columns)[4], int i, int end, bool whole) const {
    static_assert(platform::kFragmentColumns == 1);
    M3_UNROLL for (int step = 0; step < 4; ++step) {
      const int k = kBlockK * (block + i) + Format::run_k(step, platform::fragment_group(platform::lane_index()));
      Bytes16 run{};
      if ((whole && end % kBlockK == 0) || k < end) {
        run = platform::load_data(reinterpret_cast<const Bytes16*>(runs + 2 * (kBlockK * i + Format::run_k(step, 0))));
      }
      columns[step].chunk[0] = run;
    }
  }
};

// Multiplies the next group of a stream, of which `steps` have K blocks. The first step's activations are in columns[0]; each further step's
// are loaded a step ahead, and `load_following` begins with those of the group that follows: they are in columns[0] afterwards.
template <class Format, class Work, class LoadFollowing>
M3_DEVICE_INLINE void multiply_group(platform::Accumulator& sum, WeightStream<Format, Work>& stream, platform::ColumnsBf16 (&columns)[2][4],
                                     const Activations& activations, int steps, int count, int end, bool whole, LoadFollowing load_following) {
  constexpr int kGroup = Work::kGroup;
  stream.take_group([&](int i, const typename Format::Block& weights) {
    if (i + 1 < kGroup) {
      activations.load<Format>(columns[(i + 1) % 2], i + 1, end, whole);
    } else {
      load_following(columns[(i + 1) % 2]);
    }
    if (!whole && i >= steps) return;
    platform::RowsBf16 rows[4];
    Format::widen(weights, rows);
    platform::multiply_bf16(sum, rows, columns[i % 2], count);
  });
  if (kGroup % 2 == 1) {
    M3_UNROLL for (int step = 0; step < 4; ++step) columns[0][step] = columns[1][step];
  }
}

}  // namespace m3::ffn
