// Stage down: 16 output columns a task. Waves take the slots of the block's tasks in turn, multiply a slot's intermediate activations, and
// leave one contribution a pick; then each row combines its picks and the result goes to every rank, two columns a word.
// Waits, a slot at a time, for the slot's gate/up tiles, with the slot's weights already on their way. Reference: m3_kernels.reference.down.
//
// Order of the sum over K: ascending blocks of 128 as the platform's tile operation adds them. Combination, per rank and column, with both
// roundings at every pick (a format's global scale has multiplied the sum over K before, one fp32 rounding): t = bf16(shared), then t = bf16(t + bf16(weight_k * contribution_k)) for k in pick order.
#pragma once
#include "m3/ffn/down_work.h"

namespace m3::ffn {

// Waits for every gate/up tile of a slot; the wave sees MID afterwards. The first wave of the block to see a slot tells the others.
template <class Shape>
M3_DEVICE_INLINE void wait_for_slot(Context<Shape>& context, int slot) {
  constexpr int kTogether = 4;
  int* ready = &context.shared.slot_ready[slot];
  // All lanes take one way: another wave may raise the flag between two lanes' looks.
  if (platform::of_first_lane(platform::signalled(ready)) != 0) return;
  const int intermediate = context.shape.intermediate(), tiles = protocol::gate_up_tiles(intermediate);
  const Bits64* pairs = context.intermediate_pairs + protocol::intermediate_pair_index(intermediate, slot, 0);
  bool came = true;
  for (int first = platform::lane_index(); first < tiles; first += kTogether * platform::kWaveWidth) {
    const int rest = (tiles - first + platform::kWaveWidth - 1) / platform::kWaveWidth;
    Bits64 word[kTogether];
    came &= wait_for_words<Scope::device_data>(
        context.line, Site::DOWN, Source::own_blocks, context.tag, rest < kTogether ? rest : kTogether,
        [&](int i) { return pairs + first + i * platform::kWaveWidth; }, word);
  }
  context.note(came);
  platform::acquire_device();
  platform::wave_barrier();
  if (platform::lane_index() == 0 && !platform::flag_is_set(&context.shared.failed)) platform::signal(ready, 1);
}

// This wave's shares of the tasks that the block takes together.
template <class Format, class Shape>
M3_DEVICE_INLINE void down_shares(Context<Shape>& context, DownWork<Format, Shape> work) {
  auto& shared = context.shared;
  const Shape& shape = context.shape;
  const int rows = shape.rows(), intermediate = shape.intermediate();
  const int end = protocol::gate_up_tiles(intermediate) * protocol::GATE_UP_ROWS;
  const int lane = platform::lane_index();
  WeightStream<Format, DownWork<Format, Shape>> stream(down_matrices<Format>(context), work);
  platform::ColumnsBf16 columns[2][4];
  platform::Accumulator sum{};
  M3_ROLLED while (work.valid()) {
    const int slot = work.slot(), count = work.count();
    const float scale = global_scale<Format>(context.arguments.g2, shared.slot_expert[slot]);
    const Activations now = Activations::of<Format>(work.first_column(), count, work.group * work.kGroup, [&](int column) -> const Bits16* {
      return context.mid + protocol::mid_index(rows, intermediate, slot, column, 0);
    });
    if (work.group == 0) {
      if (work.pass == 0) wait_for_slot(context, slot);
      now.load<Format>(columns[0], 0, end, work.whole());
    }
    multiply_group<Format>(sum, stream, columns, now, work.steps(), count, end, work.whole(), [&](platform::ColumnsBf16 (&into)[4]) {
      if (!work.ends_pass()) now.load<Format>(into, work.kGroup, end, work.whole());
    });
    if (work.ends_pass()) {
      auto& contribution = shared.contribution[work.which()];
      const short* picks = shared.column_pick + shared.slot_first[slot] + work.first_column();
      M3_UNROLL for (int i = 0; i < platform::Accumulator::kValues; ++i) {
        const int column = platform::accumulator_column(lane, i);
        if (column < count) contribution[picks[column]][platform::accumulator_row(lane, i)] = scaled<Format>(sum.value[i], scale);
      }
      sum = {};
    }
    work.advance();
  }
}

// A row's combined value in one of a task's columns; 0 in a padded row.
template <class Shape>
M3_DEVICE_INLINE Bits32 combine(Context<Shape>& context, int which, int row, int column) {
  if (context.is_padded(row)) return 0;
  const auto& contribution = context.shared.contribution[which];
  const int top_k = context.shape.top_k();
  float t = round_to_bf16(contribution[top_k * context.shape.rows() + row][column]);
  M3_UNROLL for (int k = 0; k < Shape::kMostTopK; ++k) {
    if (k >= top_k) continue;
    const int pick = top_k * row + k;
    t = round_to_bf16(t + round_to_bf16(context.shared.pick_weight[pick] * contribution[pick][column]));
  }
  return float_to_bf16(t);
}

template <class Format, class Shape>
M3_DEVICE_INLINE void down(Context<Shape>& context) {
  const Shape& shape = context.shape;
  const int hidden = shape.hidden(), rows = shape.rows();
  const Tasks tasks = tasks_of_block(protocol::DOWN_START, protocol::down_tasks(hidden));
  for (int first = tasks.first; first < tasks.count; first += platform::kDownTasks * tasks.stride) {
    const int together = tasks_together(tasks, first);
    down_shares<Format>(context, DownWork<Format, Shape>(context, platform::uniform(platform::wave_index()), first, tasks.stride, together));
    platform::block_barrier();
    for (int item = platform::thread_index(); item < together * rows * protocol::DOWN_PAIRS; item += platform::block_threads()) {
      const int in_task = item % protocol::DOWN_PAIRS, row = item / protocol::DOWN_PAIRS % rows, which = item / protocol::DOWN_PAIRS / rows;
      const int column_pair = (first + which * tasks.stride) * protocol::DOWN_PAIRS + in_task;
      if (column_pair >= protocol::column_pairs(hidden) || !context.may_announce(Site::FINAL)) continue;
      const Bits64 word =
          context.pair(protocol::pack_bf16_pair(combine(context, which, row, 2 * in_task), combine(context, which, row, 2 * in_task + 1)));
      for (int i = 0; i < shape.world(); ++i) {
        const int target = (context.line.rank + i) % shape.world();
        platform::store_system(context.ffn_pair(target, context.line.rank, row, column_pair), word);
      }
    }
    platform::block_barrier();
  }
}

}  // namespace m3::ffn
