// The fault word of a rank: how a launch looks at it, and how a rank that gives up tells every rank.
#pragma once
#include "m3/flight.h"

namespace m3 {

// What a thread needs to watch faults and to report its own.
struct FaultLine {
  Bits64* own;                // start of this rank's peer buffer: word 0 is (set, rank), word 1 (epoch, site word)
  const long long* peers;     // address of every rank's peer buffer, by rank
  int* claimed;               // taken by the first thread of this rank that gives up, so that one report goes out whole
  long long wait_ticks;       // bound of every wait
  int rank;
  int world;
  int layer;
  int epoch;
  FlightRing flight;
};

// A word of the epoch words between the epoch and the marks, cleared with them.
constexpr int kClaimWord = 1;
static_assert(kClaimWord != protocol::EPOCH_WORD && kClaimWord < protocol::MARK_WORDS_START);

M3_DEVICE_INLINE Bits64* peer_buffer(const FaultLine& line, int rank) { return reinterpret_cast<Bits64*>(line.peers[rank]); }

M3_DEVICE_INLINE bool fault_is_set(const FaultLine& line) { return (platform::load_system(line.own) & 0xFFFFFFFFu) != 0; }

// Writes one rank's fault word, the second half first: whoever sees the word set sees the rest.
M3_DEVICE_INLINE void write_fault(Bits64* target, int failed_rank, int epoch, int site_word) {
  platform::store_system(target + 1, static_cast<Bits64>(static_cast<Bits32>(epoch)) | (static_cast<Bits64>(static_cast<Bits32>(site_word)) << 32));
  platform::announce_system(target, 1u | (static_cast<Bits64>(static_cast<Bits32>(failed_rank)) << 32));
}

// Gives up for this rank: writes (1, rank, epoch, site) on every rank that does not know of a fault yet. `peer` is the rank waited for, or -1.
M3_DEVICE_OUTLINE void report_fault(const FaultLine& line, protocol::Site site, int peer) {
  if (!platform::claim(line.claimed)) return;
  constexpr long long kMostMicroseconds = 0x7FFFFFFF;
  const long long bound = line.wait_ticks / (platform::kTicksPerSecond / 1'000'000);
  const int microseconds = static_cast<int>(bound < kMostMicroseconds ? bound : kMostMicroseconds);
  write_flight(line.flight, platform::clock_ticks(), protocol::FLIGHT_GAVE_UP, {line.epoch, line.layer, site, peer}, microseconds);
  const int word = protocol::site_word(static_cast<int>(site), peer, line.layer);
  M3_ROLLED for (int rank = 0; rank < line.world; ++rank) {
    Bits64* target = peer_buffer(line, rank);
    if ((platform::load_system(target) & 0xFFFFFFFFu) == 0) write_fault(target, line.rank, line.epoch, word);
  }
}

}  // namespace m3
