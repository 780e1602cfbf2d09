// What every stage of a launch shares: sizes, addresses, the epoch and its tags, the block's shared memory.
#pragma once
#include "m3/bf16.h"
#include "m3/ffn/arguments.h"
#include "m3/mailbox.h"

namespace m3::ffn {

using protocol::Site;

// K runs of a long dot product are cut into this many segments, each summed by one wave in K order; the segments are then added in
// order. The number is part of the arithmetic: it does not change with the waves of a block.
constexpr int kSegments = 8;

// The most segments that one wave sums.
constexpr int kOwnSegments = (kSegments + platform::kLeastWaves - 1) / platform::kLeastWaves;

// Rows of the matrix tiles.
constexpr int kTile = 16;

// Column tiles of all rows.
template <class Shape>
constexpr int kRowTiles = (Shape::kMostRows + platform::kTileColumns - 1) / platform::kTileColumns;

// Tasks of a team whose sums lie in shared memory at once: those that are being ended and those that waves fill already.
constexpr int kTasksInFlight = 4;

template <class Shape>
struct Shared {
  static constexpr int kMostPicks = Shape::kMostRows * Shape::kMostTopK;
  static constexpr int kMostRouted = kMostPicks < Shape::kMostExperts ? kMostPicks : Shape::kMostExperts;
  static constexpr int kMostSlots = 1 + kMostRouted;
  static constexpr int kMostWaves = platform::kMostWaves;

  // Sums of the segments of tiles, [row][column]: stages shared_up and up have a tile for each task in flight, stage router all its tiles.
  using Partial = float[kSegments][kTile * platform::kTileColumns];
  static constexpr int larger(int a, int b) { return a > b ? a : b; }
  static constexpr int kPartials =
      larger(larger(platform::kMostTeams * kTasksInFlight, kRowTiles<Shape>), (kMostWaves * kTasksInFlight + kSegments - 1) / kSegments);
  Partial partial[kPartials];

  // Stages shared_up and up: waves that have left their sums of a task, and tasks ended, of each place of partial since the launch began.
  static constexpr int kTaskPlaces = kMostWaves * kTasksInFlight;
  int arrived[kTaskPlaces];
  int ended[kTaskPlaces];

  // Stage down: for each task taken together, [pick][output column].
  float contribution[platform::kDownTasks][kMostPicks + Shape::kMostRows][kTile];

  FaultLine line;  // filled when the launch begins, before the first wait

  int failed;    // set once a wait of this block failed: from then on it announces nothing
  int epoch;     // of this launch
  int faulted;   // the rank's fault word was set when the launch began

  int padded[Shape::kMostRows];  // 1: the row's slot is negative

  // The slot table. Slot 0 is the shared expert over the rows that are not padded, ascending; the picked experts follow by ascending id. The
  // columns of slot i are column_pick[slot_first[i]] .. column_pick[slot_first[i + 1] - 1], by ascending row.
  int slot_count;
  short slot_expert[kMostSlots];
  short slot_first[kMostSlots + 1];
  short column_pick[kMostPicks + Shape::kMostRows];
  int slot_ready[kMostSlots];  // 1 once a wave of this block has seen the slot's intermediate activations complete

  alignas(16) int pick_expert[kMostPicks + 3];  // -1: none
  float pick_weight[kMostPicks];
  int wave_total[kMostWaves];

  // Stage route; the keys are looked at sixteen at a time.
  float probability[Shape::kMostExperts];
  alignas(16) float key[Shape::kMostExperts + 15];
  int picked[Shape::kMostTopK];

  // Where blocks reduce whole rows: the sums of squares of 48 columns each.
  float square[platform::kWholeRows ? protocol::push_tasks(Shape::kMostHidden) : 1];
};

template <class Shape>
struct Context {
  const Arguments& arguments;
  Shape shape;
  Shared<Shape>& shared;
  const FaultLine& line;  // in the block's shared memory: what waits that last need, and short polls do not
  PairTag tag;
  TripleTag triple_tag;
  int parity;

  // Regions of scratch.
  Bits64* ssq_pairs;
  Bits64* x_ready_pairs;
  Bits64* logit_pairs;
  Bits64* route_pairs;
  Bits64* intermediate_pairs;
  float* stream;
  Bits16* x;
  Bits16* mid;

  M3_DEVICE_METHOD Context(const Arguments& launch, Shared<Shape>& block_shared)
      : arguments(launch), shape(launch.sizes), shared(block_shared), line(block_shared.line) {
    const Regions& regions = launch.regions;
    ssq_pairs = reinterpret_cast<Bits64*>(launch.scratch);
    x_ready_pairs = reinterpret_cast<Bits64*>(launch.scratch + regions.x_ready);
    logit_pairs = reinterpret_cast<Bits64*>(launch.scratch + regions.logit);
    route_pairs = reinterpret_cast<Bits64*>(launch.scratch + regions.route);
    intermediate_pairs = reinterpret_cast<Bits64*>(launch.scratch + regions.intermediate_ready);
    stream = reinterpret_cast<float*>(launch.scratch + regions.stream);
    x = reinterpret_cast<Bits16*>(launch.scratch + regions.x);
    mid = reinterpret_cast<Bits16*>(launch.scratch + regions.mid);
    set_epoch(0);
  }

  // One thread fills the line for the block; the others see it after a barrier.
  M3_DEVICE_METHOD void fill_line(int epoch) {
    FaultLine& filled = shared.line;
    filled.peers = arguments.peers;
    filled.own = reinterpret_cast<Bits64*>(arguments.peers[arguments.rank]);
    filled.claimed = arguments.epoch_words + kClaimWord;
    filled.wait_ticks = arguments.wait_ticks;
    filled.rank = arguments.rank;
    filled.world = shape.world();
    filled.layer = arguments.layer;
    filled.epoch = epoch;
    filled.flight = FlightRing{arguments.flight, arguments.flight_launches};
  }

  M3_DEVICE_METHOD int rank() const { return arguments.rank; }
  M3_DEVICE_METHOD Bits64* buffer_of(int target) const { return reinterpret_cast<Bits64*>(arguments.peers[target]); }

  M3_DEVICE_METHOD void set_epoch(int epoch) {
    tag.tag = protocol::pair_tag(epoch);
    triple_tag.tag = protocol::triple_tag(epoch);
    parity = protocol::parity(epoch);
  }

  // A thread notes the outcome of its wait; after a barrier that follows, the block's threads know whether they may announce.
  M3_DEVICE_METHOD void note(bool came) {
    if (!came) platform::set_flag(&shared.failed);
  }
  // Whether the block may announce what `waiting` waits for. Garbage never travels under a valid tag.
  M3_DEVICE_METHOD bool may_announce(Site waiting) { return !platform::flag_is_set(&shared.failed) && !is_withheld(waiting); }

#ifdef M3_TEST_HOOKS
  // Test builds let a rank keep back what one site waits for: injection[2] is rank + 1, injection[3] the site.
  M3_DEVICE_METHOD bool is_withheld(Site waiting) const {
    return arguments.injection[2] == rank() + 1 && arguments.injection[3] == static_cast<int>(waiting);
  }
#else
  M3_DEVICE_METHOD bool is_withheld(Site) const { return false; }
#endif

  M3_DEVICE_METHOD bool is_padded(int row) const { return shared.padded[row] != 0; }

  // The triple pair, or value pair, that rank `source` wrote (or writes) into rank `target`'s buffer.
  M3_DEVICE_METHOD Bits64* attention_pair(int target, int source, int row, int triple) const {
    return buffer_of(target) + protocol::attention_pair(shape.world(), shape.max_rows(), shape.hidden(), parity, slot_of(target, source), row,
                                                               triple) / protocol::PAIR_BYTES;
  }
  M3_DEVICE_METHOD Bits64* ffn_pair(int target, int source, int row, int column_pair) const {
    return buffer_of(target) + protocol::ffn_pair(shape.world(), shape.max_rows(), shape.hidden(), parity, slot_of(target, source), row,
                                                         column_pair) / protocol::PAIR_BYTES;
  }

  // Whose place in `target`'s buffer rank `source` writes. Builds that measure one rank alone, every address of the peer table being its own,
  // let what it writes for a peer stand for what would come from that peer.
  M3_DEVICE_METHOD int slot_of([[maybe_unused]] int target, int source) const {
#ifdef M3_OWN_BUFFER
    if (target != rank()) return target;
#endif
    return source;
  }

  M3_DEVICE_METHOD Bits64 pair(Bits32 value) const { return protocol::pack_pair(value, tag.tag); }

  // How a wait of this block ended, or how the launch did, for a flight record.
  M3_DEVICE_METHOD int flight_outcome() const { return platform::flag_is_set(&shared.failed) ? protocol::FLIGHT_LEFT : 0; }
  // A flight record of this launch.
  M3_DEVICE_METHOD void record(int event, Site site = Site::HOST, int detail = 0) const {
    if (arguments.flight == nullptr || platform::thread_index() != 0 || platform::block_index() != 0) return;
    write_flight(line.flight, platform::clock_ticks(), event, {line.epoch, line.layer, site, -1}, detail);
  }

  // Stamp `stamp` of this block's timeline.
  M3_DEVICE_METHOD void stamp(int stamp) const {
    if (arguments.timeline == 0 || platform::thread_index() != 0) return;
    long long* stamps = reinterpret_cast<long long*>(arguments.scratch + arguments.regions.timeline);
    stamps[protocol::timeline_index(platform::block_index(), stamp)] = platform::stamp_ticks();
  }
};

// A tile of sums in shared memory: [row][column].
M3_DEVICE_INLINE void store_partial(float (&tile)[kTile * platform::kTileColumns], const platform::Accumulator& sum) {
  const int lane = platform::lane_index();
  M3_UNROLL for (int i = 0; i < platform::Accumulator::kValues; ++i) {
    tile[platform::accumulator_row(lane, i) * platform::kTileColumns + platform::accumulator_column(lane, i)] = sum.value[i];
  }
}

// The segments of one element of a tile, added in order.
M3_DEVICE_INLINE float sum_of_segments(const float (&partial)[kSegments][kTile * platform::kTileColumns], int row, int column, int segments) {
  const int index = row * platform::kTileColumns + column;
  float sum = partial[0][index];
  M3_UNROLL for (int segment = 1; segment < kSegments; ++segment) {
    if (segment < segments) sum += partial[segment][index];
  }
  return sum;
}

// The same, added pairwise: neighbours, then neighbouring pairs, then fours; parts that are not there count as 0. `parts` lie `kSegments` tiles
// apart at most.
template <int kMost>
M3_DEVICE_INLINE float sum_pairwise(const float (*partial)[kTile * platform::kTileColumns], int row, int column, int parts) {
  const int index = row * platform::kTileColumns + column;
  float sum[kMost];
  M3_UNROLL for (int part = 0; part < kMost; ++part) sum[part] = part < parts ? partial[part][index] : 0.0f;
  M3_UNROLL for (int distance = 1; distance < kMost; distance *= 2) {
    M3_UNROLL for (int part = 0; part + distance < kMost; part += 2 * distance) sum[part] += sum[part + distance];
  }
  return sum[0];
}

// The tasks of a stage that this block takes: task t goes to block (first + t) mod grid.
struct Tasks {
  int first;
  int stride;
  int count;
};
M3_DEVICE_INLINE Tasks tasks_of_block(int start, int count) {
  const int grid = platform::grid_blocks();
  const int behind = platform::block_index() - protocol::first_block(start, grid);
  return Tasks{behind < 0 ? behind + grid : behind, grid, count};
}

// The team of waves that this wave belongs to: a team takes the segments of a task together.
struct Team {
  int index;
  int count;  // teams of the block
  int wave;   // of this wave in the team
  int waves;  // of the team
};
M3_DEVICE_INLINE Team team_of_wave() {
  const int waves = platform::wave_count(), wave = platform::uniform(platform::wave_index());
  const int wanted = waves / kSegments < platform::kMostTeams ? waves / kSegments : platform::kMostTeams;
  const int count = wanted < 1 ? 1 : wanted;
  const int own = waves / count;
  return Team{wave / own, count, wave % own, own};
}

// The tasks that a team takes: the first round goes to the first teams of all blocks, the next to the second ones.
M3_DEVICE_INLINE Tasks tasks_of_team(const Team& team, int start, int count) {
  const Tasks block = tasks_of_block(start, count);
  return Tasks{block.first + team.index * block.stride, block.stride * team.count, count};
}

// Ends a task whose data other blocks wait for: orders the block's data, then thread 0 announces it with `word`.
template <class Shape>
M3_DEVICE_INLINE void announce_data(Context<Shape>& context, Site waiting, Bits64* word) {
  platform::drain_stores();
  platform::block_barrier();
  if (platform::thread_index() == 0 && context.may_announce(waiting)) platform::announce_device(word, context.pair(0));
}

}  // namespace m3::ffn
