// The NVIDIA target (sm_90): the names of m3/platform.h on PTX.
#pragma once

#define M3_GLOBAL __global__
#define M3_SHARED __shared__
#define M3_PARAMETER __grid_constant__  // read in place, not copied to the stack
#define M3_LAUNCH_BOUNDS __launch_bounds__(M3_BLOCK_THREADS)

namespace m3::platform {

constexpr int kWaveWidth = 32;
constexpr int kLeastWaves = M3_BLOCK_THREADS / kWaveWidth;
constexpr long long kTicksPerSecond = 1'000'000'000;
static_assert(M3_BLOCK_THREADS % kWaveWidth == 0);

// ---- places ----

M3_DEVICE_INLINE int thread_index() { return static_cast<int>(threadIdx.x); }
M3_DEVICE_INLINE int block_threads() { return M3_BLOCK_THREADS; }
M3_DEVICE_INLINE int lane_index() { return static_cast<int>(threadIdx.x) % kWaveWidth; }
M3_DEVICE_INLINE int wave_index() { return static_cast<int>(threadIdx.x) / kWaveWidth; }
M3_DEVICE_INLINE int wave_count() { return kLeastWaves; }
M3_DEVICE_INLINE int block_index() { return static_cast<int>(blockIdx.x); }
M3_DEVICE_INLINE int grid_blocks() { return static_cast<int>(gridDim.x); }

// ---- block ----

M3_DEVICE_INLINE void block_barrier() { __syncthreads(); }
M3_DEVICE_INLINE void wave_barrier() { __syncwarp(); }

template <class T>
M3_DEVICE_INLINE T shuffle_xor(T value, int mask) {
  static_assert(sizeof(T) == 4);
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
}

M3_DEVICE_INLINE void set_flag(int* flag) { *static_cast<volatile int*>(flag) = 1; }
M3_DEVICE_INLINE bool flag_is_set(int* flag) { return *static_cast<volatile int*>(flag) != 0; }

// ---- time ----

M3_DEVICE_INLINE long long clock_ticks() {
  long long ticks;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ticks));
  return ticks;
}
M3_DEVICE_INLINE void pause() { __nanosleep(20); }

// ---- words ----

M3_DEVICE_INLINE Bits64 load_device(const Bits64* word) {
  Bits64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
M3_DEVICE_INLINE Bits64 load_system(const Bits64* word) {
  Bits64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
M3_DEVICE_INLINE void store_device(Bits64* word, Bits64 value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
M3_DEVICE_INLINE void store_system(Bits64* word, Bits64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
M3_DEVICE_INLINE void announce_device(Bits64* word, Bits64 value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
M3_DEVICE_INLINE void announce_system(Bits64* word, Bits64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
M3_DEVICE_INLINE void acquire_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
M3_DEVICE_INLINE void acquire_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
M3_DEVICE_INLINE int load_int(const int* word) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
M3_DEVICE_INLINE void announce_int(int* word, int value) { asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(word), "r"(value) : "memory"); }
M3_DEVICE_INLINE bool claim(int* word) { return atomicExch(word, 1) == 0; }

// ---- data ----
// Past the L1 cache, which multiprocessors do not share.

template <class T>
M3_DEVICE_INLINE T load_data(const T* address) {
  T value;
  if constexpr (sizeof(T) == 4) {
    const Bits32 bits = __ldcg(reinterpret_cast<const unsigned*>(address));
    memcpy(&value, &bits, 4);
  } else if constexpr (sizeof(T) == 8) {
    const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(address));
    memcpy(&value, &bits, 8);
  } else {
    static_assert(sizeof(T) == 16);
    const uint4 bits = __ldcg(reinterpret_cast<const uint4*>(address));
    memcpy(&value, &bits, 16);
  }
  return value;
}
template <class T>
M3_DEVICE_INLINE void store_data(T* address, T value) {
  if constexpr (sizeof(T) == 4) {
    Bits32 bits;
    memcpy(&bits, &value, 4);
    __stcg(reinterpret_cast<unsigned*>(address), bits);
  } else {
    static_assert(sizeof(T) == 16);
    uint4 bits;
    memcpy(&bits, &value, 16);
    __stcg(reinterpret_cast<uint4*>(address), bits);
  }
}
// A release orders all that the thread saw across the barrier before it; nothing is left to wait for.
M3_DEVICE_INLINE void drain_stores() {}
M3_DEVICE_INLINE Bytes16 load_streamed(const void* address) {
  Bytes16 bytes;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bytes.word[0]), "=r"(bytes.word[1]), "=r"(bytes.word[2]), "=r"(bytes.word[3])
               : "l"(address));
  return bytes;
}

// ---- numbers ----

M3_DEVICE_INLINE float bits_to_float(Bits32 bits) { return __uint_as_float(bits); }
M3_DEVICE_INLINE Bits32 float_to_bits(float value) { return __float_as_uint(value); }
M3_DEVICE_INLINE float exp2_of(float x) {
  float power;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
M3_DEVICE_INLINE float reciprocal(float x) { return __frcp_rn(x); }
M3_DEVICE_INLINE float reciprocal_root(float x) { return __frsqrt_rn(x); }

// ---- tiles ----
// mma.m16n8k16: lane l is lane l % 4 of group l / 4. Of A it holds rows l / 4 and l / 4 + 8, of B column l / 4 (and, for the second half of the
// tile, l / 4 + 8), of D columns 2 (l % 4) and the next in both rows. Its K values are those of group l % 4; A and B agree on which values
// these are, so that any run of K may be a group's.

struct Accumulator {
  static constexpr int kValues = 8;
  float value[kValues];
};
constexpr int kFragmentRows = 2;

M3_DEVICE_INLINE int fragment_row(int lane, int chunk) { return lane / 4 + 8 * chunk; }
M3_DEVICE_INLINE int fragment_group(int lane) { return lane % 4; }
M3_DEVICE_INLINE int accumulator_row(int lane, int i) { return lane / 4 + 8 * (i / 2 % 2); }
M3_DEVICE_INLINE int accumulator_column(int lane, int i) { return 8 * (i / 4) + 2 * (lane % 4) + i % 2; }

struct FragmentBf16 {
  Bytes16 chunk[kFragmentRows];
};
struct FragmentF32 {
  Bytes16 chunk[kFragmentRows];
};

// 16 x 16 by 16 x 8, added to half a tile of sums. a0, a1: rows l / 4 and + 8, first half of the lane's K; a2, a3: second half.
M3_DEVICE_INLINE void multiply_16x8x16(float* sum, Bits32 a0, Bits32 a1, Bits32 a2, Bits32 a3, Bits32 b0, Bits32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <int kSteps>
M3_DEVICE_INLINE void multiply_bf16(Accumulator& sum, const FragmentBf16 (&a)[kSteps], const FragmentBf16 (&b)[kSteps], int columns) {
  M3_UNROLL for (int step = 0; step < kSteps; ++step) {
    const Bits32(&upper)[4] = a[step].chunk[0].word, (&lower)[4] = a[step].chunk[1].word;
    M3_UNROLL for (int half = 0; half < 2; ++half) {
      if (half == 1 && columns <= 8) continue;
      const Bits32(&right)[4] = b[step].chunk[half].word;
      multiply_16x8x16(sum.value + 4 * half, upper[0], lower[0], upper[1], lower[1], right[0], right[1]);
      multiply_16x8x16(sum.value + 4 * half, upper[2], lower[2], upper[3], lower[3], right[2], right[3]);
    }
  }
}

// The bf16 part of an fp32 value, by truncation, and what is left, exactly. Three parts hold all 24 bits.
M3_DEVICE_INLINE Bits32 split_bf16(float& value) {
  const Bits32 part = float_to_bits(value) & 0xFFFF0000u;
  value -= bits_to_float(part);
  return part >> 16;
}

// There is no fp32 matrix instruction: `a` is taken apart into three bf16 parts whose products with the bf16 values in `b` are exact. An
// infinite weight gives NaN here, where other targets give infinity or NaN.
template <int kSteps>
M3_DEVICE_INLINE void multiply_f32(Accumulator& sum, const FragmentF32 (&a)[kSteps], const FragmentF32 (&b)[kSteps], int columns) {
  M3_UNROLL for (int step = 0; step < kSteps; ++step) {
    float rest[kFragmentRows][4];
    M3_UNROLL for (int chunk = 0; chunk < kFragmentRows; ++chunk) {
      M3_UNROLL for (int i = 0; i < 4; ++i) rest[chunk][i] = bits_to_float(a[step].chunk[chunk].word[i]);
    }
    M3_UNROLL for (int part = 0; part < 3; ++part) {
      Bits32 left[kFragmentRows][2];
      M3_UNROLL for (int chunk = 0; chunk < kFragmentRows; ++chunk) {
        M3_UNROLL for (int pair = 0; pair < 2; ++pair) {
          const Bits32 low = split_bf16(rest[chunk][2 * pair]);
          left[chunk][pair] = low | split_bf16(rest[chunk][2 * pair + 1]) << 16;
        }
      }
      M3_UNROLL for (int half = 0; half < 2; ++half) {
        if (half == 1 && columns <= 8) continue;
        const Bits32(&right)[4] = b[step].chunk[half].word;
        multiply_16x8x16(sum.value + 4 * half, left[0][0], left[1][0], left[0][1], left[1][1], (right[0] >> 16) | (right[1] & 0xFFFF0000u),
                         (right[2] >> 16) | (right[3] & 0xFFFF0000u));
      }
    }
  }
}

}  // namespace m3::platform

#include "m3/platform/fp4_by_arithmetic.h"

namespace m3::platform {

M3_DEVICE_INLINE void widen_fp4(Bits32 codes, Bits32 scale_code, Bits32 (&pairs)[4]) { widen_fp4_by_arithmetic(codes, scale_code, pairs); }

}  // namespace m3::platform
