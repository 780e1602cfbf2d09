// The resident blocks of one channel: block 0 runs on the calling thread, every other block on an OS thread of its own that lives as long
// as the channel, so that a launch costs a wake-up and not a thread's birth.
#pragma once
#include <condition_variable>
#include <mutex>
#include <thread>

#include "m3/platform/cpu/block.h"

namespace m3::platform::cpu {

class Residents {
 public:
  // Throws std::system_error or std::bad_alloc if stacks or threads cannot be had; nothing is left behind then.
  Residents(int grid, int block_threads, std::size_t shared_bytes) {
    for (int b = 0; b < grid; ++b) blocks_.push_back(std::make_unique<Block>(block_threads, shared_bytes));
    try {
      for (int b = 1; b < grid; ++b) helpers_.emplace_back([this, b] { serve(b); });
    } catch (...) {
      end_helpers();
      throw;
    }
  }
  ~Residents() { end_helpers(); }
  Residents(const Residents&) = delete;
  Residents& operator=(const Residents&) = delete;

  // Every thread of every block calls `kernel(arguments)`; returns when all have returned. One launch at a time.
  void launch(void (*kernel)(const void*), const void* arguments) {
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      kernel_ = kernel;
      arguments_ = arguments;
      unfinished_ = static_cast<int>(helpers_.size());
      ++launches_;
    }
    start_.notify_all();
    blocks_[0]->run(0, static_cast<int>(blocks_.size()), kernel, arguments);
    std::unique_lock<std::mutex> hold(mutex_);
    end_.wait(hold, [this] { return unfinished_ == 0; });
  }

 private:
  void end_helpers() {
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      closing_ = true;
    }
    start_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  void serve(int block) {
    unsigned long seen = 0;
    std::unique_lock<std::mutex> hold(mutex_);
    for (;;) {
      start_.wait(hold, [&] { return closing_ || launches_ != seen; });
      if (closing_) return;
      seen = launches_;
      hold.unlock();
      blocks_[static_cast<std::size_t>(block)]->run(block, static_cast<int>(blocks_.size()), kernel_, arguments_);
      hold.lock();
      if (--unfinished_ == 0) end_.notify_one();
    }
  }

  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::thread> helpers_;
  std::mutex mutex_;
  std::condition_variable start_, end_;
  void (*kernel_)(const void*) = nullptr;
  const void* arguments_ = nullptr;
  unsigned long launches_ = 0;
  int unfinished_ = 0;
  bool closing_ = false;
};

}  // namespace m3::platform::cpu
