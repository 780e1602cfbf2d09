// The AMD target (gfx942, gfx950): the names of m3/platform.h on compiler builtins alone, so that no ROCm header is needed.
//
// Scopes follow the LLVM AMDGPU memory model: agent scope reaches the blocks of the device, whose L2 caches are not coherent with each
// other, system scope the other devices. Relaxed atomics of a scope bypass every cache that the scope does not share.
#pragma once

#define M3_GLOBAL __attribute__((global))
#define M3_SHARED __attribute__((shared))
#define M3_PARAMETER
// One block a compute unit is enough; its waves share the registers of four SIMDs.
#define M3_LAUNCH_BOUNDS                                                             \
  __attribute__((amdgpu_flat_work_group_size(M3_BLOCK_THREADS, M3_BLOCK_THREADS))) \
  __attribute__((amdgpu_waves_per_eu((M3_BLOCK_THREADS + 255) / 256)))

namespace m3::platform {

constexpr int kWaveWidth = 64;
constexpr int kLeastWaves = M3_BLOCK_THREADS / kWaveWidth;
constexpr long long kTicksPerSecond = 100'000'000;
static_assert(M3_BLOCK_THREADS % kWaveWidth == 0);

// ---- places ----

M3_DEVICE_INLINE int thread_index() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
M3_DEVICE_INLINE int block_threads() { return M3_BLOCK_THREADS; }
M3_DEVICE_INLINE int lane_index() { return static_cast<int>(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u))); }
// Uniform over the wave, which the compiler cannot see in the thread index.
M3_DEVICE_INLINE int wave_index() { return __builtin_amdgcn_readfirstlane(thread_index() / kWaveWidth); }
M3_DEVICE_INLINE int wave_count() { return kLeastWaves; }
M3_DEVICE_INLINE int block_index() { return static_cast<int>(__builtin_amdgcn_workgroup_id_x()); }
M3_DEVICE_INLINE int grid_blocks() { return static_cast<int>(__builtin_amdgcn_grid_size_x()) / M3_BLOCK_THREADS; }

// ---- block ----

M3_DEVICE_INLINE void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
M3_DEVICE_INLINE void wave_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

template <class T>
M3_DEVICE_INLINE T shuffle_xor(T value, int mask) {
  static_assert(sizeof(T) == 4);
  return __builtin_bit_cast(T, __builtin_amdgcn_ds_bpermute((lane_index() ^ mask) << 2, __builtin_bit_cast(int, value)));
}

M3_DEVICE_INLINE int uniform(int value) { return __builtin_amdgcn_readfirstlane(value); }
M3_DEVICE_INLINE int of_first_lane(int value) { return uniform(value); }

constexpr int kMostTeams = 1;

M3_DEVICE_INLINE void set_flag(int* flag) { __hip_atomic_store(flag, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP); }
M3_DEVICE_INLINE bool flag_is_set(int* flag) { return __hip_atomic_load(flag, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP) != 0; }

M3_DEVICE_INLINE void signal(int* word, int value) { __hip_atomic_store(word, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_WORKGROUP); }
M3_DEVICE_INLINE void signal_add(int* word, int value) { __hip_atomic_fetch_add(word, value, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_WORKGROUP); }
M3_DEVICE_INLINE int signalled(int* word) { return __hip_atomic_load(word, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_WORKGROUP); }

// ---- time ----

M3_DEVICE_INLINE long long clock_ticks() { return static_cast<long long>(__builtin_readsteadycounter()); }
M3_DEVICE_INLINE long long stamp_ticks() { return clock_ticks(); }
constexpr int kPollsALook = 1;
M3_DEVICE_INLINE void pause() { __builtin_amdgcn_s_sleep(1); }

// ---- words ----

M3_DEVICE_INLINE Bits64 load_device(const Bits64* word) { return __hip_atomic_load(word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
M3_DEVICE_INLINE Bits64 load_device_data(const Bits64* word) { return load_device(word); }
M3_DEVICE_INLINE Bits64 load_system(const Bits64* word) { return __hip_atomic_load(word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
M3_DEVICE_INLINE void store_device(Bits64* word, Bits64 value) { __hip_atomic_store(word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
M3_DEVICE_INLINE void store_system(Bits64* word, Bits64 value) { __hip_atomic_store(word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
M3_DEVICE_INLINE void announce_device(Bits64* word, Bits64 value) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  store_device(word, value);
}
M3_DEVICE_INLINE void announce_system(Bits64* word, Bits64 value) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  store_system(word, value);
}
M3_DEVICE_INLINE void acquire_device() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); }
M3_DEVICE_INLINE void acquire_system() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, ""); }
M3_DEVICE_INLINE int load_int(const int* word) { return __hip_atomic_load(word, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT); }
M3_DEVICE_INLINE void announce_int(int* word, int value) { __hip_atomic_store(word, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT); }
M3_DEVICE_INLINE bool claim(int* word) { return __hip_atomic_exchange(word, 1, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT) == 0; }

// ---- data ----
// Agent-scope relaxed accesses of at most eight bytes; sixteen move as two.

template <class T>
M3_DEVICE_INLINE T load_data(const T* address) {
  if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(T, __hip_atomic_load(reinterpret_cast<const AliasingBits32*>(address), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT));
  } else {
    constexpr int kWords = sizeof(T) / 8;
    struct {
      Bits64 word[kWords];
    } bits;
    M3_UNROLL for (int i = 0; i < kWords; ++i) {
      bits.word[i] = __hip_atomic_load(reinterpret_cast<const AliasingBits64*>(address) + i, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    }
    return __builtin_bit_cast(T, bits);
  }
}
template <class T>
M3_DEVICE_INLINE void store_data(T* address, T value) {
  if constexpr (sizeof(T) == 4) {
    __hip_atomic_store(reinterpret_cast<AliasingBits32*>(address), __builtin_bit_cast(Bits32, value), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  } else {
    constexpr int kWords = sizeof(T) / 8;
    struct Bits {
      Bits64 word[kWords];
    };
    const Bits bits = __builtin_bit_cast(Bits, value);
    M3_UNROLL for (int i = 0; i < kWords; ++i) {
      __hip_atomic_store(reinterpret_cast<AliasingBits64*>(address) + i, bits.word[i], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    }
  }
}
// s_waitcnt vmcnt(0): every store of the wave has reached its scope. The other counters are left alone.
M3_DEVICE_INLINE void drain_stores() { __builtin_amdgcn_s_waitcnt(0x0F70); }
M3_DEVICE_INLINE void load_streamed(bool wanted, const void* address, Bytes16& bytes) {
  typedef Bits32 Four __attribute__((ext_vector_type(4)));
  if (wanted) bytes = __builtin_bit_cast(Bytes16, __builtin_nontemporal_load(static_cast<const Four*>(address)));
}
M3_DEVICE_INLINE void load_byte(bool wanted, const unsigned char* address, Bits32& value) {
  if (wanted) value = *address;
}
M3_DEVICE_INLINE void load_two_bytes(bool wanted, const unsigned char* address, Bits32& value) {
  if (wanted) value = *reinterpret_cast<const AliasingBits16*>(address);
}
M3_DEVICE_INLINE void load_four_bytes(bool wanted, const unsigned char* address, Bits32& value) {
  if (wanted) value = *reinterpret_cast<const AliasingBits32*>(address);
}

template <class T>
M3_DEVICE_INLINE T load_kept(const T* address) {
  return *address;
}
// No instruction fills a cache without a register to load into.
M3_DEVICE_INLINE void prefetch(const void*, int) {}

// ---- numbers ----

M3_DEVICE_INLINE float bits_to_float(Bits32 bits) { return __builtin_bit_cast(float, bits); }
M3_DEVICE_INLINE Bits32 float_to_bits(float value) { return __builtin_bit_cast(Bits32, value); }
M3_DEVICE_INLINE float exp2_of(float x) { return __builtin_amdgcn_exp2f(x); }
M3_DEVICE_INLINE int count_bits(Bits32 bits) { return __builtin_popcount(bits); }
M3_DEVICE_INLINE int lowest_bit(Bits32 bits) { return __builtin_ctz(bits); }
M3_DEVICE_INLINE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
M3_DEVICE_INLINE float reciprocal_root(float x) { return __builtin_amdgcn_rsqf(x); }

// ---- tiles ----
// V_MFMA_F32_16X16X*: lane l holds, of A, row l % 16, of B, column l % 16, of D, rows 4 (l / 16) .. + 3 of column l % 16. Its K values are
// those of group l / 16; A and B agree on which values these are, so that any run of K may be a group's.

typedef float Four __attribute__((ext_vector_type(4)));

struct Accumulator {
  static constexpr int kValues = 4;
  float value[kValues];
};
constexpr int kTileColumns = 16;
constexpr int kFragmentRows = 1;
constexpr int kFragmentColumns = 1;

M3_DEVICE_INLINE int fragment_row(int lane, int) { return lane % 16; }
M3_DEVICE_INLINE int fragment_column(int lane, int) { return lane % 16; }
M3_DEVICE_INLINE int fragment_group(int lane) { return lane / 16; }
M3_DEVICE_INLINE int accumulator_row(int lane, int i) { return 4 * (lane / 16) + i; }
M3_DEVICE_INLINE int accumulator_column(int lane, int) { return lane % 16; }

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

template <int kSteps>
M3_DEVICE_INLINE void multiply_bf16(Accumulator& sum, const RowsBf16 (&a)[kSteps], const ColumnsBf16 (&b)[kSteps], int) {
  Four total = __builtin_bit_cast(Four, sum);
  M3_UNROLL for (int step = 0; step < kSteps; ++step) {
#if defined(__gfx950__)
    typedef __bf16 Eight __attribute__((ext_vector_type(8)));
    const Eight left = __builtin_bit_cast(Eight, a[step].chunk[0]), right = __builtin_bit_cast(Eight, b[step].chunk[0]);
    total = __builtin_amdgcn_mfma_f32_16x16x32_bf16(left, right, total, 0, 0, 0);
#else
    // Half of the run at a time.
    typedef short Quad __attribute__((ext_vector_type(4)));
    M3_UNROLL for (int half = 0; half < 2; ++half) {
      const Bytes8 left{{a[step].chunk[0].word[2 * half], a[step].chunk[0].word[2 * half + 1]}};
      const Bytes8 right{{b[step].chunk[0].word[2 * half], b[step].chunk[0].word[2 * half + 1]}};
      total = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Quad, left), __builtin_bit_cast(Quad, right), total, 0, 0, 0);
    }
#endif
  }
  sum = __builtin_bit_cast(Accumulator, total);
}

template <int kSteps>
M3_DEVICE_INLINE void multiply_f32(Accumulator& sum, const RowsF32 (&a)[kSteps], const ColumnsF32 (&b)[kSteps], int) {
  Four total = __builtin_bit_cast(Four, sum);
  M3_UNROLL for (int step = 0; step < kSteps; ++step) {
    M3_UNROLL for (int i = 0; i < 4; ++i) {
      total = __builtin_amdgcn_mfma_f32_16x16x4f32(bits_to_float(a[step].chunk[0].word[i]), bits_to_float(b[step].chunk[0].word[i]), total, 0, 0, 0);
    }
  }
  sum = __builtin_bit_cast(Accumulator, total);
}

}  // namespace m3::platform

#include "m3/platform/fp4_by_arithmetic.h"
#include "m3/platform/fp8_by_arithmetic.h"

namespace m3::platform {

// Eight FP4 codes times a scale, as four pairs of bf16.
#if defined(__gfx950__)
M3_DEVICE_INLINE void widen_fp4_run(Bits32 codes, Bits32 scale_code, Bits32 (&pairs)[4]) {
  // What the instruction makes of exponent fields 0 and 255 is not documented; those scales are rare and take the exact path.
  if (scale_code == 0 || scale_code == 255) return widen_fp4_by_arithmetic(codes, e8m0_to_float(scale_code), pairs);
  const float scale = bits_to_float(scale_code << 23);
  pairs[0] = __builtin_bit_cast(Bits32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 0));
  pairs[1] = __builtin_bit_cast(Bits32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 1));
  pairs[2] = __builtin_bit_cast(Bits32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 2));
  pairs[3] = __builtin_bit_cast(Bits32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 3));
}
#else
M3_DEVICE_INLINE void widen_fp4_run(Bits32 codes, Bits32 scale_code, Bits32 (&pairs)[4]) {
  widen_fp4_by_arithmetic(codes, e8m0_to_float(scale_code), pairs);
}
#endif
template <bool>
M3_DEVICE_INLINE void widen_fp4(const Bytes16 (&codes)[kFragmentRows], const Bits32 (&scale_code)[kFragmentRows], RowsBf16 (&rows)[4]) {
  M3_UNROLL for (int run = 0; run < 4; ++run) {
    M3_UNROLL for (int chunk = 0; chunk < kFragmentRows; ++chunk) widen_fp4_run(codes[chunk].word[run], scale_code[chunk], rows[run].chunk[chunk].word);
  }
}
M3_DEVICE_INLINE constexpr int fp4_element(int place) { return place; }

// Eight FP4 codes times an E4M3 scale. The conversion's own scale is a power of two, so it converts to fp32 and the product follows; the
// product is exact in bf16: its upper half is all of it.
#if defined(__gfx950__)
M3_DEVICE_INLINE void widen_fp4_e4m3_run(Bits32 codes, float scale, Bits32 (&pairs)[4]) {
  typedef float Two __attribute__((ext_vector_type(2)));
  const Two elements[4] = {
      __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(codes, 1.0f, 0), __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(codes, 1.0f, 1),
      __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(codes, 1.0f, 2), __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(codes, 1.0f, 3)};
  M3_UNROLL for (int i = 0; i < 4; ++i) {
    const Two product = elements[i] * scale;
    pairs[i] = __builtin_amdgcn_perm(float_to_bits(product.y), float_to_bits(product.x), 0x07060302u);
  }
}
#else
M3_DEVICE_INLINE void widen_fp4_e4m3_run(Bits32 codes, float scale, Bits32 (&pairs)[4]) { widen_fp4_by_arithmetic(codes, scale, pairs); }
#endif
M3_DEVICE_INLINE void widen_fp4_e4m3(const Bytes16 (&codes)[kFragmentRows], const Bits32 (&scale_codes)[kFragmentRows], RowsBf16 (&rows)[4]) {
  M3_UNROLL for (int chunk = 0; chunk < kFragmentRows; ++chunk) {
    M3_UNROLL for (int half = 0; half < 2; ++half) {
      const float scale = e4m3_to_float(scale_codes[chunk] >> (8 * half));
      M3_UNROLL for (int run = 2 * half; run < 2 * half + 2; ++run) widen_fp4_e4m3_run(codes[chunk].word[run], scale, rows[run].chunk[chunk].word);
    }
  }
}

// Two runs of E4M3 codes times their scale.
M3_DEVICE_INLINE void widen_fp8_runs(const Bytes16& codes, Bits32 scale_code, Bytes16& first, Bytes16& second) {
#if defined(__gfx950__)
  // With these scales every product is a normal number, so that it does not matter what the instruction makes of others. gfx942's own
  // conversions are of another FP8 (fnuz) and of no use here.
  if (scale_code - 16 <= 240 - 16) {
    const float scale = bits_to_float(scale_code << 23);
    M3_UNROLL for (int i = 0; i < 4; ++i) {
      Bytes16& run = i < 2 ? first : second;
      run.word[i % 2 * 2] = __builtin_bit_cast(Bits32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(codes.word[i], scale, false));
      run.word[i % 2 * 2 + 1] = __builtin_bit_cast(Bits32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(codes.word[i], scale, true));
    }
    return;
  }
#endif
  M3_UNROLL for (int i = 0; i < 4; ++i) {
    Bytes16& run = i < 2 ? first : second;
    Bits32 pairs[2];
    widen_fp8_by_arithmetic(codes.word[i], scale_code, pairs);
    run.word[i % 2 * 2] = pairs[0];
    run.word[i % 2 * 2 + 1] = pairs[1];
  }
}
template <bool>
M3_DEVICE_INLINE void widen_fp8(const Bytes16 (&codes)[kFragmentRows][2], const Bits32 (&scale_codes)[kFragmentRows], RowsBf16 (&rows)[4]) {
  M3_UNROLL for (int chunk = 0; chunk < kFragmentRows; ++chunk) {
    M3_UNROLL for (int half = 0; half < 2; ++half) {
      const Bits32 scale_code = scale_codes[chunk] >> (16 * half) & 0xFFu;
      widen_fp8_runs(codes[chunk][half], scale_code, rows[2 * half].chunk[chunk], rows[2 * half + 1].chunk[chunk]);
    }
  }
}
M3_DEVICE_INLINE constexpr int fp8_element(int place) { return place; }

// ---- schedule ----

constexpr bool kWholeRows = false;
constexpr int kDownTasks = 1;
constexpr bool kPrefetchKnown = false;
constexpr int kPrefetchShares = 0;

}  // namespace m3::platform
