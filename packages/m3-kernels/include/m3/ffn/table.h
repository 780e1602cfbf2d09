// Stage table: every block learns every row's picks and sorts them by expert: its own copy of the slot table, in shared memory.
// Waits for the route pairs. Reference: m3_kernels.reference.table.
#pragma once
#include "m3/ffn/context.h"

namespace m3::ffn {

// Slot 0, the shared expert, known from the slots alone: filled when the launch begins.
template <class Shape>
M3_DEVICE_INLINE void list_valid_rows(Context<Shape>& context) {
  auto& shared = context.shared;
  const int rows = context.shape.rows(), top_k = context.shape.top_k();
  for (int slot = platform::thread_index(); slot < Shared<Shape>::kMostSlots; slot += platform::block_threads()) shared.slot_ready[slot] = 0;
  for (int place = platform::thread_index(); place < Shared<Shape>::kTaskPlaces; place += platform::block_threads()) {
    shared.arrived[place] = shared.ended[place] = 0;
  }
  for (int row = platform::thread_index(); row < rows; row += platform::block_threads()) {
    int before = 0;
    for (int other = 0; other < row; ++other) before += 1 - shared.padded[other];
    if (!context.is_padded(row)) shared.column_pick[before] = static_cast<short>(top_k * rows + row);
    if (row != rows - 1) continue;
    shared.slot_expert[0] = static_cast<short>(context.shape.experts());
    shared.slot_first[0] = 0;
    shared.slot_first[1] = static_cast<short>(before + 1 - shared.padded[row]);
  }
}

// The row of a pick; see protocol's `picks`.
template <class Shape>
M3_DEVICE_INLINE int row_of_pick(const Shape& shape, int pick) {
  const int routed = shape.top_k() * shape.rows();
  return pick < routed ? pick / shape.top_k() : pick - routed;
}

template <class Shape>
M3_DEVICE_INLINE void read_picks(Context<Shape>& context) {
  const int top_k = context.shape.top_k(), experts = context.shape.experts(), picks = context.shape.rows() * top_k;
  bool came = true;
  // The table looks at four picks at a time.
  for (int pick = picks + platform::thread_index(); pick < picks + 3; pick += platform::block_threads()) context.shared.pick_expert[pick] = -1;
  for (int pick = platform::thread_index(); pick < picks; pick += platform::block_threads()) {
    Bits64 word[2];
    const Bits64* pair = context.route_pairs + protocol::route_pair_index(top_k, pick / top_k, pick % top_k);
    const bool here = wait_for_words<Scope::device>(
        context.line, Site::TABLE, Source::own_blocks, context.tag, 2, [&](int i) { return pair + i * top_k; }, word);
    const int expert = static_cast<int>(protocol::pair_word_value(word[0]));
    // After a fault the id may be anything; no address is ever made of one that is no expert.
    context.shared.pick_expert[pick] = here && expert >= 0 && expert < experts ? expert : -1;
    context.shared.pick_weight[pick] = platform::bits_to_float(protocol::pair_word_value(word[1]));
    came &= here;
  }
  context.note(came);
}

// The sum of `value` over lower lanes, and over the wave.
M3_DEVICE_INLINE void sum_over_lanes(int value, int& before, int& total) {
  before = 0;
  total = value;
  M3_UNROLL for (int distance = 1; distance < platform::kWaveWidth; distance *= 2) {
    const int other = platform::shuffle_xor(total, distance);
    if (platform::lane_index() & distance) before += other;
    total += other;
  }
}

// Calls `use` for every pick of an expert, in ascending order; picks are looked at four at a time.
template <class Shape, class Use>
M3_DEVICE_INLINE void for_picks_of(const Shared<Shape>& shared, int picks, int expert, Use use) {
  M3_ROLLED for (int first = 0; first < picks; first += 4) {
    const Bytes16 four = *reinterpret_cast<const Bytes16*>(shared.pick_expert + first);
    M3_UNROLL for (int i = 0; i < 4; ++i) {
      if (static_cast<int>(four.word[i]) == expert) use(first + i);
    }
  }
}

// A thread an expert: it counts the expert's picks, learns from the others how many slots and columns come before, and lists the picks.
template <class Shape>
M3_DEVICE_INLINE void table(Context<Shape>& context) {
  // Slots in the upper, columns in the lower half of one number, so that both are summed at once.
  constexpr int kSlot = 1 << 16;
  auto& shared = context.shared;
  const int experts = context.shape.experts(), picks = context.shape.rows() * context.shape.top_k();
  const int wave = platform::wave_index();
  read_picks(context);
  platform::block_barrier();
  int listed = kSlot + shared.slot_first[1];
  for (int base = 0; base < experts; base += platform::block_threads()) {
    const int expert = base + platform::thread_index();
    int count = 0;
    if (expert < experts) for_picks_of(shared, picks, expert, [&](int) { ++count; });
    int before, total;
    sum_over_lanes(count > 0 ? kSlot + count : 0, before, total);
    if (platform::lane_index() == 0) shared.wave_total[wave] = total;
    platform::block_barrier();
    for (int other = 0; other < platform::wave_count(); ++other) {
      if (other < wave) before += shared.wave_total[other];
    }
    before += listed;
    for (int other = 0; other < platform::wave_count(); ++other) listed += shared.wave_total[other];
    if (count > 0) {
      const int slot = before / kSlot;
      int column = before % kSlot;
      shared.slot_expert[slot] = static_cast<short>(expert);
      shared.slot_first[slot] = static_cast<short>(column);
      for_picks_of(shared, picks, expert, [&](int pick) { shared.column_pick[column++] = static_cast<short>(pick); });
    }
    platform::block_barrier();
  }
  if (platform::thread_index() == 0) {
    shared.slot_count = listed / kSlot;
    shared.slot_first[listed / kSlot] = static_cast<short>(listed % kSlot);
  }
  platform::block_barrier();
}

}  // namespace m3::ffn
