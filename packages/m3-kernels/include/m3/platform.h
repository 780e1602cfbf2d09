// The operations in which the targets differ. A stage uses these names and never asks which target it runs on.
//
// Places      thread_index, block_threads, lane_index, wave_index, wave_count, block_index, grid_blocks, kWaveWidth; kLeastWaves, the fewest
//             waves a block can have, known when compiling
// Block       block_barrier: every thread's shared memory and announcements before it are seen after it
//             wave_barrier: the same for the lanes of a wave
//             shuffle_xor(value, mask): the value of lane (lane ^ mask); every lane of the wave takes part
//             set_flag, flag_is_set: a flag in shared memory that several threads may set at once
// Time        clock_ticks (kTicksPerSecond), pause (in every polling loop)
// Words       load_device, load_system, store_device, store_system: one indivisible 64-bit access that orders nothing; device scope
//             reaches the blocks of this launch, system scope the other ranks
//             announce_device, announce_system: such a store, ordered after all that this thread did or saw across a barrier
//             acquire_device, acquire_system: after a successful poll; later loads see what was announced with the polled words
//             load_int, announce_int: the same for the 32-bit epoch words, device scope; claim: take a 32-bit word that is 0, once
// Data        load_data, store_data: what other blocks wrote or will read, past every cache that they do not share
//             drain_stores: before the barrier that precedes an announcement
//             load_streamed: 16 bytes of weights that this launch reads once
// Numbers     exp2_of, reciprocal, reciprocal_root
// Tiles       a wave multiplies 16 x K by K x 16 into 16 x 16 fp32. fragment_row(lane, chunk), fragment_group(lane): a lane holds, of rows
//             (or columns) fragment_row(lane, 0 .. kFragmentRows - 1), the fragment_group-th of the four runs that make a step: 8 bf16 of
//             a 32-deep step, 4 fp32 of a 16-deep one. accumulator_row, accumulator_column(lane, i): the element of value i.
//             multiply_bf16, multiply_f32(accumulator, a, b, columns): adds steps in order; columns from `columns` on need not be computed;
//             for multiply_f32, b holds values of bf16 precision.
//             widen_fp4(codes, scale code, pairs): eight E2M1 codes times an E8M0 scale, as four pairs of bf16.
#pragma once

#include "m3/types.h"

// M3_DEVICE_INLINE: a function of the device; M3_DEVICE_METHOD: a member function or lambda of the device; M3_UNROLL: before a loop whose
// bounds are constants when the shape is.
#if defined(__HIP__)
#define M3_DEVICE_METHOD __attribute__((device)) __attribute__((always_inline))
#define M3_DEVICE_INLINE static inline M3_DEVICE_METHOD
#define M3_UNROLL _Pragma("unroll")
#elif defined(__CUDACC__)
#define M3_DEVICE_METHOD __device__ __forceinline__
#define M3_DEVICE_INLINE static M3_DEVICE_METHOD
#define M3_UNROLL _Pragma("unroll")
#else
#define M3_DEVICE_METHOD
#define M3_DEVICE_INLINE static inline
#define M3_UNROLL
#endif

#include "m3/protocol.h"

#if defined(__HIP__)
#include "m3/platform/amd.h"
#elif defined(__CUDACC__)
#include "m3/platform/nvidia.h"
#else
#include "m3/platform/cpu.h"
#endif
