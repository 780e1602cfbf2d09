// The operations in which the targets differ. A stage uses these names and never asks which target it runs on.
//
// Places      thread_index, block_threads, lane_index, wave_index, wave_count, block_index, grid_blocks, kWaveWidth; kLeastWaves, the fewest
//             waves a block can have, known when compiling
// Block       block_barrier: every thread's shared memory and announcements before it are seen after it
//             wave_barrier: the same for the lanes of a wave
//             kMostTeams: a block's waves form up to that many teams, which take tasks on their own
//             shuffle_xor(value, mask): the value of lane (lane ^ mask); every lane of the wave takes part
//             uniform(value): a number that is the same in every lane, so that the compiler knows; of_first_lane(value): the first lane's,
//             which may differ from the others'
//             set_flag, flag_is_set: a flag in shared memory that several threads may set at once
//             signal, signal_add, signalled: a number in shared memory that hands on, within the block, what the signalling thread has
//             seen and done
// Time        clock_ticks (kTicksPerSecond), pause (in every polling loop), kPollsALook: polls between two looks at the clock and the fault
//             word; stamp_ticks: a clock for measurements, of any rate, that differs between blocks by a constant at most
// Words       load_device, load_system, store_device, store_system: one indivisible 64-bit access that orders nothing; device scope
//             reaches the blocks of this launch, system scope the other ranks
//             announce_device, announce_system: such a store, ordered after all that this thread did or saw across a barrier
//             load_device_data, then acquire_device: a poll, and what follows when it was successful: later loads of this thread, and of
//             those across a barrier, see what was announced with the polled words; acquire_system: the same after load_system
//             load_int, announce_int: the same for the 32-bit epoch words, device scope; claim: take a 32-bit word that is 0, once
// Data        load_data, store_data: what other blocks wrote or will read; seen after an acquire
//             drain_stores: before the barrier that precedes an announcement
//             load_streamed(wanted, address, bytes): if wanted, 16 bytes of weights that this launch reads once; load_kept: what is read
//             again soon; load_byte(wanted, address, value): the same for one byte; load_two_bytes, load_four_bytes:
//             for two or four at a multiple of as many, the first in the low byte of `value`
//             prefetch(address, bytes): bring bytes that will be loaded soon into the cache that all blocks share, or do nothing; both are
//             multiples of 16
// Numbers     exp2_of, reciprocal, reciprocal_root; count_bits, lowest_bit (of a word that is not 0)
// Tiles       a wave multiplies 16 x K by K x kTileColumns into 16 x kTileColumns fp32. A lane holds, of rows fragment_row(lane, 0 ..
//             kFragmentRows - 1) and of columns fragment_column(lane, 0 .. kFragmentColumns - 1), the fragment_group(lane)-th of the four
//             runs that make a step: 8 bf16 of a 32-deep step, 4 fp32 of a 16-deep one. accumulator_row, accumulator_column(lane, i): the
//             element of value i.
//             multiply_bf16, multiply_f32(accumulator, rows, columns, count): adds steps in order; columns from `count` on need not be
//             computed; for multiply_f32, the columns hold values of bf16 precision.
//             widen_fp4<any scale>(codes, scale codes, runs): for each of a lane's rows, 32 E2M1 codes times their E8M0 scale, as four runs of eight
//             bf16. fp4_element(place): which of its eight consecutive codes a run has at `place`; activations that meet such weights are
//             stored in the same order.
//             widen_fp8<any scale>(codes, scale codes, runs): for each of a lane's rows, twice 16 E4M3 codes times their E8M0 scale, as four runs of
//             eight bf16, rounded to nearest even once; the scales lie in bits 0 to 7 and 16 to 23, whatever else the word holds.
//             fp8_element(place): as fp4_element.
//             widen_fp4_e4m3(codes, scale codes, runs): for each of a lane's rows, 32 E2M1 codes, of which 16 share an E4M3 scale, the first 16 the
//             one in the low byte, as four runs of eight bf16, exactly; in the order of fp4_element.
// Schedule    kWholeRows: a block reduces whole rows, and the norm follows at once; else tasks of 48 columns go round
//             kDownTasks: tasks of stage down that a block takes together
//             kPrefetchKnown: whether to prefetch the weights that every launch reads; kPrefetchShares: how many of a wave's first shares
//             of stage down
#pragma once

#include "m3/types.h"

// M3_DEVICE_INLINE: a function of the device; M3_DEVICE_OUTLINE: one that is called rarely, from many places; M3_DEVICE_METHOD: a member
// function or lambda of the device; M3_UNROLL: before a loop whose bounds are constants when the shape is; M3_ROLLED: before one whose body
// is too long to be repeated.
#if defined(__HIP__)
#define M3_DEVICE_METHOD __attribute__((device)) __attribute__((always_inline))
#define M3_DEVICE_INLINE static inline M3_DEVICE_METHOD
#define M3_DEVICE_OUTLINE M3_DEVICE_INLINE
#define M3_UNROLL _Pragma("unroll")
#define M3_ROLLED _Pragma("nounroll")
#elif defined(__CUDACC__)
#define M3_DEVICE_METHOD __device__ __forceinline__
#define M3_DEVICE_INLINE static M3_DEVICE_METHOD
#define M3_DEVICE_OUTLINE static __device__ __noinline__
#define M3_UNROLL _Pragma("unroll")
#define M3_ROLLED _Pragma("unroll 1")
#else
#define M3_DEVICE_METHOD
#define M3_DEVICE_INLINE static inline
#define M3_DEVICE_OUTLINE static inline
#define M3_UNROLL
#define M3_ROLLED
#endif

#include "m3/protocol.h"

#if defined(__HIP__)
#include "m3/platform/amd.h"
#elif defined(__CUDACC__)
#include "m3/platform/nvidia.h"
#else
#include "m3/platform/cpu.h"
#endif
