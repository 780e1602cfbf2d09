// The CPU side of benchmarks/mailbox.py: tagged pairs in shared memory, with bounded waits. Every function returns nanoseconds an
// operation, or -1 if a wait ran out.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "m3/flight.h"

namespace {

using Word = std::uint64_t;
using Clock = std::chrono::steady_clock;

constexpr auto kBound = std::chrono::seconds(20);
constexpr int kSpinsBeforeYield = 2000;

std::atomic_ref<Word> at(std::uint64_t address) { return std::atomic_ref<Word>(*reinterpret_cast<Word*>(address)); }

void store(std::uint64_t address, std::uint32_t value, std::uint32_t tag) { at(address).store(Word(tag) << 32 | value, std::memory_order_relaxed); }

bool wait_for(std::uint64_t address, std::uint32_t tag, std::uint32_t* value) {
  Clock::time_point deadline{};
  for (long spins = 0;; ++spins) {
    const Word word = at(address).load(std::memory_order_relaxed);
    if (std::uint32_t(word >> 32) == tag) {
      *value = std::uint32_t(word);
      return true;
    }
    if (spins % kSpinsBeforeYield == kSpinsBeforeYield - 1) {
      const auto now = Clock::now();
      if (deadline == Clock::time_point{}) deadline = now + kBound;
      if (now > deadline) return false;
      sched_yield();
    }
  }
}

double since(Clock::time_point start, int count) { return std::chrono::duration<double, std::nano>(Clock::now() - start).count() / count; }

}  // namespace

extern "C" {

// Ranks 0 and 1 send a pair to and fro; half a round trip is one way. Others return 0. Words at `offset` of each buffer.
double mailbox_one_way(const std::uint64_t* buffers, int rank, std::uint64_t offset, int count, std::uint32_t tag) {
  if (rank > 1) return 0;
  const std::uint64_t own = buffers[rank] + offset, peer = buffers[1 - rank] + offset;
  std::uint32_t value = 0;
  const auto start = Clock::now();
  for (int i = 0; i < count; ++i, ++tag) {
    if (rank == 0) store(peer, value + 1, tag);
    if (!wait_for(own, tag, &value)) return -1;
    if (rank == 1) store(peer, value + 1, tag);
  }
  return value == std::uint32_t(2 * count - (rank == 1)) ? since(start, 2 * count) : -2;
}

// Every rank stores a pair for every rank and waits for all ranks' pairs. Halves alternate, as in the peer buffer.
double mailbox_hand_off(const std::uint64_t* buffers, int world, int rank, std::uint64_t offset, int count, std::uint32_t tag) {
  const auto start = Clock::now();
  for (int i = 0; i < count; ++i, ++tag) {
    const std::uint64_t half = offset + 8 * world * (i & 1);
    for (int peer = 0; peer < world; ++peer) store(buffers[peer] + half + 8 * rank, i, tag);
    for (int source = 0; source < world; ++source) {
      std::uint32_t value;
      if (!wait_for(buffers[rank] + half + 8 * source, tag, &value) || value != std::uint32_t(i)) return -1;
    }
  }
  return since(start, count);
}

// Sum of `elements` floats over all ranks in rank order: pairs pushed to every rank, then read and added by each.
double mailbox_all_reduce(const std::uint64_t* buffers, int world, int rank, std::uint64_t offset, int elements, const float* in, float* out, int count,
                          std::uint32_t tag) {
  const auto start = Clock::now();
  for (int i = 0; i < count; ++i, ++tag) {
    const std::uint64_t half = offset + std::uint64_t(8) * world * elements * (i & 1);
    for (int peer = 0; peer < world; ++peer) {
      for (int e = 0; e < elements; ++e) {
        std::uint32_t bits;
        std::memcpy(&bits, in + e, 4);
        store(buffers[peer] + half + std::uint64_t(8) * (std::uint64_t(rank) * elements + e), bits, tag);
      }
    }
    for (int e = 0; e < elements; ++e) {
      float sum = 0;
      for (int source = 0; source < world; ++source) {
        std::uint32_t bits;
        if (!wait_for(buffers[rank] + half + std::uint64_t(8) * (std::uint64_t(source) * elements + e), tag, &bits)) return -1;
        float value;
        std::memcpy(&value, &bits, 4);
        sum += value;
      }
      out[e] = sum;
    }
  }
  return since(start, count);
}

// Writes `count` records of a launch to a flight ring, from a thread of the CPU target.
double flight_records(std::uint64_t ring, int launches, int count) {
  struct Work {
    m3::FlightRing ring;
    int count;
    double nanoseconds;
  } work{{reinterpret_cast<unsigned char*>(ring), launches}, count, 0};
  m3::platform::cpu::Residents residents(1, 64, 0);
  residents.launch(
      [](const void* argument) {
        Work& own = *static_cast<Work*>(const_cast<void*>(argument));
        if (!m3::writes_flight(own.ring)) return;
        const auto start = Clock::now();
        for (int i = 0; i < own.count; ++i) {
          m3::write_flight(own.ring, m3::platform::clock_ticks(), i & 1 ? m3::protocol::FLIGHT_END : m3::protocol::FLIGHT_LAUNCH,
                           {i >> 1, 3, m3::protocol::Site::HOST, -1}, 0);
        }
        own.nanoseconds = since(start, own.count);
      },
      &work);
  return work.nanoseconds;
}
}
