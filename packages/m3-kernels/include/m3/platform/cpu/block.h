// One resident block of the CPU target: its threads are fibers that one OS thread runs in turn.
//
// Round robin in thread order; a fiber runs until it reaches a barrier, pauses in a poll, or ends. A block barrier opens when every
// thread that has not ended stands at it, a wave barrier when every such lane of the wave does. A barrier that cannot open (a stage that
// diverges around it) aborts with a message: on a GPU it would hang.
#pragma once
#include <sched.h>
#include <time.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "m3/platform/cpu/fiber.h"
#include "m3/types.h"

#ifndef M3_WAVE_WIDTH
#define M3_WAVE_WIDTH 64
#endif

namespace m3::platform::cpu {

constexpr int kWave = M3_WAVE_WIDTH;
static_assert(kWave == 64 || kWave == 32, "a wave has 64 lanes (AMD) or 32 (NVIDIA)");

// Rows or columns of a matrix tile, and the most K values that one tile operation takes.
constexpr int kTile = 16;
constexpr int kTileDepth = 128;

// A tile operation's operands as the lanes lay them down, and its sums.
struct TileExchange {
  Bytes16 a[4][4][kTile];  // [step][group][row]
  Bytes16 b[kTile][4][4];  // [column][step][group]: K ascending
  alignas(64) float sum[kTile][kTile];  // [column][row]
  int arrived = 0;
  char key = 0;
};

// What the lanes of a wave show each other. Two copies, used in turn: a lane fills one only after every lane has left it.
struct WaveExchange {
  std::uint32_t word[2][kWave];
  TileExchange tile[2];
};

enum class State : std::uint8_t { ready, at_block_barrier, at_wave_barrier, ended };

struct Wave {
  WaveExchange exchange;
  int live = 0;     // lanes that have not ended
  int waiting = 0;  // lanes at the wave barrier
  char key[2];
};

struct Thread : Fiber {
  int index = 0;
  Wave* wave = nullptr;
  State state = State::ended;
  bool paused = false;
  std::uint8_t block_phase = 0;
  std::uint8_t wave_phase = 0;
};

class Block {
 public:
  Block(int threads, std::size_t shared_bytes)
      : threads_(static_cast<std::size_t>(threads)),
        waves_(static_cast<std::size_t>((threads + kWave - 1) / kWave)),
        shared_(shared_bytes) {
    for (int i = 0; i < threads; ++i) {
      threads_[static_cast<std::size_t>(i)].index = i;
      threads_[static_cast<std::size_t>(i)].wave = &waves_[static_cast<std::size_t>(i / kWave)];
    }
  }

  // Runs block `index` of `grid` blocks to its end: every thread calls `kernel(arguments)`.
  void run(int index, int grid, void (*kernel)(const void*), const void* arguments);

  int index() const { return index_; }
  int grid() const { return grid_; }
  int size() const { return static_cast<int>(threads_.size()); }
  int thread() const { return running_->index; }
  int lane() const { return static_cast<int>(static_cast<unsigned>(running_->index) % kWave); }
  // The block's shared memory: 64-byte aligned, filled with 0xFF bytes (NaN, -1) when a launch starts.
  void* shared() { return shared_.data(); }

  void block_barrier();
  void wave_barrier();
  // The running lane's wave exchange and which copy is free for the next operation.
  WaveExchange& exchange() { return running_->wave->exchange; }
  int exchange_phase() const { return running_->wave_phase; }
  // Lanes of the running lane's wave that have not ended.
  int live_lanes() const { return running_->wave->live; }
  // Lets the others run: the caller polls something that has not come yet.
  void pause();

 private:
  static void enter_thread();
  void resume(Thread& thread);
  void leave(bool ends);
  void open_wave_barrier(Wave& wave, int first);
  void wait_for_others(int idle_rounds);

  std::vector<Thread> threads_;
  std::vector<Wave> waves_;
  struct alignas(64) Line {
    unsigned char bytes[64];
  };
  struct SharedMemory {
    explicit SharedMemory(std::size_t bytes) : lines((bytes + sizeof(Line) - 1) / sizeof(Line)) {}
    unsigned char* data() { return lines.empty() ? nullptr : lines[0].bytes; }
    std::vector<Line> lines;
  } shared_;
  Context scheduler_;
  Thread* running_ = nullptr;
  int index_ = 0;
  int grid_ = 0;
  int live_ = 0;
  int at_barrier_ = 0;
  void (*kernel_)(const void*) = nullptr;
  const void* arguments_ = nullptr;
  [[maybe_unused]] char start_key_ = 0, end_key_ = 0, barrier_key_[2] = {0, 0};
};

// The block that this OS thread runs. The static model saves a call to the dynamic linker at every use.
inline thread_local Block* current __attribute__((tls_model("initial-exec"))) = nullptr;

// Happens-before edges of the CPU runtime, for ThreadSanitizer alone.
inline void order_after([[maybe_unused]] char* key) {
#ifdef M3_TSAN
  __tsan_acquire(key);
#endif
}
inline void order_before([[maybe_unused]] char* key) {
#ifdef M3_TSAN
  __tsan_release(key);
#endif
}

M3_SWITCHES_STACK inline void Block::leave(bool ends) { Context::switch_stack(*running_, scheduler_, ends); }

M3_SWITCHES_STACK inline void Block::resume(Thread& thread) {
  running_ = &thread;
  thread.paused = false;
  Context::switch_stack(scheduler_, thread, false);
}

M3_SWITCHES_STACK inline void Block::enter_thread() {
  Block* block = current;
  Context::arrived(block->scheduler_);
  order_after(&block->start_key_);
  block->kernel_(block->arguments_);
  order_before(&block->end_key_);
  block->running_->state = State::ended;
  block->leave(true);
  std::abort();
}

M3_SWITCHES_STACK inline void Block::block_barrier() {
  Thread* thread = running_;
  char* key = &barrier_key_[thread->block_phase ^= 1];
  order_before(key);
  thread->state = State::at_block_barrier;
  ++at_barrier_;
  leave(false);
  order_after(key);
}

M3_SWITCHES_STACK inline void Block::wave_barrier() {
  Thread* thread = running_;
  Wave& wave = *thread->wave;
  char* key = &wave.key[thread->wave_phase ^= 1];
  order_before(key);
  thread->state = State::at_wave_barrier;
  ++wave.waiting;
  leave(false);
  order_after(key);
}

M3_SWITCHES_STACK inline void Block::pause() {
  running_->paused = true;
  leave(false);
}

inline void Block::open_wave_barrier(Wave& wave, int first) {
  const int end = first + kWave < size() ? first + kWave : size();
  for (int i = first; i < end; ++i) {
    Thread& thread = threads_[static_cast<std::size_t>(i)];
    if (thread.state == State::at_wave_barrier) thread.state = State::ready;
  }
  wave.waiting = 0;
}

// Every thread that can run only polls. The peer may need this very core (a worker process is often bound to one), so give it away:
// at first for as long as nobody else wants it, later for a short sleep.
inline void Block::wait_for_others(int idle_rounds) {
  constexpr int kYields = 64;
  constexpr long kSleepNanoseconds = 20'000;
  if (idle_rounds < kYields) {
    sched_yield();
  } else {
    const timespec pause_time{0, kSleepNanoseconds};
    nanosleep(&pause_time, nullptr);
  }
}

M3_SWITCHES_STACK inline void Block::run(int index, int grid, void (*kernel)(const void*), const void* arguments) {
#if defined(__x86_64__)
  // Rounding and subnormals as IEEE 754 has them, whatever the caller's thread is set to.
  const unsigned caller_control = _mm_getcsr();
  _mm_setcsr(0x1F80);
#endif
  index_ = index;
  grid_ = grid;
  kernel_ = kernel;
  arguments_ = arguments;
  live_ = size();
  at_barrier_ = 0;
  current = this;
  scheduler_.adopt_current_thread();
  if (shared_.data() != nullptr) std::memset(shared_.data(), 0xFF, shared_.lines.size() * sizeof(Line));
  for (std::size_t w = 0; w < waves_.size(); ++w) {
    const int rest = size() - static_cast<int>(w) * kWave;
    waves_[w].live = rest < kWave ? rest : kWave;
    waves_[w].waiting = 0;
  }
  for (Thread& thread : threads_) {
    thread.state = State::ready;
    thread.block_phase = thread.wave_phase = 0;
    thread.start_at(&Block::enter_thread, thread.index);
  }
  order_before(&start_key_);
  int idle_rounds = 0;
  while (live_ > 0) {
    bool progress = false;
    bool polling = false;
    for (Thread& thread : threads_) {
      if (thread.state != State::ready) continue;
      resume(thread);
      Wave& wave = *thread.wave;
      if (thread.state == State::ended) {
        --live_;
        --wave.live;
      }
      if (thread.paused) {
        polling = true;
      } else {
        progress = true;
      }
      if (wave.waiting == wave.live && wave.waiting != 0) open_wave_barrier(wave, thread.index / kWave * kWave);
    }
    if (live_ > 0 && at_barrier_ == live_) {
      for (Thread& thread : threads_) {
        if (thread.state == State::at_block_barrier) thread.state = State::ready;
      }
      at_barrier_ = 0;
      progress = true;
    }
    if (progress) {
      idle_rounds = 0;
    } else if (polling) {
      wait_for_others(idle_rounds++);
    } else if (live_ > 0) {
      std::fprintf(stderr, "m3: block %d of %d cannot go on: %d threads live, %d at the block barrier (a barrier or a shuffle was skipped)\n",
                   index_, grid_, live_, at_barrier_);
      std::abort();
    }
  }
  order_after(&end_key_);
  current = nullptr;
#if defined(__x86_64__)
  _mm_setcsr(caller_control);
#endif
}

}  // namespace m3::platform::cpu
