// Stage table: every block learns every row's picks and sorts them by expert: its own copy of the slot table, in shared memory.
// Waits for the route pairs. Reference: m3_kernels.reference.table.
//
// Slot 0 is the shared expert over the valid rows; slot 1 + i is the i-th picked expert by ascending id, its columns by ascending row.
#pragma once
#include "m3/ffn/context.h"

namespace m3::ffn {

// The rows of the shared expert, known from the slots alone: called when the launch begins.
template <class Shape>
M3_DEVICE_INLINE void list_valid_rows(Context<Shape>& context) {
  const int rows = context.shape.rows();
  for (int row = platform::thread_index(); row < rows; row += platform::block_threads()) {
    int before = 0;
    for (int other = 0; other < row; ++other) before += context.is_padded(other) ? 0 : 1;
    if (!context.is_padded(row)) context.shared.valid_row[before] = static_cast<short>(row);
    if (row == rows - 1) context.shared.valid_count = before + (context.is_padded(row) ? 0 : 1);
  }
}

template <class Shape>
M3_DEVICE_INLINE void read_picks(Context<Shape>& context) {
  const int top_k = context.shape.top_k(), experts = context.shape.experts(), picks = context.shape.rows() * top_k;
  bool came = true;
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

template <class Shape>
M3_DEVICE_INLINE void table(Context<Shape>& context) {
  auto& shared = context.shared;
  const int picks = context.shape.rows() * context.shape.top_k();
  read_picks(context);
  platform::block_barrier();
  // A pick's place is the number of picks that go before it: those of a lower expert, and earlier ones of the same.
  for (int pick = platform::thread_index(); pick < picks; pick += platform::block_threads()) {
    const int expert = shared.pick_expert[pick];
    int lower = 0, same_before = 0;
    for (int other = 0; other < picks; ++other) {
      const int other_expert = shared.pick_expert[other];
      lower += other_expert >= 0 && other_expert < expert;
      same_before += other_expert == expert && other < pick;
    }
    shared.first_of_expert[pick] = expert >= 0 && same_before == 0;
    if (expert >= 0) shared.sorted_pick[lower + same_before] = static_cast<short>(pick);
    shared.pick_slot[pick] = static_cast<short>(lower);
  }
  platform::block_barrier();
  for (int pick = platform::thread_index(); pick < picks; pick += platform::block_threads()) {
    if (!shared.first_of_expert[pick]) continue;
    const int expert = shared.pick_expert[pick];
    int slots_before = 0;
    for (int other = 0; other < picks; ++other) slots_before += shared.first_of_expert[other] && shared.pick_expert[other] < expert;
    shared.slot_expert[slots_before] = static_cast<short>(expert);
    shared.slot_first[slots_before] = shared.pick_slot[pick];
  }
  if (platform::thread_index() == 0) {
    int routed = 0, valid_picks = 0;
    for (int pick = 0; pick < picks; ++pick) {
      routed += shared.first_of_expert[pick];
      valid_picks += shared.pick_expert[pick] >= 0;
    }
    shared.routed_count = routed;
    shared.slot_first[routed] = static_cast<short>(valid_picks);
  }
  platform::block_barrier();
}

}  // namespace m3::ffn
