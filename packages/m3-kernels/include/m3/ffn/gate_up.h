// Gate and up projections of one expert and the activation between: 8 gate rows and the same 8 up rows a task, a tile of the slot's columns.
// Stages shared_up (the shared expert, as soon as X is there) and up (the routed experts, once the table is there) are made of it.
// Reference: m3_kernels.reference.gate_up.
//
// Order of the sum: K blocks of 128 are dealt to 8 segments in runs, each summed as the platform's tile operation does, four 32-deep steps a
// block, the segments in order. Activation: g = min(g, limit), u = clamp(u, -limit, limit), g * sigmoid(alpha g) * (u + beta), a NaN stays;
// rounded to bf16 once. A format's global scale multiplies the sum of the segments, one fp32 rounding, before the activation.
//
// No wave waits for the others of its team: each leaves its segments' sums in shared memory and goes on with the next task. The waves end the
// tasks in turn, a task later, when its sums are there as a rule.
#pragma once
#include "m3/ffn/prefetch.h"
#include "m3/ffn/route.h"

namespace m3::ffn {

M3_DEVICE_INLINE float swiglu(float gate, float up, const Constants& constants) {
  const float limit = constants.swiglu_limit;
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  return g * sigmoid(constants.swiglu_alpha * g) * (u + constants.swiglu_beta);
}

// A wave's place in the tasks of its team: a tile of a slot, a pass over some of its columns, one of the wave's segments, a group of the
// segment's K blocks. The wave has segments wave, wave + waves, ... of every task.
template <class Format, class Shape>
struct GateUpWork {
  M3_DEVICE_METHOD static constexpr int blocks_of(int k) { return (k + kBlockK - 1) / kBlockK; }
  M3_DEVICE_METHOD static constexpr int segment_of(int k) { return (blocks_of(k) + kSegments - 1) / kSegments; }
  M3_DEVICE_METHOD static constexpr int group_of_shape() {
    if constexpr (Shape::kIsStatic) return group_of(segment_of(Shape::hidden()), Format::kDepth);
    return Format::kDepth;
  }
  static constexpr int kGroup = group_of_shape();

  const Shared<Shape>* shared;
  Tasks tasks;
  int task, pass, own, group;
  int first_slot, hidden, intermediate;
  Team team;

  M3_DEVICE_METHOD GateUpWork(Context<Shape>& context, const Team& own_team, int start, int first, int end)
      : shared(&context.shared),
        tasks(tasks_of_team(own_team, start, protocol::gate_up_tiles(context.shape.intermediate()) * (end - first))),
        task(tasks.first),
        pass(0),
        own(0),
        group(0),
        first_slot(first),
        hidden(context.shape.hidden()),
        intermediate(context.shape.intermediate()),
        team(own_team) {}

  M3_DEVICE_METHOD int tiles() const { return protocol::gate_up_tiles(intermediate); }
  M3_DEVICE_METHOD int slot() const { return first_slot + task / tiles(); }
  M3_DEVICE_METHOD int tile_index() const { return task % tiles(); }
  M3_DEVICE_METHOD int first_column() const { return pass * kPassColumns; }
  M3_DEVICE_METHOD bool is_last_pass() const { return Shape::kMostRows <= kPassColumns || first_column() + kPassColumns >= slot_columns(*shared, slot()); }
  M3_DEVICE_METHOD int count() const {
    const int left = slot_columns(*shared, slot()) - first_column();
    return left < kPassColumns ? left : kPassColumns;
  }

  M3_DEVICE_METHOD int segments() const { return protocol::ceil_div(blocks_of(hidden), segment_of(hidden)); }
  M3_DEVICE_METHOD int own_segments() const { return kOwnSegments == 1 ? 1 : (segments() - team.wave - 1) / team.waves + 1; }
  M3_DEVICE_METHOD int groups() const { return (segment_of(hidden) + kGroup - 1) / kGroup; }
  M3_DEVICE_METHOD int first_block() const { return (team.wave + own * team.waves) * segment_of(hidden) + group * kGroup; }
  // Whether groups fill segments, and segments the blocks.
  M3_DEVICE_METHOD bool whole() const { return segment_of(hidden) % kGroup == 0 && blocks_of(hidden) % segment_of(hidden) == 0; }
  M3_DEVICE_METHOD int steps() const {
    if (whole()) return kGroup;
    const int in_segment = segment_of(hidden) - group * kGroup, in_k = blocks_of(hidden) - first_block();
    const int left = in_segment < in_k ? in_segment : in_k;
    return left < kGroup ? left : kGroup;
  }

  M3_DEVICE_METHOD bool valid() const { return task < tasks.count; }
  M3_DEVICE_METHOD bool ends_task() const { return group == groups() - 1 && own == own_segments() - 1; }
  M3_DEVICE_METHOD void advance() {
    if (++group < groups()) return;
    group = 0;
    if (++own < own_segments()) return;
    own = 0;
    const bool last = is_last_pass();
    pass = last ? 0 : pass + 1;
    if (last) task += tasks.stride;
  }
  M3_DEVICE_METHOD typename Format::Tile tile(const typename Format::Matrices& matrices) const {
    return matrices.tile(platform::uniform(shared->slot_expert[slot()]), tile_index() * protocol::GATE_UP_ROWS, intermediate, first_block(),
                         segment_of(hidden) % 2 == 0 && kGroup % 2 == 0);
  }
};

// A task whose sums this wave will add.
struct PendingTask {
  int number;  // since the launch began; -1: none
  int slot, tile, first_column, count;
  bool is_last_pass;

  M3_DEVICE_METHOD int place() const { return number % kTasksInFlight; }
  M3_DEVICE_METHOD int round() const { return number / kTasksInFlight; }
};

// Waits for a number that other waves of the block raise.
M3_DEVICE_INLINE void wait_for_signal(int* word, int least) {
  while (platform::signalled(word) < least) platform::pause();
}

// Adds the segments of a tile, applies the activation and stores MID, two neighbouring places of a run a lane.
template <class Format, class Shape>
M3_DEVICE_INLINE void store_intermediate(Context<Shape>& context, const typename Shared<Shape>::Partial& partial, const PendingTask& task, int segments,
                                         float scale) {
  constexpr int kRows = protocol::GATE_UP_ROWS;
  static_assert(kRows == kRun);
  const Shape& shape = context.shape;
  const int intermediate = shape.intermediate();
  for (int item = platform::lane_index(); item < task.count * (kRows / 2); item += platform::kWaveWidth) {
    const int column = item / (kRows / 2), place = item % (kRows / 2) * 2;
    Bits32 value[2];
    M3_UNROLL for (int i = 0; i < 2; ++i) {
      const int row = Format::element(place + i);
      const float gate = scaled<Format>(sum_of_segments(partial, row, column, segments), scale);
      const float up = scaled<Format>(sum_of_segments(partial, kRows + row, column, segments), scale);
      // Rows past the matrix become the zeros that stage down's last K step reads.
      value[i] = task.tile * kRows + row < intermediate ? float_to_bf16(swiglu(gate, up, context.arguments.constants)) : 0;
    }
    Bits16* mid = context.mid + protocol::mid_index(shape.rows(), intermediate, task.slot, task.first_column + column, task.tile * kRows + place);
    platform::store_data(reinterpret_cast<AliasingBits32*>(mid), AliasingBits32{protocol::pack_bf16_pair(value[0], value[1])});
  }
}

// Ends a task: waits until every wave has left its sums, adds them and, with the last of the slot's columns, announces the tile.
template <class Format, class Shape>
M3_DEVICE_INLINE void end_task(Context<Shape>& context, const Team& team, int waves, int segments, const PendingTask& task) {
  auto& shared = context.shared;
  const int first = team.index * kTasksInFlight;
  const float scale = global_scale<Format>(context.arguments.g13, shared.slot_expert[task.slot]);
  wait_for_signal(&shared.arrived[first + task.place()], waves * (task.round() + 1));
  store_intermediate<Format>(context, shared.partial[first + task.place()], task, segments, scale);
  // The tasks before it are the same tile's other columns: they must be stored before the tile is announced.
  if (task.first_column > 0) wait_for_signal(&shared.ended[first + (task.number - 1) % kTasksInFlight], (task.number - 1) / kTasksInFlight + 1);
  platform::drain_stores();
  platform::wave_barrier();
  if (platform::lane_index() != 0) return;
  platform::signal(&shared.ended[first + task.place()], task.round() + 1);
  if (task.is_last_pass && context.may_announce(Site::DOWN)) {
    const int index = protocol::intermediate_pair_index(context.shape.intermediate(), task.slot, task.tile);
    platform::announce_device(context.intermediate_pairs + index, context.pair(0));
  }
}

// The tasks of slots `first_slot` to `end_slot` - 1, shared out from block `start` on. `number` counts the team's tasks. `when_drained` runs
// once, when the wave's last weights are on their way.
template <class Format, class Shape, class WhenDrained>
M3_DEVICE_INLINE void gate_up(Context<Shape>& context, const Team& team, int& number, int start, int first_slot, int end_slot, WhenDrained when_drained) {
  using Work = GateUpWork<Format, Shape>;
  auto& shared = context.shared;
  const Shape& shape = context.shape;
  const int hidden = shape.hidden(), end = protocol::hidden_stride(hidden);
  Work work(context, team, start, first_slot, end_slot);
  const int segments = work.segments(), waves = segments < team.waves ? segments : team.waves;
  if (team.wave >= waves) return;
  const auto activations_of = [&](const Work& place) {
    const int first = shared.slot_first[place.slot()];
    return Activations::of<Format>(place.first_column(), place.count(), place.first_block(), [&](int column) -> const Bits16* {
      return context.x + protocol::x_index(hidden, row_of_pick(shape, shared.column_pick[first + column]), 0);
    });
  };
  WeightStream<Format, Work> stream({context.arguments.w13, context.arguments.s13, 2 * shape.intermediate(), hidden}, work);
  platform::ColumnsBf16 columns[2][4];
  Activations now{};
  if (work.valid()) {
    now = activations_of(work);
    now.load<Format>(columns[0], 0, end, work.whole());
  }
  PendingTask pending{-1, 0, 0, 0, 0, false};
  platform::Accumulator sum[kOwnSegments] = {};
  bool told = false;
  M3_ROLLED while (work.valid()) {
    Work following = work;
    following.advance();
    const bool more = following.valid();
    const Activations next = more ? activations_of(following) : now;
    multiply_group<Format>(sum[work.own], stream, columns, now, work.steps(), work.count(), end, work.whole(),
                           [&](platform::ColumnsBf16 (&into)[4]) { next.load<Format>(into, 0, end, work.whole()); });
    if (!told && stream.drained()) {
      when_drained();
      told = true;
    }
    if (work.ends_task()) {
      const int place = number % kTasksInFlight, index = team.index * kTasksInFlight + place;
      wait_for_signal(&shared.ended[index], number / kTasksInFlight);
      M3_UNROLL for (int own = 0; own < kOwnSegments; ++own) {
        if (own < work.own_segments()) store_partial(shared.partial[index][team.wave + team.waves * own], sum[own]);
        sum[own] = {};
      }
      platform::wave_barrier();
      if (platform::lane_index() == 0) platform::signal_add(&shared.arrived[index], 1);
      if (pending.number >= 0) {
        end_task<Format>(context, team, waves, segments, pending);
        pending.number = -1;
      }
      if (number % waves == team.wave) pending = {number, work.slot(), work.tile_index(), work.first_column(), work.count(), work.is_last_pass()};
      ++number;
    }
    work = following;
    now = next;
  }
  if (pending.number >= 0) end_task<Format>(context, team, waves, segments, pending);
  if (!told) when_drained();
}

// Stages shared_up, table and up. Stage shared_up is the shared expert over the rows that are not padded, slot 0; stage up the picked experts
// by ascending id, slots 1 and up. When a wave's last gate and up weights are on their way, its first weights of stage down follow them.
// One loop, so that the code of the products exists once.
template <class Format, class Shape>
M3_DEVICE_INLINE void shared_up_table_up(Context<Shape>& context) {
  const Team team = team_of_wave();
  int number = 0;
  M3_ROLLED for (int routed = 0; routed < 2; ++routed) {
    if (routed) table(context);
    context.stamp(6 + routed);
    const int slots = routed ? context.shared.slot_count : slot_columns(context.shared, 0) > 0 ? 1 : 0;
    gate_up<Format>(context, team, number, routed ? protocol::UP_START : protocol::SHARED_UP_START, routed, slots, [&] {
      if (routed) prefetch_down<Format>(context);
    });
  }
}

}  // namespace m3::ffn
