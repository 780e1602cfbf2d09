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

// Rows and columns of the matrix tiles.
constexpr int kTile = 16;

template <class Shape>
struct Shared {
  static constexpr int kMostPicks = Shape::kMostRows * Shape::kMostTopK;
  static constexpr int kMostRouted = kMostPicks < Shape::kMostExperts ? kMostPicks : Shape::kMostExperts;

  int failed;    // set once a wait of this block failed: from then on it announces nothing
  int epoch;     // of this launch
  int faulted;   // the rank's fault word was set when the launch began

  // The rows of the shared expert (those that are not padded), ascending, and their number.
  int valid_count;
  short valid_row[Shape::kMostRows];

  // The slot table of the routed experts (stage table): slot 1 + i is expert slot_expert[i]; its columns are sorted_pick[slot_first[i]] ..
  // sorted_pick[slot_first[i + 1] - 1], each a pick top_k * row + k.
  int routed_count;
  int pick_expert[kMostPicks];  // -1: none
  float pick_weight[kMostPicks];
  short slot_expert[kMostRouted];
  short slot_first[kMostRouted + 1];
  short sorted_pick[kMostPicks];
  unsigned char first_of_expert[kMostPicks];
  short pick_slot[kMostPicks];

  union {
    float partial[kSegments][2][kTile * kTile];                              // router, gate/up: a tile of sums a segment
    float contribution[(Shape::kMostTopK + 1) * Shape::kMostRows][kTile];  // down: [pick][output column]
    struct {
      float group[Shape::kMostExperts][4];  // sums of a quarter of the router parts
      float probability[Shape::kMostExperts];
      float key[Shape::kMostExperts];
      int picked[Shape::kMostTopK];
    } route;
  };
};

template <class Shape>
struct Context {
  const Arguments& arguments;
  Shape shape;
  Shared<Shape>& shared;
  FaultLine line;
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
      : arguments(launch), shape(launch.sizes), shared(block_shared) {
    const int rows = shape.rows(), hidden = shape.hidden(), intermediate = shape.intermediate(), experts = shape.experts(), top_k = shape.top_k();
    unsigned char* scratch = launch.scratch;
    ssq_pairs = reinterpret_cast<Bits64*>(scratch + protocol::ssq_offset());
    x_ready_pairs = reinterpret_cast<Bits64*>(scratch + protocol::x_ready_offset(rows, hidden));
    logit_pairs = reinterpret_cast<Bits64*>(scratch + protocol::logit_offset(rows, hidden));
    route_pairs = reinterpret_cast<Bits64*>(scratch + protocol::route_offset(rows, hidden, experts));
    intermediate_pairs = reinterpret_cast<Bits64*>(scratch + protocol::intermediate_ready_offset(rows, hidden, experts, top_k));
    stream = reinterpret_cast<float*>(scratch + protocol::stream_offset(rows, hidden, intermediate, experts, top_k));
    x = reinterpret_cast<Bits16*>(scratch + protocol::x_offset(rows, hidden, intermediate, experts, top_k));
    mid = reinterpret_cast<Bits16*>(scratch + protocol::mid_offset(rows, hidden, intermediate, experts, top_k));
    line.peers = launch.peers;
    line.own = reinterpret_cast<Bits64*>(launch.peers[launch.rank]);
    line.claimed = launch.epoch_words + kClaimWord;
    line.wait_ticks = launch.wait_ticks;
    line.rank = launch.rank;
    line.world = shape.world();
    line.layer = launch.layer;
    line.flight = FlightRing{launch.flight, launch.flight_launches};
    set_epoch(0);
  }

  M3_DEVICE_METHOD void set_epoch(int epoch) {
    line.epoch = epoch;
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
    return arguments.injection[2] == line.rank + 1 && arguments.injection[3] == static_cast<int>(waiting);
  }
#else
  M3_DEVICE_METHOD bool is_withheld(Site) const { return false; }
#endif

  M3_DEVICE_METHOD bool is_padded(int row) const { return arguments.slots[row] < 0; }

  // The triple pair, or value pair, that rank `source` wrote (or writes) into rank `target`'s buffer.
  M3_DEVICE_METHOD Bits64* attention_pair(int target, int source, int row, int triple) const {
    return peer_buffer(line, target) +
           protocol::attention_pair(shape.world(), shape.max_rows(), shape.hidden(), parity, source, row, triple) / protocol::PAIR_BYTES;
  }
  M3_DEVICE_METHOD Bits64* ffn_pair(int target, int source, int row, int column_pair) const {
    return peer_buffer(line, target) +
           protocol::ffn_pair(shape.world(), shape.max_rows(), shape.hidden(), parity, source, row, column_pair) / protocol::PAIR_BYTES;
  }

  M3_DEVICE_METHOD Bits64 pair(Bits32 value) const { return protocol::pack_pair(value, tag.tag); }

  // How a wait of this block ended, or how the launch did, for a flight record.
  M3_DEVICE_METHOD int flight_outcome() const { return platform::flag_is_set(&shared.failed) ? protocol::FLIGHT_LEFT : 0; }
  // A flight record of this launch.
  M3_DEVICE_METHOD void record(int event, Site site = Site::HOST, int detail = 0) const {
    if (writes_flight(line.flight)) write_flight(line.flight, platform::clock_ticks(), event, {line.epoch, line.layer, site, -1}, detail);
  }

  // Stamp `stamp` of this block's timeline.
  M3_DEVICE_METHOD void stamp(int stamp) const {
    if (arguments.timeline == 0 || platform::thread_index() != 0) return;
    long long* stamps = reinterpret_cast<long long*>(
        arguments.scratch +
        protocol::timeline_offset(shape.rows(), shape.hidden(), shape.intermediate(), shape.experts(), shape.top_k()));
    stamps[protocol::timeline_index(platform::block_index(), stamp)] = platform::clock_ticks();
  }
};

// A tile of sums in shared memory: [column][row], so that neighbouring threads take neighbouring rows of the weights.
M3_DEVICE_INLINE void store_partial(float (&tile)[kTile * kTile], const platform::Accumulator& sum) {
  const int lane = platform::lane_index();
  M3_UNROLL for (int i = 0; i < platform::Accumulator::kValues; ++i) {
    tile[platform::accumulator_column(lane, i) * kTile + platform::accumulator_row(lane, i)] = sum.value[i];
  }
}

// The segments of one element of a tile, added in order.
M3_DEVICE_INLINE float sum_of_segments(const float (&partial)[kSegments][2][kTile * kTile], int matrix, int index, int segments) {
  float sum = partial[0][matrix][index];
  M3_UNROLL for (int segment = 1; segment < kSegments; ++segment) {
    if (segment < segments) sum += partial[segment][matrix][index];
  }
  return sum;
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

// Ends a task whose data other blocks wait for: orders the block's data, then thread 0 announces it with `word`.
template <class Shape>
M3_DEVICE_INLINE void announce_data(Context<Shape>& context, Site waiting, Bits64* word) {
  platform::drain_stores();
  platform::block_barrier();
  if (platform::thread_index() == 0 && context.may_announce(waiting)) platform::announce_device(word, context.pair(0));
}

}  // namespace m3::ffn
