// What the CPU runtime promises to kernels, one case a run: `runtime CASE`. Prints what it saw.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "m3/platform.h"

namespace {

using namespace m3;

struct Counts {
  int grid = 0;
  int seen[8][256] = {};
  int wrong[8][256] = {};
};

void places(const void* arguments) {
  Counts& counts = *const_cast<Counts*>(static_cast<const Counts*>(arguments));
  ++counts.seen[platform::block_index()][platform::thread_index()];
  counts.wrong[platform::block_index()][platform::thread_index()] =
      platform::grid_blocks() != counts.grid || platform::lane_index() != platform::thread_index() % platform::kWaveWidth ||
      platform::wave_index() != platform::thread_index() / platform::kWaveWidth;
}

// Every thread writes, all meet, every thread reads its neighbour's value; the memory is filled with 0xFF at the start of every launch.
void barrier(const void* arguments) {
  Counts& counts = *const_cast<Counts*>(static_cast<const Counts*>(arguments));
  int* shared = static_cast<int*>(platform::cpu::current->shared());
  const int thread = platform::thread_index(), threads = platform::block_threads();
  int wrong = shared[thread] != -1;
  platform::block_barrier();
  for (int round = 0; round < 5; ++round) {
    shared[thread] = 100 * round + thread;
    platform::block_barrier();
    wrong += shared[(thread + 1) % threads] != 100 * round + (thread + 1) % threads;
    platform::block_barrier();
  }
  counts.wrong[platform::block_index()][thread] = wrong;
}

void shuffle(const void* arguments) {
  Counts& counts = *const_cast<Counts*>(static_cast<const Counts*>(arguments));
  int wrong = 0;
  for (int mask = 1; mask < platform::kWaveWidth; mask *= 2) {
    wrong += platform::shuffle_xor(platform::thread_index(), mask) != (platform::thread_index() ^ mask);
    wrong += platform::shuffle_xor(static_cast<float>(platform::lane_index()), mask) != static_cast<float>(platform::lane_index() ^ mask);
  }
  counts.wrong[platform::block_index()][platform::thread_index()] = wrong;
}

// Lane 0 of each wave leaves early; the others' barriers and shuffles go on without it.
void early_end(const void* arguments) {
  Counts& counts = *const_cast<Counts*>(static_cast<const Counts*>(arguments));
  ++counts.seen[platform::block_index()][platform::thread_index()];
  if (platform::lane_index() == 0) return;
  platform::wave_barrier();
  platform::block_barrier();
}

// Thread 63 waits for a word that thread 0 of the same block writes only after many pauses.
void poll(const void* arguments) {
  Counts& counts = *const_cast<Counts*>(static_cast<const Counts*>(arguments));
  static Bits64 word;
  const int thread = platform::thread_index();
  if (thread == 0 && platform::block_index() == 0) {
    for (int i = 0; i < 500; ++i) platform::pause();
    platform::announce_device(&word, 7);
  }
  while (platform::load_device(&word) != 7) platform::pause();
  counts.wrong[platform::block_index()][thread] = 0;
  ++counts.seen[platform::block_index()][thread];
}

// Subnormals count whatever the caller's thread is set to.
void subnormals(const void* arguments) {
  Counts& counts = *const_cast<Counts*>(static_cast<const Counts*>(arguments));
  volatile float tiny = 1e-39f;
  counts.wrong[platform::block_index()][platform::thread_index()] = tiny * 0.5f == 0.0f;
}

void diverging_barrier(const void*) {
  if (platform::thread_index() < 10) {
    platform::block_barrier();
  } else {
    platform::wave_barrier();
  }
}

__attribute__((noinline)) int overflow_stack(int depth) {
  volatile char frame[4096];
  frame[0] = static_cast<char>(depth);
  return depth > 0 ? overflow_stack(depth + 1) + frame[0] : 0;
}
void overflow(const void*) {
  if (platform::thread_index() == 3) std::printf("%d\n", overflow_stack(1));
}

int run(void (*kernel)(const void*), bool every_thread) {
  int wrong = 0;
  for (const int grid : {1, 3}) {
    for (const int threads : {platform::kWaveWidth, 4 * platform::kWaveWidth}) {
      platform::cpu::Residents residents(grid, threads, 4096);
      for (int launch = 0; launch < 20; ++launch) {
        Counts counts;
        counts.grid = grid;
        residents.launch(kernel, &counts);
        for (int block = 0; block < grid; ++block) {
          for (int thread = 0; thread < threads; ++thread) {
            wrong += counts.wrong[block][thread];
            wrong += every_thread && counts.seen[block][thread] != 1;
          }
        }
      }
    }
  }
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}

}  // namespace

int main(int, char** arguments) {
  const std::string name = arguments[1];
  if (name == "places") return run(places, true);
  if (name == "barrier") return run(barrier, false);
  if (name == "shuffle") return run(shuffle, false);
  if (name == "early_end") return run(early_end, true);
  if (name == "poll") return run(poll, false);
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // flush subnormals, as the calling thread of a framework may
  if (name == "subnormals") {
    const int wrong = run(subnormals, false);
    return wrong != 0 || (_mm_getcsr() & 0x8040) != 0x8040;
  }
#endif
  if (name == "diverging_barrier") return run(diverging_barrier, false);
  if (name == "overflow") return run(overflow, false);
  return 2;
}
