// A fiber: a stack of its own and the place where it stopped. One GPU thread of the CPU target is one fiber.
//
// The sanitizers must be told of every switch. ThreadSanitizer gets no happens-before edge from a switch: only barriers, shuffles and
// atomics order two fibers, as they order two GPU threads, so that a missing barrier in a stage is reported as the race it is.
#pragma once
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <system_error>

#if defined(__SANITIZE_THREAD__)
#define M3_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define M3_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define M3_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define M3_ASAN 1
#endif
#endif
#ifdef M3_TSAN
#include <sanitizer/tsan_interface.h>
#endif
#ifdef M3_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
// Other processors switch through the C library, which is slower (it saves the signal mask by a system call).
#if defined(__x86_64__) && !defined(M3_PORTABLE_FIBERS)
#define M3_FIBER_ASSEMBLY 1
#else
#include <ucontext.h>
#endif

// A function that runs while the stack changes under it must not be instrumented by ThreadSanitizer: its entry and exit would be booked on
// different fibers. Nor must the runtime's own counters, which the one OS thread of a block orders.
#ifdef M3_TSAN
#define M3_SWITCHES_STACK __attribute__((no_sanitize("thread"), noinline))
#else
#define M3_SWITCHES_STACK __attribute__((noinline))
#endif

#ifdef M3_FIBER_ASSEMBLY
extern "C" void m3_fiber_switch(void** save_stack_pointer, void* load_stack_pointer);
// The six callee-saved registers of the System V ABI travel on the stack; the control words of the FPU are the same in all fibers.
asm(R"(
.text
.weak m3_fiber_switch
.hidden m3_fiber_switch
.type m3_fiber_switch,@function
m3_fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size m3_fiber_switch,.-m3_fiber_switch
)");
#endif

namespace m3::platform::cpu {

// Where a fiber, or the OS thread that runs it, stopped.
class Context {
 public:
#if defined(M3_TSAN)
  void adopt_current_thread() { tsan_ = __tsan_get_current_fiber(); }
#else
  void adopt_current_thread() {}
#endif

  // Leaves `from` (saved) and goes on in `to`; returns when somebody switches back. `from_ends` says that nobody will.
  M3_SWITCHES_STACK static void switch_stack(Context& from, Context& to, [[maybe_unused]] bool from_ends) {
#ifdef M3_ASAN
    __sanitizer_start_switch_fiber(from_ends ? nullptr : &from.asan_, to.stack_, to.stack_bytes_);
#endif
#ifdef M3_TSAN
    __tsan_switch_to_fiber(to.tsan_, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef M3_FIBER_ASSEMBLY
    m3_fiber_switch(&from.stack_pointer_, to.stack_pointer_);
#else
    swapcontext(&from.context_, &to.context_);
#endif
#ifdef M3_ASAN
    __sanitizer_finish_switch_fiber(from.asan_, nullptr, nullptr);
#endif
  }

  // Called first thing on a new fiber's stack: `from` is the context that started it, whose stack bounds become known here.
  static void arrived([[maybe_unused]] Context& from) {
#ifdef M3_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &from.stack_, &from.stack_bytes_);
#endif
  }

 protected:
  const void* stack_ = nullptr;
  std::size_t stack_bytes_ = 0;
#ifdef M3_FIBER_ASSEMBLY
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_{};
#endif
#ifdef M3_ASAN
  void* asan_ = nullptr;
#endif
#ifdef M3_TSAN
  void* tsan_ = nullptr;
#endif
};

class Fiber : public Context {
 public:
#if defined(M3_TSAN) || defined(M3_ASAN)
  static constexpr std::size_t kStackBytes = 512 << 10;
#else
  static constexpr std::size_t kStackBytes = 192 << 10;
#endif

  // Throws std::system_error if the stack cannot be had.
  Fiber() {
    void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "a fiber's stack");
    // The lowest page cannot be touched: an overflow faults instead of reaching the neighbour's stack.
    if (mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
      const int error = errno;
      munmap(memory, kStackBytes);
      throw std::system_error(error, std::generic_category(), "a fiber's guard page");
    }
    stack_ = memory;
    stack_bytes_ = kStackBytes;
#ifdef M3_TSAN
    tsan_ = __tsan_create_fiber(0);
#endif
  }
  ~Fiber() {
#ifdef M3_TSAN
    __tsan_destroy_fiber(tsan_);
#endif
    munmap(const_cast<void*>(stack_), kStackBytes);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next switch to this fiber calls `entry` on an empty stack; `entry` must not return. Stacks lie at equal distances, so that their tops
  // would compete for the same few cache sets: fiber `index` leaves some lines unused at its top.
  void start_at(void (*entry)(), int index) {
    const std::size_t unused = static_cast<std::size_t>(index % kColours) * kColourBytes;
#ifdef M3_FIBER_ASSEMBLY
    void** top = reinterpret_cast<void**>(static_cast<char*>(const_cast<void*>(stack_)) + kStackBytes - unused);
    *--top = nullptr;  // the return address that `entry` would use; also aligns the stack as a call does
    *--top = reinterpret_cast<void*>(entry);
    for (int callee_saved = 0; callee_saved < 6; ++callee_saved) *--top = nullptr;
    stack_pointer_ = top;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = const_cast<void*>(stack_);
    context_.uc_stack.ss_size = kStackBytes - unused;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }

 private:
  static constexpr std::size_t kGuardBytes = 4096;
  static constexpr int kColours = 64;
  static constexpr std::size_t kColourBytes = 17 * 64;
};

}  // namespace m3::platform::cpu
