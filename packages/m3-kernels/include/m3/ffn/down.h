// Stage down: 16 output columns a task. Waves take slots in turn, multiply the slot's intermediate activations, and leave one contribution a
// pick; then each row combines its picks and the result goes to every rank, two columns a word.
// Waits, a slot at a time, for the slot's gate/up tiles, with the slot's weights already on their way. Reference: m3_kernels.reference.down.
//
// Order of the sum over K: ascending blocks of 128 as the platform's tile operation adds them. Combination, per rank and column, with both
// roundings at every pick: t = bf16(shared), then t = bf16(t + bf16(weight_k * contribution_k)) for k in pick order.
#pragma once
#include "m3/ffn/gate_up.h"

namespace m3::ffn {

template <class Format>
struct DownSource {
  using Step = typename Format::Block;
  typename Format::Matrices matrices;
  int expert, task;

  M3_DEVICE_METHOD Step load(int step) const { return matrices.load(expert, task * kTile, step); }
};

// Waits for every gate/up tile of a slot; the wave sees MID afterwards.
template <class Shape>
M3_DEVICE_INLINE void wait_for_slot(Context<Shape>& context, int slot) {
  const int intermediate = context.shape.intermediate(), tiles = protocol::gate_up_tiles(intermediate);
  bool came = true;
  for (int tile = platform::lane_index(); tile < tiles; tile += platform::kWaveWidth) {
    Bits64 word[1];
    came &= wait_for_words<Scope::device>(
        context.line, Site::DOWN, Source::own_blocks, context.tag, 1,
        [&](int) { return context.intermediate_pairs + protocol::intermediate_pair_index(intermediate, slot, tile); }, word);
  }
  context.note(came);
  platform::wave_barrier();
  platform::acquire_device();
}

// One slot of one task, by one wave. `pick_of_column(c)` is the pick of the slot's column c.
template <class Format, class Shape, class PickOfColumn>
M3_DEVICE_INLINE void down_slot(Context<Shape>& context, int task, int expert, int slot, int count, PickOfColumn pick_of_column) {
  constexpr int kColumnTiles = (Shape::kMostRows + kTile - 1) / kTile;
  const Shape& shape = context.shape;
  const int hidden = shape.hidden(), intermediate = shape.intermediate(), rows = shape.rows();
  const int blocks = protocol::ceil_div(intermediate, kBlockK), column_tiles = protocol::ceil_div(count, kTile);
  const int written = protocol::gate_up_tiles(intermediate) * kTile;
  const DownSource<Format> source{{context.arguments.w2, context.arguments.s2, hidden, intermediate}, expert, task};
  WeightRing<DownSource<Format>, Format::kDepth> ring(source, blocks);
  wait_for_slot(context, slot);
  platform::Accumulator sum[kColumnTiles] = {};
  M3_UNROLL for (int block = 0; block < blocks; ++block) {
    platform::FragmentBf16 weights[4];
    Format::widen(ring.take(block), weights);
    M3_UNROLL for (int column_tile = 0; column_tile < kColumnTiles; ++column_tile) {
      if (column_tile >= column_tiles) continue;
      const int first_column = column_tile * kTile;
      const int columns = count - first_column < kTile ? count - first_column : kTile;
      platform::FragmentBf16 mid[4];
      load_activations<Format>(mid, block, written, [&](int column) -> const Bits16* {
        return column < columns ? context.mid + protocol::mid_index(rows, intermediate, slot, first_column + column, 0) : nullptr;
      });
      platform::multiply_bf16(sum[column_tile], weights, mid, columns);
    }
  }
  const int lane = platform::lane_index();
  M3_UNROLL for (int column_tile = 0; column_tile < kColumnTiles; ++column_tile) {
    M3_UNROLL for (int i = 0; i < platform::Accumulator::kValues; ++i) {
      const int column = column_tile * kTile + platform::accumulator_column(lane, i);
      if (column < count) context.shared.contribution[pick_of_column(column)][platform::accumulator_row(lane, i)] = sum[column_tile].value[i];
    }
  }
}

// A row's combined value in one of the task's columns; 0 in a padded row.
template <class Shape>
M3_DEVICE_INLINE Bits32 combine(Context<Shape>& context, int row, int column) {
  if (context.is_padded(row)) return 0;
  const int top_k = context.shape.top_k();
  float t = round_to_bf16(context.shared.contribution[top_k * context.shape.rows() + row][column]);
  M3_UNROLL for (int k = 0; k < Shape::kMostTopK; ++k) {
    if (k >= top_k) continue;
    const int pick = top_k * row + k;
    t = round_to_bf16(t + round_to_bf16(context.shared.pick_weight[pick] * context.shared.contribution[pick][column]));
  }
  return float_to_bf16(t);
}

template <class Format, class Shape>
M3_DEVICE_INLINE void down(Context<Shape>& context) {
  const Shape& shape = context.shape;
  auto& shared = context.shared;
  const int hidden = shape.hidden(), rows = shape.rows(), top_k = shape.top_k();
  const Tasks tasks = tasks_of_block(protocol::DOWN_START, protocol::down_tasks(hidden));
  for (int task = tasks.first; task < tasks.count; task += tasks.stride) {
    for (int slot = platform::wave_index(); slot <= shared.routed_count; slot += platform::wave_count()) {
      if (slot == 0) {
        if (shared.valid_count == 0) continue;
        down_slot<Format>(context, task, shape.experts(), 0, shared.valid_count, [&](int column) { return top_k * rows + shared.valid_row[column]; });
      } else {
        const int first = shared.slot_first[slot - 1];
        down_slot<Format>(context, task, shared.slot_expert[slot - 1], slot, shared.slot_first[slot] - first,
                          [&](int column) { return static_cast<int>(shared.sorted_pick[first + column]); });
      }
    }
    platform::block_barrier();
    for (int item = platform::thread_index(); item < rows * protocol::DOWN_PAIRS; item += platform::block_threads()) {
      const int row = item / protocol::DOWN_PAIRS, in_task = item % protocol::DOWN_PAIRS;
      const int column_pair = task * protocol::DOWN_PAIRS + in_task;
      if (column_pair >= protocol::column_pairs(hidden) || !context.may_announce(Site::FINAL)) continue;
      const Bits64 word = context.pair(protocol::pack_bf16_pair(combine(context, row, 2 * in_task), combine(context, row, 2 * in_task + 1)));
      for (int i = 0; i < shape.world(); ++i) {
        const int target = (context.line.rank + i) % shape.world();
        platform::store_system(context.ffn_pair(target, context.line.rank, row, column_pair), word);
      }
    }
    platform::block_barrier();
  }
}

}  // namespace m3::ffn
