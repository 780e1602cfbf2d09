// Stages shared_up, table, up and down for formats whose weights are copied into shared memory. What is computed is what gate_up.h and down.h
// compute; the waves of a block take it in other portions, since a copy's weights wait in the ring and not in registers.
#pragma once
#include "m3/ffn/down.h"
#include "m3/ffn/gate_up.h"
#include "m3/ffn/ring.h"

namespace m3::ffn {

// A wave's part of a tile's K: neighbouring segments, as many for every wave of a team.
struct Part {
  int segments, first_step, steps;

  M3_DEVICE_METHOD static Part of(const Team& team, int hidden) {
    const int own = kSegments / team.waves, length = own * segment_of(hidden), first = team.wave * length, left = blocks_of(hidden) - first;
    return {own, first, left < 0 ? 0 : left < length ? left : length};
  }
};

// The team of a wave: a power of two of waves, so that each takes as many segments. Waves that are left over have a team beyond the last.
template <class Shape>
M3_DEVICE_INLINE Team team_for_copies() {
  const int waves = platform::wave_count(), wave = platform::uniform(platform::wave_index());
  int own = platform::copying_team_waves(Shape::kMostRows);
  while (own > waves) own /= 2;
  return Team{wave / own, waves / own, wave % own, own};
}

// Sums of neighbouring segments, added pairwise as they come: level i holds the sum of 2^i segments.
struct PairwiseSum {
  static constexpr int kLevels = 3;  // 2^3 segments
  static_assert(kSegments == 1 << kLevels);
  platform::Accumulator level[kLevels + 1];

  // Adds the sum of segment `index` of the wave's.
  M3_DEVICE_METHOD void add(platform::Accumulator sum, int index) {
    bool moving = true;
    M3_UNROLL for (int i = 0; i <= kLevels; ++i) {
      if (!moving) continue;
      moving = (index >> i & 1) != 0;
      M3_UNROLL for (int value = 0; value < platform::Accumulator::kValues; ++value) {
        if (moving) {
          sum.value[value] = level[i].value[value] + sum.value[value];
        } else {
          level[i].value[value] = sum.value[value];
        }
      }
    }
  }
  // The sum of `count` segments, a power of two, all added.
  M3_DEVICE_METHOD const platform::Accumulator& of(int count) const {
    return count == 8 ? level[3] : count == 4 ? level[2] : count == 2 ? level[1] : level[0];
  }
};

// The gate and up tasks of slots `first_slot` to `end_slot` - 1; see gate_up.
template <class Format, class Shape>
M3_DEVICE_INLINE void gate_up_copied(Context<Shape>& context, CopiedWeights<Format, Shape>& weights, const Team& team, const Part& part, int& number,
                                     UpTasks<Shape> work) {
  constexpr int kMostParts = platform::copying_team_waves(Shape::kMostRows);
  auto& shared = context.shared;
  const Shape& shape = context.shape;
  const int hidden = shape.hidden(), end = protocol::hidden_stride(hidden), segment = segment_of(hidden);
  float(*const sums)[kTile * platform::kTileColumns] = &shared.partial[0][0];
  PendingTask pending{-1, 0, 0, 0, 0, false};
  const auto end_pending = [&] {
    end_task<Format, kMostParts>(context, team, team.waves, sums + (team.index * kTasksInFlight + pending.place()) * team.waves, team.waves, pending);
  };
  M3_ROLLED for (; work.valid(); work.advance()) {
    const int slot = work.slot(), first_column = work.first_column(), count = work.count(slot);
    const short* picks = shared.column_pick + shared.slot_first[slot];
    const Activations activations = Activations::of<Format>(first_column, count, part.first_step, [&](int column) -> const Bits16* {
      return context.x + protocol::x_index(hidden, row_of_pick(shape, picks[column]), 0);
    });
    platform::ColumnsBf16 columns[CopiedWeights<Format, Shape>::kGroup][4];
    if (part.steps > 0) activations.load<Format>(columns[0], 0, end, true);
    PairwiseSum sum;
    M3_ROLLED for (int own = 0; own < part.segments; ++own) {
      platform::Accumulator one{};
      const int first = own * segment, after = first + segment;
      multiply_copied<Format>(one, weights, activations, columns, first, after < part.steps ? after : part.steps, part.steps, count, end);
      sum.add(one, own);
    }
    const int place = number % kTasksInFlight, index = team.index * kTasksInFlight + place;
    wait_for_signal(&shared.ended[index], number / kTasksInFlight);
    store_partial(sums[index * team.waves + team.wave], sum.of(part.segments));
    platform::wave_barrier();
    if (platform::lane_index() == 0) platform::signal_add(&shared.arrived[index], 1);
    if (pending.number >= 0) {
      end_pending();
      pending.number = -1;
    }
    if (number % team.waves == team.wave) pending = {number, slot, work.tile(), first_column, count, work.is_last_pass(slot)};
    ++number;
  }
  if (pending.number >= 0) end_pending();
}

// A wave's shares of the tasks of stage down that the block takes together; see down_shares.
template <class Format, class Shape>
M3_DEVICE_INLINE void down_copied_shares(Context<Shape>& context, CopiedWeights<Format, Shape>& weights, DownShares<Shape> work) {
  auto& shared = context.shared;
  const Shape& shape = context.shape;
  const int rows = shape.rows(), intermediate = shape.intermediate(), steps = blocks_of(intermediate), lane = platform::lane_index();
  const int end = protocol::gate_up_tiles(intermediate) * protocol::GATE_UP_ROWS;
  M3_ROLLED for (; work.valid(); work.advance()) {
    const int slot = work.slot, count = work.count();
    if (work.pass == 0) wait_for_slot(context, slot);
    const Activations activations = Activations::of<Format>(work.first_column(), count, 0, [&](int column) -> const Bits16* {
      return context.mid + protocol::mid_index(rows, intermediate, slot, column, 0);
    });
    platform::ColumnsBf16 columns[CopiedWeights<Format, Shape>::kGroup][4];
    activations.load<Format>(columns[0], 0, end, true);
    platform::Accumulator sum{};
    multiply_copied<Format>(sum, weights, activations, columns, 0, steps, steps, count, end);
    auto& contribution = shared.contribution[work.which];
    const short* picks = shared.column_pick + shared.slot_first[slot] + work.first_column();
    M3_UNROLL for (int i = 0; i < platform::Accumulator::kValues; ++i) {
      const int column = platform::accumulator_column(lane, i);
      if (column < count) contribution[picks[column]][platform::accumulator_row(lane, i)] = sum.value[i];
    }
  }
}

template <class Format, class Shape>
M3_DEVICE_INLINE void copied_experts(Context<Shape>& context) {
  const Shape& shape = context.shape;
  const Team team = team_for_copies<Shape>();
  const int wave = platform::uniform(platform::wave_index());
  const Part part = Part::of(team, shape.hidden());
  const Tasks down_tasks = tasks_of_block(protocol::DOWN_START, protocol::down_tasks(shape.hidden()));
  CopiedWeights<Format, Shape> weights(context, wave, part.first_step, part.steps);
  int number = 0;
  // Where the shared expert's weights come early enough by themselves, its tasks are the first of the picked experts'.
  M3_ROLLED for (int routed = platform::kSharedFirst ? 0 : 1; routed < 2; ++routed) {
    if (routed) table(context);
    context.stamp(6 + routed);
    const int first_slot = platform::kSharedFirst ? routed : 1 - shared_slots(context);
    const UpTasks<Shape> up(context, team, routed ? protocol::UP_START : protocol::SHARED_UP_START, first_slot,
                            routed ? context.shared.slot_count : shared_slots(context));
    weights.go_on_with(up);
    if (routed) weights.go_on_with(DownShares<Shape>(context, wave, down_tasks, down_tasks.first));
    weights.fill();
    gate_up_copied<Format>(context, weights, team, part, number, up);
  }
  context.stamp(8);
  if (context.flight_outcome() == 0) context.record(protocol::FLIGHT_DOWN);
  M3_ROLLED for (int first = down_tasks.first; first < down_tasks.count; first += platform::kDownTasks * down_tasks.stride) {
    const DownShares<Shape> shares(context, wave, down_tasks, first);
    if (first != down_tasks.first) weights.go_on_with(shares);
    weights.fill();
    down_copied_shares<Format>(context, weights, shares);
    platform::block_barrier();
    announce_combined(context, first, down_tasks.stride, tasks_together(down_tasks, first));
    platform::block_barrier();
  }
}

}  // namespace m3::ffn
