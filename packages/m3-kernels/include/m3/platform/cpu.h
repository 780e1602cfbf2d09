// The CPU target: the names of m3/platform.h on fibers and C++ atomics.
//
// The order in which multiply_bf16 and multiply_f32 add is part of the contract on this target: K ascending, one rounding a product (none
// for bf16, whose products are exact in fp32) and one a sum.
#pragma once
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>

#include "m3/platform/cpu/residents.h"
#include "m3/platform/cpu/tile.h"

namespace m3::platform {

constexpr int kWaveWidth = cpu::kWave;
constexpr int kLeastWaves = 1;
constexpr long long kTicksPerSecond = 1'000'000'000;

// ---- places ----

M3_DEVICE_INLINE int thread_index() { return cpu::current->thread(); }
M3_DEVICE_INLINE int block_threads() { return cpu::current->size(); }
M3_DEVICE_INLINE int lane_index() { return cpu::current->lane(); }
M3_DEVICE_INLINE int wave_index() { return cpu::current->thread() / kWaveWidth; }
M3_DEVICE_INLINE int wave_count() { return cpu::current->size() / kWaveWidth; }
M3_DEVICE_INLINE int block_index() { return cpu::current->index(); }
M3_DEVICE_INLINE int grid_blocks() { return cpu::current->grid(); }

// ---- block ----

M3_DEVICE_INLINE void block_barrier() { cpu::current->block_barrier(); }
M3_DEVICE_INLINE void wave_barrier() { cpu::current->wave_barrier(); }

template <class T>
M3_DEVICE_INLINE T shuffle_xor(T value, int mask) {
  static_assert(sizeof(T) == 4);
  cpu::Block& block = *cpu::current;
  cpu::WaveExchange& exchange = block.exchange();
  const int phase = block.exchange_phase();
  std::memcpy(&exchange.word[phase][block.lane()], &value, 4);
  block.wave_barrier();
  T other;
  std::memcpy(&other, &exchange.word[phase][block.lane() ^ mask], 4);
  return other;
}

M3_DEVICE_INLINE int uniform(int value) { return value; }
M3_DEVICE_INLINE int of_first_lane(int value) {
  cpu::Block& block = *cpu::current;
  cpu::WaveExchange& exchange = block.exchange();
  const int phase = block.exchange_phase();
  if (block.lane() == 0) std::memcpy(&exchange.word[phase][0], &value, 4);
  block.wave_barrier();
  int first;
  std::memcpy(&first, &exchange.word[phase][0], 4);
  return first;
}

constexpr int kMostTeams = 1;

M3_DEVICE_INLINE void set_flag(int* flag) { std::atomic_ref<int>(*flag).store(1, std::memory_order_relaxed); }
M3_DEVICE_INLINE bool flag_is_set(int* flag) { return std::atomic_ref<int>(*flag).load(std::memory_order_relaxed) != 0; }

M3_DEVICE_INLINE void signal(int* word, int value) { std::atomic_ref<int>(*word).store(value, std::memory_order_release); }
M3_DEVICE_INLINE void signal_add(int* word, int value) { std::atomic_ref<int>(*word).fetch_add(value, std::memory_order_acq_rel); }
M3_DEVICE_INLINE int signalled(int* word) { return std::atomic_ref<int>(*word).load(std::memory_order_acquire); }

// ---- time ----

M3_DEVICE_INLINE long long clock_ticks() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
M3_DEVICE_INLINE long long stamp_ticks() { return clock_ticks(); }
M3_DEVICE_INLINE void pause() { cpu::current->pause(); }
constexpr int kPollsALook = 1;

// ---- words ----
// ThreadSanitizer does not model fences, so the order lives in the accesses: polls acquire, announcements release.

constexpr std::memory_order kAnnounce = std::memory_order_release;

M3_DEVICE_INLINE Bits64 load_device(const Bits64* word) {
  return std::atomic_ref<Bits64>(*const_cast<Bits64*>(word)).load(std::memory_order_acquire);
}
M3_DEVICE_INLINE Bits64 load_device_data(const Bits64* word) { return load_device(word); }
M3_DEVICE_INLINE Bits64 load_system(const Bits64* word) { return load_device(word); }
M3_DEVICE_INLINE void store_device(Bits64* word, Bits64 value) { std::atomic_ref<Bits64>(*word).store(value, std::memory_order_relaxed); }
M3_DEVICE_INLINE void store_system(Bits64* word, Bits64 value) { store_device(word, value); }
M3_DEVICE_INLINE void announce_device(Bits64* word, Bits64 value) { std::atomic_ref<Bits64>(*word).store(value, kAnnounce); }
M3_DEVICE_INLINE void announce_system(Bits64* word, Bits64 value) { announce_device(word, value); }
M3_DEVICE_INLINE void acquire_device() {}
M3_DEVICE_INLINE void acquire_system() {}
M3_DEVICE_INLINE int load_int(const int* word) { return std::atomic_ref<int>(*const_cast<int*>(word)).load(std::memory_order_acquire); }
M3_DEVICE_INLINE void announce_int(int* word, int value) { std::atomic_ref<int>(*word).store(value, kAnnounce); }
M3_DEVICE_INLINE bool claim(int* word) { return std::atomic_ref<int>(*word).exchange(1, std::memory_order_acq_rel) == 0; }

// ---- data ----

template <class T>
M3_DEVICE_INLINE T load_data(const T* address) {
  return *address;
}
template <class T>
M3_DEVICE_INLINE void store_data(T* address, T value) {
  *address = value;
}
M3_DEVICE_INLINE void drain_stores() {}
M3_DEVICE_INLINE void load_streamed(bool wanted, const void* address, Bytes16& bytes) {
  if (wanted) bytes = *static_cast<const Bytes16*>(address);
}
M3_DEVICE_INLINE void load_byte(bool wanted, const unsigned char* address, Bits32& value) {
  if (wanted) value = *address;
}
M3_DEVICE_INLINE void load_two_bytes(bool wanted, const unsigned char* address, Bits32& value) {
  if (wanted) value = address[0] | static_cast<Bits32>(address[1]) << 8;
}
M3_DEVICE_INLINE void load_four_bytes(bool wanted, const unsigned char* address, Bits32& value) {
  if (wanted) std::memcpy(&value, address, 4);
}
template <class T>
M3_DEVICE_INLINE T load_kept(const T* address) {
  return *address;
}
M3_DEVICE_INLINE void prefetch(const void*, int) {}

// ---- numbers ----

// 2^x as a fixed sequence of IEEE operations, so that the reference can repeat it bit for bit: split x into the nearest integer and a rest of
// at most 1/2, the Taylor polynomial of degree 10 of e^(rest ln 2) in double precision (error below 2^-40 of the value), one rounding.
M3_DEVICE_INLINE float exp2_of(float x) {
  constexpr double kCoefficients[] = {1.0,
                                      6.931471805599453e-01,
                                      2.402265069591007e-01,
                                      5.5504108664821576e-02,
                                      9.618129107628477e-03,
                                      1.3333558146428441e-03,
                                      1.5403530393381606e-04,
                                      1.5252733804059838e-05,
                                      1.3215486790144305e-06,
                                      1.0178086009239696e-07,
                                      7.0549116208011209e-09};
  if (!(x < 128.0f)) return x != x ? x : HUGE_VALF;
  if (x < -160.0f) return 0.0f;
  const double whole = std::nearbyint(static_cast<double>(x));
  const double rest = static_cast<double>(x) - whole;
  double power = kCoefficients[10];
  for (int i = 9; i >= 0; --i) power = power * rest + kCoefficients[i];
  return static_cast<float>(std::ldexp(power, static_cast<int>(whole)));
}
M3_DEVICE_INLINE int count_bits(Bits32 bits) { return __builtin_popcount(bits); }
M3_DEVICE_INLINE int lowest_bit(Bits32 bits) { return __builtin_ctz(bits); }
M3_DEVICE_INLINE float reciprocal(float x) { return 1.0f / x; }
M3_DEVICE_INLINE float reciprocal_root(float x) { return 1.0f / std::sqrt(x); }

// ---- tiles ----

constexpr int kTileColumns = kWaveWidth == 64 ? 16 : 8;
struct Accumulator {
  static constexpr int kValues = 16 * kTileColumns / kWaveWidth;
  float value[kValues];
};
constexpr int kFragmentRows = 64 / kWaveWidth;
constexpr int kFragmentColumns = 1;

// Waves of 64 lanes use the map of the AMD target, waves of 32 that of the NVIDIA target: stages may rely on neither.
M3_DEVICE_INLINE int fragment_row(int lane, int chunk) { return kWaveWidth == 64 ? lane % 16 : lane / 4 + 8 * chunk; }
M3_DEVICE_INLINE int fragment_column(int lane, int) { return kWaveWidth == 64 ? lane % 16 : lane / 4; }
M3_DEVICE_INLINE int fragment_group(int lane) { return kWaveWidth == 64 ? lane / 16 : lane % 4; }
M3_DEVICE_INLINE int accumulator_row(int lane, int i) { return kWaveWidth == 64 ? 4 * (lane / 16) + i : lane / 4 + 8 * (i / 2); }
M3_DEVICE_INLINE int accumulator_column(int lane, int i) { return kWaveWidth == 64 ? lane % 16 : 2 * (lane % 4) + i % 2; }

struct RowsBf16 {
  Bytes16 chunk[kFragmentRows];
};
struct RowsF32 {
  Bytes16 chunk[kFragmentRows];
};
struct ColumnsBf16 {
  Bytes16 chunk[kFragmentColumns];
};
struct ColumnsF32 {
  Bytes16 chunk[kFragmentColumns];
};

M3_DEVICE_INLINE float bits_to_float(Bits32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
M3_DEVICE_INLINE Bits32 float_to_bits(float value) {
  Bits32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

namespace cpu {

template <int kRun, int kSteps, class Rows, class Columns>
M3_DEVICE_INLINE void multiply(Accumulator& sum, const Rows (&a)[kSteps], const Columns (&b)[kSteps], int columns) {
  static_assert(4 * kRun * kSteps <= kTileDepth);
  Block& block = *current;
  TileExchange& tile = block.exchange().tile[block.exchange_phase()];
  const int lane = block.lane(), group = fragment_group(lane);
  for (int chunk = 0; chunk < kFragmentRows; ++chunk) {
    const int row = fragment_row(lane, chunk);
    for (int step = 0; step < kSteps; ++step) tile.a[step][group][row] = a[step].chunk[chunk];
  }
  if (const int column = fragment_column(lane, 0); column < columns) {
    for (int step = 0; step < kSteps; ++step) {
      std::memcpy(reinterpret_cast<char*>(tile.b[column]) + (4 * step + group) * sizeof(Bytes16), &b[step].chunk[0], sizeof(Bytes16));
    }
  }
  for (int i = 0; i < Accumulator::kValues; ++i) tile.sum[accumulator_column(lane, i)][accumulator_row(lane, i)] = sum.value[i];
  if (arrives_last(tile, block.live_lanes())) compute_tile(tile, kSteps, kRun, columns);
  block.wave_barrier();
  for (int i = 0; i < Accumulator::kValues; ++i) sum.value[i] = tile.sum[accumulator_column(lane, i)][accumulator_row(lane, i)];
}

}  // namespace cpu

template <int kSteps>
M3_DEVICE_INLINE void multiply_bf16(Accumulator& sum, const RowsBf16 (&a)[kSteps], const ColumnsBf16 (&b)[kSteps], int columns) {
  cpu::multiply<8>(sum, a, b, columns);
}
template <int kSteps>
M3_DEVICE_INLINE void multiply_f32(Accumulator& sum, const RowsF32 (&a)[kSteps], const ColumnsF32 (&b)[kSteps], int columns) {
  cpu::multiply<4>(sum, a, b, columns);
}

}  // namespace m3::platform

#include "m3/platform/fp4_by_arithmetic.h"
#include "m3/platform/fp8_by_arithmetic.h"

namespace m3::platform {

template <bool>
M3_DEVICE_INLINE void widen_fp4(const Bytes16 (&codes)[kFragmentRows], const Bits32 (&scale_code)[kFragmentRows], RowsBf16 (&rows)[4]) {
  M3_UNROLL for (int run = 0; run < 4; ++run) {
    M3_UNROLL for (int chunk = 0; chunk < kFragmentRows; ++chunk) {
      widen_fp4_by_arithmetic(codes[chunk].word[run], e8m0_to_float(scale_code[chunk]), rows[run].chunk[chunk].word);
    }
  }
}
M3_DEVICE_INLINE void widen_fp4_e4m3(const Bytes16 (&codes)[kFragmentRows], const Bits32 (&scale_codes)[kFragmentRows], RowsBf16 (&rows)[4]) {
  M3_UNROLL for (int run = 0; run < 4; ++run) {
    M3_UNROLL for (int chunk = 0; chunk < kFragmentRows; ++chunk) {
      widen_fp4_by_arithmetic(codes[chunk].word[run], e4m3_to_float(scale_codes[chunk] >> (8 * (run / 2))), rows[run].chunk[chunk].word);
    }
  }
}
M3_DEVICE_INLINE constexpr int fp4_element(int place) { return place; }

template <bool>
M3_DEVICE_INLINE void widen_fp8(const Bytes16 (&codes)[kFragmentRows][2], const Bits32 (&scale_codes)[kFragmentRows], RowsBf16 (&rows)[4]) {
  M3_UNROLL for (int run = 0; run < 4; ++run) {
    M3_UNROLL for (int chunk = 0; chunk < kFragmentRows; ++chunk) {
      M3_UNROLL for (int word = 0; word < 2; ++word) {
        Bits32 pairs[2];
        widen_fp8_by_arithmetic(codes[chunk][run / 2].word[run % 2 * 2 + word], scale_codes[chunk] >> (16 * (run / 2)) & 0xFFu, pairs);
        rows[run].chunk[chunk].word[2 * word] = pairs[0];
        rows[run].chunk[chunk].word[2 * word + 1] = pairs[1];
      }
    }
  }
}
M3_DEVICE_INLINE constexpr int fp8_element(int place) { return place; }

// ---- schedule ----

#ifdef M3_WHOLE_ROWS
constexpr bool kWholeRows = true;
#else
constexpr bool kWholeRows = false;
#endif
constexpr int kDownTasks = 1;
constexpr bool kPrefetchKnown = false;
constexpr int kPrefetchShares = 0;

}  // namespace m3::platform
