// How a launch begins and ends: it reads the epoch, and block 0 moves the epoch on once every block has come to the end; on the step's last
// sparse layer the ranks then trade fault flags, so that a fault anywhere in the step is known on every rank before that launch ends.
#pragma once
#include "m3/ffn/context.h"

namespace m3::ffn {

// Injected faults: the chosen rank's first block stands still for a while and then gives up. Returns whether it did.
template <class Shape>
M3_DEVICE_INLINE bool inject_fault(Context<Shape>& context) {
  const int* injection = context.arguments.injection;
  if (platform::block_index() != 0 || injection[0] != context.rank() + 1) return false;
  const long long end = platform::clock_ticks() + injection[1];
  while (platform::clock_ticks() - end < 0 && !fault_is_set(context.line)) platform::pause();
  report_fault(context.line, Site::INJECT, -1);
  platform::set_flag(&context.shared.failed);
  return true;
}

// Reads the epoch, the fault word and which rows are padded, for the whole block. Returns whether the stages may run; the answer is the same
// in all its threads.
template <class Shape>
M3_DEVICE_INLINE bool begin(Context<Shape>& context) {
  auto& shared = context.shared;
  for (int row = platform::thread_index(); row < context.shape.rows(); row += platform::block_threads()) {
    shared.padded[row] = context.arguments.slots[row] < 0 ? 1 : 0;
  }
  if (platform::thread_index() == 0) {
    shared.failed = 0;
    shared.epoch = platform::load_int(context.arguments.epoch_words + protocol::EPOCH_WORD);
    context.fill_line(shared.epoch);
    shared.faulted = fault_is_set(context.line);
    const bool past = protocol::epoch_is_past_limit(shared.epoch);
    if (past && platform::block_index() == 0 && !shared.faulted) report_fault(context.line, Site::WRAP, -1);
    if (!past && inject_fault(context)) shared.faulted = 1;
  }
  platform::block_barrier();
  context.set_epoch(shared.epoch);
  return !shared.faulted && !protocol::epoch_is_past_limit(shared.epoch);
}

// Marks this block as done; block 0 waits for all marks and moves the epoch on. After a fault the epoch stays.
template <class Shape>
M3_DEVICE_INLINE void advance_epoch(Context<Shape>& context) {
  int* words = context.arguments.epoch_words;
  const int next = static_cast<int>(context.tag.tag);
  platform::drain_stores();
  platform::block_barrier();
  if (platform::thread_index() == 0 && context.may_announce(Site::EPOCH)) {
    platform::announce_int(words + protocol::mark_word(platform::block_index()), next);
  }
  if (platform::block_index() != 0) return;
  bool came = true;
  for (int block = platform::thread_index(); block < platform::grid_blocks(); block += platform::block_threads()) {
    came &= wait_until(context.line, Site::EPOCH, Source::own_blocks,
                       [&] { return platform::load_int(words + protocol::mark_word(block)) == next ? -1 : block; });
  }
  context.note(came);
  platform::block_barrier();
  if (platform::thread_index() == 0 && !platform::flag_is_set(&context.shared.failed)) platform::announce_int(words + protocol::EPOCH_WORD, next);
}

// The step-end exchange, by one thread of the rank. The flags go out whatever happened before.
template <class Shape>
M3_DEVICE_INLINE void trade_fault_flags(Context<Shape>& context) {
  if (platform::block_index() != 0 || platform::thread_index() != 0) return;
  const FaultLine& line = context.line;
  const int failed = fault_is_set(line) ? 1 : 0;
  context.record(protocol::FLIGHT_FLAG, Site::HANDSHAKE, failed);
  constexpr int kPairWords = static_cast<int>(protocol::PAIR_BYTES);
  for (int target = 0; target < line.world && !context.is_withheld(Site::HANDSHAKE); ++target) {
    platform::announce_system(peer_buffer(line, target) + protocol::handshake_pair(context.slot_of(target, line.rank)) / kPairWords,
                              context.pair(static_cast<Bits32>(failed)));
  }
  Bits64 word[Shape::kMostRanks];
  const bool came = wait_for_words<Scope::system>(
      line, Site::HANDSHAKE, Source::rank_of_word, context.tag, line.world,
      [&](int source) { return line.own + protocol::handshake_pair(source) / kPairWords; }, word);
  platform::acquire_system();
  int outcome = came ? 0 : protocol::FLIGHT_LEFT;
  for (int source = 0; came && source < line.world; ++source) {
    if (protocol::pair_word_value(word[source]) != 0) outcome = protocol::FLIGHT_PEER_FAILED;
    if (protocol::pair_word_value(word[source]) != 0 && !fault_is_set(line)) {
      write_fault(line.own, source, line.epoch, protocol::site_word(static_cast<int>(Site::PEER), -1, line.layer));
    }
  }
  context.record(protocol::FLIGHT_DONE, Site::HANDSHAKE, outcome);
}

}  // namespace m3::ffn
