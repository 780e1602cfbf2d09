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
template <int kMostLevel>  // 2^kMostLevel segments at most
struct PairwiseSum {
  platform::Accumulator level[kMostLevel + 1];

  // Adds the sum of segment `index` of the wave's.
  M3_DEVICE_METHOD void add(platform::Accumulator sum, int index) {
    bool moving = true;
    M3_UNROLL for (int i = 0; i <= kMostLevel; ++i) {
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
  M3_DEVICE_METHOD platform::Accumulator of(int count) const {
    platform::Accumulator found = level[0];
    M3_UNROLL for (int i = 1; i <= kMostLevel; ++i) {
      M3_UNROLL for (int value = 0; value < platform::Accumulator::kValues; ++value) {
        if (count == 1 << i) found.value[value] = level[i].value[value];
      }
    }
    return found;
  }
};

// What a wave multiplies with the weights of one tile: activations from some K block on, cut into segments.
struct Run {
  Activations activations;
  int count;             // columns
  int steps, segments, segment_steps;
  int end;               // of the activations, from which on they are 0
};

// The products of a run, whose segments are added pairwise. All weights go through here, so that the code exists once.
template <class Format, class Shape>
M3_DEVICE_INLINE platform::Accumulator multiply_run(CopiedWeights<Format, Shape>& weights, const Run& run) {
  platform::ColumnsBf16 columns[CopiedWeights<Format, Shape>::kGroup][4];
  if (run.steps > 0) run.activations.load<Format>(columns[0], 0, run.end, whole_steps<Shape>());
  static_assert(kSegments == 8);
  constexpr int kLeastWaves = platform::kLeastWaves < platform::copying_team_waves(Shape::kMostRows) ? platform::kLeastWaves : platform::copying_team_waves(Shape::kMostRows);
  PairwiseSum<kLeastWaves >= 4 ? 1 : kLeastWaves >= 2 ? 2 : 3> sum;
  M3_ROLLED for (int segment = 0; segment < run.segments; ++segment) {
    platform::Accumulator one{};
    const int first = segment * run.segment_steps, after = first + run.segment_steps;
    multiply_copied<Format>(one, weights, run.activations, columns, first, after < run.steps ? after : run.steps, run.steps, run.count, run.end);
    sum.add(one, segment);
  }
  return sum.of(run.segments);
}

// Leaves a wave's sum of a gate and up task in shared memory, and ends the task before, if that fell to this wave.
template <class Format, class Shape>
M3_DEVICE_INLINE void leave_sum(Context<Shape>& context, const Team& team, const platform::Accumulator& sum, int& number, PendingTask& pending,
                                const UpTasks<Shape>& work) {
  constexpr int kMostParts = platform::copying_team_waves(Shape::kMostRows);
  auto& shared = context.shared;
  float(*const sums)[kTile * platform::kTileColumns] = &shared.partial[0][0];
  // Once more after the last task, for what is pending.
  if (work.valid()) {
    const int index = team.index * kTasksInFlight + number % kTasksInFlight;
    wait_for_signal(&shared.ended[index], number / kTasksInFlight);
    store_partial(sums[index * team.waves + team.wave], sum);
    platform::wave_barrier();
    if (platform::lane_index() == 0) platform::signal_add(&shared.arrived[index], 1);
  }
  if (pending.number >= 0) {
    const int index = team.index * kTasksInFlight + pending.place();
    end_task<Format, kMostParts>(context, team, team.waves, sums + index * team.waves, team.waves, pending);
    pending.number = -1;
  }
  if (!work.valid()) return;
  if (number % team.waves == team.wave) {
    const int slot = work.slot();
    pending = {number, slot, work.tile(), work.first_column(), work.count(slot), work.is_last_pass(slot)};
  }
  ++number;
}

// Stages shared_up, table, up and down. Where the shared expert's weights come early enough by themselves, its tasks are the first of stage up.
template <class Format, class Shape>
M3_DEVICE_INLINE void copied_experts(Context<Shape>& context) {
  enum : int { kSharedUp, kUp, kDown };
  auto& shared = context.shared;
  const Shape& shape = context.shape;
  const int hidden = shape.hidden(), intermediate = shape.intermediate(), lane = platform::lane_index();
  const int wave = platform::uniform(platform::wave_index());
  const Team team = team_for_copies<Shape>();
  const Part part = Part::of(team, hidden);
  const Tasks down_tasks = tasks_of_block(protocol::DOWN_START, protocol::down_tasks(hidden));
  CopiedWeights<Format, Shape> weights(context, wave, part.first_step, part.steps);
  UpTasks<Shape> up;
  DownShares<Shape> down;
  PendingTask pending{-1, 0, 0, 0, 0, false};
  int number = 0, first_down = down_tasks.first;
  M3_ROLLED for (int stage = platform::kSharedFirst ? kSharedUp : kUp; stage < kDown || first_down < down_tasks.count; ++stage) {
    const bool is_down = stage >= kDown;
    if (stage == kUp) table(context);
    if (stage <= kDown) context.stamp(6 + stage);
    if (stage >= kUp) down = DownShares<Shape>(context, wave, down_tasks, first_down);
    if (is_down) {
      if (stage == kDown && context.flight_outcome() == 0) context.record(protocol::FLIGHT_DOWN);
      if (stage > kDown) weights.go_on_with({}, down);
    } else {
      const int slots = stage == kSharedUp ? shared_slots(context) : shared.slot_count;
      up = UpTasks<Shape>(context, team, stage == kSharedUp ? protocol::SHARED_UP_START : protocol::UP_START,
                          platform::kSharedFirst ? stage : 1 - shared_slots(context), slots);
      // The first shares of stage down follow in the ring.
      weights.go_on_with(up, down);
    }
    weights.fill();
    M3_ROLLED while (is_down ? down.valid() : up.valid()) {
      const int slot = is_down ? down.slot : up.slot();
      const int first_column = is_down ? down.first_column() : up.first_column(), count = columns_of_pass(shared, slot, first_column);
      const short* picks = shared.column_pick + shared.slot_first[slot] + first_column;
      if (is_down && down.pass == 0) wait_for_slot(context, slot);
      Run run;
      run.count = count;
      run.steps = is_down ? blocks_of(intermediate) : part.steps;
      run.segments = is_down ? 1 : part.segments;
      run.segment_steps = is_down ? blocks_of(intermediate) : segment_of(hidden);
      run.end = is_down ? protocol::gate_up_tiles(intermediate) * protocol::GATE_UP_ROWS : protocol::hidden_stride(hidden);
      run.activations = Activations::of<Format>(0, count, is_down ? 0 : part.first_step, [&](int column) -> const Bits16* {
        if (is_down) return context.mid + protocol::mid_index(shape.rows(), intermediate, slot, first_column + column, 0);
        return context.x + protocol::x_index(hidden, row_of_pick(shape, picks[column]), 0);
      });
      const platform::Accumulator sum = multiply_run(weights, run);
      if (is_down) {
        auto& contribution = shared.contribution[down.which];
        M3_UNROLL for (int i = 0; i < platform::Accumulator::kValues; ++i) {
          const int column = platform::accumulator_column(lane, i);
          if (column < count) contribution[picks[column]][platform::accumulator_row(lane, i)] = sum.value[i];
        }
        down.advance();
      } else {
        leave_sum<Format>(context, team, sum, number, pending, up);
        up.advance();
      }
    }
    if (!is_down) {
      leave_sum<Format>(context, team, {}, number, pending, up);
      continue;
    }
    platform::block_barrier();
    announce_combined(context, first_down, down_tasks.stride, tasks_together(down_tasks, first_down));
    platform::block_barrier();
    first_down += platform::kDownTasks * down_tasks.stride;
  }
}

}  // namespace m3::ffn
