// The NVIDIA target (sm_90): the names of m3/platform.h on PTX.
//
// One block a multiprocessor: 512 threads that may use 128 registers each.
#pragma once

#define M3_GLOBAL __global__
// Scales up to 2^1 take one factor; weights with larger ones have an entry of their own.
#define M3_PLAIN_SCALES
#define M3_PARAMETER __grid_constant__  // read in place, not copied to the stack
#define M3_LAUNCH_BOUNDS __launch_bounds__(M3_BLOCK_THREADS, 1)

namespace m3::platform {

constexpr int kWaveWidth = 32;
constexpr int kLeastWaves = M3_BLOCK_THREADS / kWaveWidth;
constexpr long long kTicksPerSecond = 1'000'000'000;
static_assert(M3_BLOCK_THREADS % kWaveWidth == 0);

// ---- places ----

M3_DEVICE_INLINE int thread_index() {
  const unsigned index = threadIdx.x;
  __builtin_assume(index < M3_BLOCK_THREADS);
  return static_cast<int>(index);
}
M3_DEVICE_INLINE constexpr int block_threads() { return M3_BLOCK_THREADS; }
M3_DEVICE_INLINE int lane_index() { return static_cast<int>(threadIdx.x % kWaveWidth); }
M3_DEVICE_INLINE int wave_index() { return static_cast<int>(threadIdx.x / kWaveWidth); }
M3_DEVICE_INLINE constexpr int wave_count() { return kLeastWaves; }
M3_DEVICE_INLINE int block_index() { return static_cast<int>(blockIdx.x); }
M3_DEVICE_INLINE int grid_blocks() { return static_cast<int>(gridDim.x); }

// ---- block ----

M3_DEVICE_INLINE void block_barrier() { __syncthreads(); }
M3_DEVICE_INLINE void wave_barrier() { __syncwarp(); }

// What a lane reads from the first one counts as uniform.
M3_DEVICE_INLINE int uniform(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }
M3_DEVICE_INLINE int of_first_lane(int value) { return uniform(value); }

constexpr int kMostTeams = 2;

template <class T>
M3_DEVICE_INLINE T shuffle_xor(T value, int mask) {
  static_assert(sizeof(T) == 4);
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
}

M3_DEVICE_INLINE void set_flag(int* flag) { *static_cast<volatile int*>(flag) = 1; }
M3_DEVICE_INLINE bool flag_is_set(int* flag) { return *static_cast<volatile int*>(flag) != 0; }
M3_DEVICE_INLINE void signal(int* word, int value) {
  __threadfence_block();
  *static_cast<volatile int*>(word) = value;
}
M3_DEVICE_INLINE void signal_add(int* word, int value) {
  __threadfence_block();
  atomicAdd(word, value);
}
M3_DEVICE_INLINE int signalled(int* word) {
  const int value = *static_cast<volatile int*>(word);
  __threadfence_block();
  return value;
}

// ---- time ----

M3_DEVICE_INLINE long long clock_ticks() {
  long long ticks;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ticks));
  return ticks;
}
// The multiprocessor's cycles: %globaltimer is too coarse for a stage.
M3_DEVICE_INLINE long long stamp_ticks() { return clock64(); }
M3_DEVICE_INLINE void pause() { __nanosleep(20); }
constexpr int kPollsALook = 16;

// ---- words ----

M3_DEVICE_INLINE Bits64 load_device(const Bits64* word) {
  Bits64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word));
  return value;
}
M3_DEVICE_INLINE Bits64 load_device_data(const Bits64* word) {
  Bits64 value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
M3_DEVICE_INLINE Bits64 load_system(const Bits64* word) {
  Bits64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word));
  return value;
}
M3_DEVICE_INLINE void store_device(Bits64* word, Bits64 value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value));
}
M3_DEVICE_INLINE void store_system(Bits64* word, Bits64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value));
}
M3_DEVICE_INLINE void announce_device(Bits64* word, Bits64 value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
M3_DEVICE_INLINE void announce_system(Bits64* word, Bits64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
// The polls have acquired: a fence would wait for the weights that are on their way.
M3_DEVICE_INLINE void acquire_device() {}
M3_DEVICE_INLINE void acquire_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
M3_DEVICE_INLINE int load_int(const int* word) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(word));
  return value;
}
M3_DEVICE_INLINE void announce_int(int* word, int value) { asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(word), "r"(value) : "memory"); }
M3_DEVICE_INLINE bool claim(int* word) { return atomicExch(word, 1) == 0; }

// ---- data ----
// Ordinary accesses: an acquire empties the L1 cache of its multiprocessor, and nothing is read before the acquire that covers it, so that
// what is read many times comes from L1.

template <class T>
M3_DEVICE_INLINE T load_data(const T* address) {
  return *address;
}
M3_DEVICE_INLINE Bytes16 load_data(const Bytes16* address) {
  Bytes16 bytes;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bytes.word[0]), "=r"(bytes.word[1]), "=r"(bytes.word[2]), "=r"(bytes.word[3])
               : "l"(address));
  return bytes;
}
template <class T>
M3_DEVICE_INLINE void store_data(T* address, T value) {
  *address = value;
}
M3_DEVICE_INLINE void store_data(Bytes16* address, Bytes16 value) {
  *reinterpret_cast<uint4*>(address) = make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
}
// A release orders all that the thread saw across the barrier before it; nothing is left to wait for.
M3_DEVICE_INLINE void drain_stores() {}
// Predicated, not branched around: a loop of loads and products stays one block of code that the compiler can order.
M3_DEVICE_INLINE void load_streamed(bool wanted, const void* address, Bytes16& bytes) {
  asm volatile(
      "{\n .reg .pred wanted;\n setp.ne.s32 wanted, %5, 0;\n @wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(bytes.word[0]), "+r"(bytes.word[1]), "+r"(bytes.word[2]), "+r"(bytes.word[3])
      : "l"(address), "r"(static_cast<int>(wanted)));
}
M3_DEVICE_INLINE void load_byte(bool wanted, const unsigned char* address, Bits32& value) {
  asm volatile("{\n .reg .pred wanted;\n setp.ne.s32 wanted, %2, 0;\n @wanted ld.global.nc.u8 %0, [%1];\n}"
               : "+r"(value)
               : "l"(address), "r"(static_cast<int>(wanted)));
}
M3_DEVICE_INLINE void load_two_bytes(bool wanted, const unsigned char* address, Bits32& value) {
  asm volatile("{\n .reg .pred wanted;\n setp.ne.s32 wanted, %2, 0;\n @wanted ld.global.nc.u16 %0, [%1];\n}"
               : "+r"(value)
               : "l"(address), "r"(static_cast<int>(wanted)));
}
M3_DEVICE_INLINE void load_four_bytes(bool wanted, const unsigned char* address, Bits32& value) {
  asm volatile("{\n .reg .pred wanted;\n setp.ne.s32 wanted, %2, 0;\n @wanted ld.global.nc.u32 %0, [%1];\n}"
               : "+r"(value)
               : "l"(address), "r"(static_cast<int>(wanted)));
}
template <class T>
M3_DEVICE_INLINE T load_kept(const T* address) {
  return __ldg(address);
}
M3_DEVICE_INLINE Bytes16 load_kept(const Bytes16* address) {
  const uint4 bytes = __ldg(reinterpret_cast<const uint4*>(address));
  return Bytes16{{bytes.x, bytes.y, bytes.z, bytes.w}};
}
M3_DEVICE_INLINE void prefetch(const void* address, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(static_cast<unsigned>(bytes)));
}

// ---- numbers ----

M3_DEVICE_INLINE float bits_to_float(Bits32 bits) { return __uint_as_float(bits); }
M3_DEVICE_INLINE Bits32 float_to_bits(float value) { return __float_as_uint(value); }
M3_DEVICE_INLINE float exp2_of(float x) { return exp2f(x); }
M3_DEVICE_INLINE int count_bits(Bits32 bits) { return __popc(bits); }
M3_DEVICE_INLINE int lowest_bit(Bits32 bits) { return __ffs(static_cast<int>(bits)) - 1; }
M3_DEVICE_INLINE float reciprocal(float x) { return __frcp_rn(x); }
M3_DEVICE_INLINE float reciprocal_root(float x) { return __frcp_rn(__fsqrt_rn(x)); }

// ---- tiles ----
// mma.m16n8k16: lane l holds, of A, rows l / 4 and l / 4 + 8, of B, column l / 4, of D, columns 2 (l % 4) and the next in both rows. Its K
// values are those of group l % 4; A and B agree on which values these are, so that any run of K may be a group's.

constexpr int kTileColumns = 8;
struct Accumulator {
  static constexpr int kValues = 4;
  float value[kValues];
};
constexpr int kFragmentRows = 2;
constexpr int kFragmentColumns = 1;

M3_DEVICE_INLINE int fragment_row(int lane, int chunk) { return lane / 4 + 8 * chunk; }
M3_DEVICE_INLINE int fragment_column(int lane, int) { return lane / 4; }
M3_DEVICE_INLINE int fragment_group(int lane) { return lane % 4; }
M3_DEVICE_INLINE int accumulator_row(int lane, int i) { return lane / 4 + 8 * (i / 2); }
M3_DEVICE_INLINE int accumulator_column(int lane, int i) { return 2 * (lane % 4) + i % 2; }

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

// a0, a1: rows l / 4 and l / 4 + 8, first half of the lane's K; a2, a3: second half.
M3_DEVICE_INLINE void multiply_16x8x16(Accumulator& sum, Bits32 a0, Bits32 a1, Bits32 a2, Bits32 a3, Bits32 b0, Bits32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum.value[0]), "+f"(sum.value[1]), "+f"(sum.value[2]), "+f"(sum.value[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <int kSteps>
M3_DEVICE_INLINE void multiply_bf16(Accumulator& sum, const RowsBf16 (&a)[kSteps], const ColumnsBf16 (&b)[kSteps], int) {
  M3_UNROLL for (int step = 0; step < kSteps; ++step) {
    const Bits32(&upper)[4] = a[step].chunk[0].word, (&lower)[4] = a[step].chunk[1].word, (&right)[4] = b[step].chunk[0].word;
    multiply_16x8x16(sum, upper[0], lower[0], upper[1], lower[1], right[0], right[1]);
    multiply_16x8x16(sum, upper[2], lower[2], upper[3], lower[3], right[2], right[3]);
  }
}

// The bf16 part of an fp32 value, by truncation, and what is left, exactly. Three parts hold all 24 bits.
M3_DEVICE_INLINE Bits32 split_bf16(float& value) {
  const Bits32 part = float_to_bits(value) & 0xFFFF0000u;
  value -= bits_to_float(part);
  return part;
}

// The upper halves of two words: two fp32 values of bf16 precision as a pair.
M3_DEVICE_INLINE Bits32 upper_halves(Bits32 low, Bits32 high) { return __byte_perm(low, high, 0x7632); }

// There is no fp32 matrix instruction: a row's value is taken apart into three bf16 parts whose products with the bf16 values of the columns
// are exact. An infinite row value gives NaN here, where other targets give infinity or NaN.
template <int kSteps>
M3_DEVICE_INLINE void multiply_f32(Accumulator& sum, const RowsF32 (&a)[kSteps], const ColumnsF32 (&b)[kSteps], int) {
  M3_UNROLL for (int step = 0; step < kSteps; ++step) {
    float rest[kFragmentRows][4];
    M3_UNROLL for (int chunk = 0; chunk < kFragmentRows; ++chunk) {
      M3_UNROLL for (int i = 0; i < 4; ++i) rest[chunk][i] = bits_to_float(a[step].chunk[chunk].word[i]);
    }
    const Bits32(&right)[4] = b[step].chunk[0].word;
    M3_UNROLL for (int part = 0; part < 3; ++part) {
      Bits32 left[kFragmentRows][2];
      M3_UNROLL for (int chunk = 0; chunk < kFragmentRows; ++chunk) {
        M3_UNROLL for (int pair = 0; pair < 2; ++pair) {
          const Bits32 low = split_bf16(rest[chunk][2 * pair]), high = split_bf16(rest[chunk][2 * pair + 1]);
          left[chunk][pair] = upper_halves(low, high);
        }
      }
      multiply_16x8x16(sum, left[0][0], left[1][0], left[0][1], left[1][1], upper_halves(right[0], right[1]), upper_halves(right[2], right[3]));
    }
  }
}

// ---- FP4 ----
// The magnitude bits e1 e0 m of E2M1, put at bits 8 to 6 of a bf16, are the value times 2^-126, subnormals included; a product with a power of
// two makes the exponent and the scale. Codes j and j + 4 of a word lie 16 bits apart: they make pair j without being moved apart.

M3_DEVICE_INLINE constexpr int fp4_element(int place) { return place / 2 + 4 * (place % 2); }

M3_DEVICE_INLINE Bits32 multiply_pair(Bits32 a, Bits32 b) {
  Bits32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Two copies of each nibble, its sign at bit 15 in one and its magnitude at bits 8 to 6 in the other: one product and a mask.
M3_DEVICE_INLINE Bits32 spread_nibbles(Bits32 codes, Bits32 mask, int shift) {
  return (codes & mask) * ((1u << (6 - shift)) + (1u << (12 - shift))) & 0x81C081C0u;
}

constexpr Bits32 kLargestPlainScale = 128;

// 2^(code - 127) times the 2^126 that the pattern lacks, in both halves. Beyond code 128 that is no bf16: the rest is a second factor.
M3_DEVICE_INLINE Bits32 plain_scale(Bits32 code) { return code * 0x00800080u + 0x3F003F00u; }
M3_DEVICE_INLINE Bits32 rest_of_scale(Bits32 code) {
  const Bits32 beyond = code < kLargestPlainScale ? 0 : code - kLargestPlainScale;
  return code == 255 ? 0x7FC07FC0u : beyond * 0x00800080u + 0x3F803F80u;
}

template <bool kAnyScale>
M3_DEVICE_INLINE void widen_fp4(const Bytes16 (&codes)[kFragmentRows], const Bits32 (&scale_code)[kFragmentRows], RowsBf16 (&rows)[4]) {
  M3_UNROLL for (int chunk = 0; chunk < kFragmentRows; ++chunk) {
    const Bits32 code = kAnyScale ? min(scale_code[chunk], kLargestPlainScale) : scale_code[chunk];
    const Bits32 scale = plain_scale(code), rest = rest_of_scale(scale_code[chunk]);
    M3_UNROLL for (int run = 0; run < 4; ++run) {
      const Bits32 word = codes[chunk].word[run], upper = word >> 8;
      Bits32(&pairs)[4] = rows[run].chunk[chunk].word;
      pairs[0] = multiply_pair(spread_nibbles(word, 0x000F000Fu, 0), scale);
      pairs[1] = multiply_pair(spread_nibbles(word, 0x00F000F0u, 4), scale);
      pairs[2] = multiply_pair(spread_nibbles(upper, 0x000F000Fu, 0), scale);
      pairs[3] = multiply_pair(spread_nibbles(upper, 0x00F000F0u, 4), scale);
      if (kAnyScale) {
        M3_UNROLL for (int i = 0; i < 4; ++i) pairs[i] = multiply_pair(pairs[i], rest);
      }
    }
  }
}

}  // namespace m3::platform

#include "m3/platform/fp8_by_pairs.h"

namespace m3::platform {

// ---- schedule ----

constexpr bool kWholeRows = true;
// 384 tasks of stage down on 132 multiprocessors are three for most.
constexpr int kDownTasks = 3;
constexpr bool kPrefetchKnown = true;
constexpr int kPrefetchShares = 0;

}  // namespace m3::platform
