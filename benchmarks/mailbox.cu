// The GPU side of benchmarks/mailbox.py, used by tests/gpu too: tagged 64-bit pairs in peer memory, one block, waits bounded by the global
// timer. Built as a shared library; every function returns a CUDA error number or, above 1000, the rank that was waited for plus 1000.
#include <cuda_runtime.h>

#include <cstdint>

#define M3_DEVICE_INLINE __host__ __device__ inline
#include "m3/protocol.h"

namespace {

using Word = unsigned long long;

__device__ Word load(const Word* address) {
  Word word;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
  return word;
}

__device__ void store(Word* address, Word word) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory"); }

__device__ Word now() {
  Word ticks;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ticks));
  return ticks;
}

__device__ Word pair(unsigned value, unsigned tag) { return Word(tag) << 32 | value; }

// Waits for a pair of this tag; false if the bound ran out.
__device__ bool wait_for(const Word* address, unsigned tag, Word nanoseconds, unsigned* value) {
  const Word start = now();
  for (;;) {
    const Word word = load(address);
    if (unsigned(word >> 32) == tag) {
      *value = unsigned(word);
      return true;
    }
    if (now() - start > nanoseconds) return false;
    __nanosleep(20);
  }
}

// status[0]: 0, or 1000 + the rank that was missing; status[1]: nanoseconds for all operations; status[2]: last value.
__global__ void one_way(Word* const* buffers, int rank, int count, unsigned tag, Word bound, Word* status) {
  Word *own = buffers[rank], *peer = buffers[1 - rank];
  unsigned value = 0;
  const Word start = now();
  for (int i = 0; i < count; ++i, ++tag) {
    if (rank == 0) store(peer, pair(value + 1, tag));
    if (!wait_for(own, tag, bound, &value)) {
      status[0] = 1000 + (1 - rank);
      return;
    }
    if (rank == 1) store(peer, pair(value + 1, tag));
  }
  status[1] = now() - start;
  status[2] = value;
}

// Thread p stores to rank p and waits for rank p's pair; halves alternate.
__global__ void hand_off(Word* const* buffers, int world, int rank, int count, unsigned tag, Word bound, Word* status) {
  __shared__ int missing;
  const int peer = threadIdx.x;
  if (peer == 0) missing = -1;
  __syncthreads();
  const Word start = now();
  for (int i = 0; i < count; ++i, ++tag) {
    const int half = world * (i & 1);
    unsigned value;
    store(buffers[peer] + half + rank, pair(i, tag));
    if (!wait_for(buffers[rank] + half + peer, tag, bound, &value) || value != unsigned(i)) missing = peer;
    __syncthreads();
    if (missing >= 0) {
      if (peer == 0) status[0] = 1000 + missing;
      return;
    }
  }
  if (peer == 0) status[1] = now() - start;
}

// Sum of floats over the ranks in rank order; every rank pushes its values to every rank.
__global__ void all_reduce(Word* const* buffers, int world, int rank, int elements, const float* in, float* out, int count, unsigned tag, Word bound,
                           Word* status) {
  const Word start = now();
  for (int i = 0; i < count; ++i, ++tag) {
    const long long half = (long long)world * elements * (i & 1);
    for (int e = threadIdx.x; e < elements; e += blockDim.x) {
      const Word word = pair(__float_as_uint(in[e]), tag);
      for (int peer = 0; peer < world; ++peer) store(buffers[peer] + half + (long long)rank * elements + e, word);
    }
    for (int e = threadIdx.x; e < elements; e += blockDim.x) {
      float sum = 0;
      for (int source = 0; source < world; ++source) {
        unsigned bits = 0;
        if (!wait_for(buffers[rank] + half + (long long)source * elements + e, tag, bound, &bits)) {
          status[0] = 1000 + source;
          return;
        }
        sum += __uint_as_float(bits);
      }
      out[e] = sum;
    }
    // No thread pushes for the next operation before all have read this one: with the two halves, nothing is overwritten unread.
    __syncthreads();
  }
  if (threadIdx.x == 0) status[1] = now() - start;
}

// Writes flight records as a launch does, and the time that took.
__global__ void flight(unsigned char* ring, int launches, int count, Word* status) {
  using namespace m3::protocol;
  const Word start = now();
  for (int i = 0; i < count; ++i) {
    const int event = i & 1 ? FLIGHT_END : FLIGHT_LAUNCH, epoch = i >> 1;
    Word* record = reinterpret_cast<Word*>(ring + flight_launch_record(launches, epoch, event, 0));
    const Word clock = now(), where = flight_where(epoch, site_word(0, -1, 7)), what = flight_what(event, 0, 0);
    store(record, clock);
    store(record + 1, where);
    store(record + 2, what);
    store(record + 3, flight_check(clock, where, what));
  }
  status[1] = now() - start;
}

// Runs a launch and waits for it; `status` comes back in host memory.
template <class Launch>
int run(Word* host_status, Launch launch) {
  Word* status = nullptr;
  if (const cudaError_t error = cudaMalloc(&status, 3 * sizeof(Word))) return error;
  cudaMemset(status, 0, 3 * sizeof(Word));
  launch(status);
  cudaError_t error = cudaGetLastError();
  if (!error) error = cudaMemcpy(host_status, status, 3 * sizeof(Word), cudaMemcpyDeviceToHost);
  cudaFree(status);
  return error ? int(error) : int(host_status[0]);
}

}  // namespace

extern "C" {

int mailbox_one_way(Word* const* buffers, int rank, int count, unsigned tag, Word bound, Word* status) {
  return run(status, [&](Word* out) { one_way<<<1, 1>>>(buffers, rank, count, tag, bound, out); });
}

int mailbox_hand_off(Word* const* buffers, int world, int rank, int count, unsigned tag, Word bound, Word* status) {
  return run(status, [&](Word* out) { hand_off<<<1, world>>>(buffers, world, rank, count, tag, bound, out); });
}

int mailbox_all_reduce(Word* const* buffers, int world, int rank, int elements, const float* in, float* result, int count, unsigned tag, Word bound,
                       Word* status) {
  return run(status, [&](Word* out) { all_reduce<<<1, elements < 1024 ? elements : 1024>>>(buffers, world, rank, elements, in, result, count, tag, bound, out); });
}

int flight_records(unsigned char* ring, int launches, int count, Word* status) {
  return run(status, [&](Word* out) { flight<<<1, 1>>>(ring, launches, count, out); });
}
}
