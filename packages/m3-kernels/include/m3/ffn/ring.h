// Weights on their way into shared memory. Every wave has a ring of places; a place takes a group of steps, which lie side by side in formats
// that are made for it (Format::kCopied), as one copy. One lane asks for the copies of a wave's gate and up tasks and, behind them, of its
// first tasks of stage down: the ring never runs dry between the stages.
//
// A wave alone reads and fills its ring: a place is asked for again when every lane has taken what was in it.
#pragma once
#include "m3/ffn/expert.h"

namespace m3::ffn {

// Steps of a copy: groups fill segments and matrices, so that only whole groups are copied. Sizes that are known when the launch runs take
// single steps.
template <class Shape>
M3_DEVICE_INLINE constexpr int steps_of_copy() {
  if constexpr (Shape::kIsStatic) {
    for (int steps = platform::kCopySteps; steps > 1; --steps) {
      if (segment_of(Shape::hidden()) % steps == 0 && blocks_of(Shape::hidden()) % steps == 0 && blocks_of(Shape::intermediate()) % steps == 0) return steps;
    }
  }
  return 1;
}

// Whether every step of every matrix is full, so that no lane's activations end within one.
template <class Shape>
M3_DEVICE_INLINE constexpr bool whole_steps() {
  if constexpr (Shape::kIsStatic) return Shape::hidden() % kBlockK == 0 && Shape::intermediate() % kBlockK == 0;
  return false;
}

// A wave's gate and up tasks, one pass over eight columns (or the platform's tile) after the other.
template <class Shape>
struct UpTasks {
  const Shared<Shape>* shared;
  Tasks tasks;
  int task, pass, first_slot, intermediate;

  M3_DEVICE_METHOD UpTasks(const Context<Shape>& context, const Team& team, int start, int first, int end)
      : shared(&context.shared),
        tasks(tasks_of_team(team, start, protocol::gate_up_tiles(context.shape.intermediate()) * (end - first))),
        task(team.index < team.count ? tasks.first : tasks.count),
        pass(0),
        first_slot(first),
        intermediate(context.shape.intermediate()) {}

  // No tasks.
  M3_DEVICE_METHOD UpTasks() : shared(nullptr), tasks{0, 0, 0}, task(0), pass(0), first_slot(0), intermediate(0) {}

  M3_DEVICE_METHOD bool valid() const { return task < tasks.count; }
  M3_DEVICE_METHOD int tiles() const {
    if constexpr (Shape::kIsStatic) return protocol::gate_up_tiles(Shape::intermediate());
    return protocol::gate_up_tiles(intermediate);
  }
  M3_DEVICE_METHOD int slot() const { return first_slot + task / tiles(); }
  M3_DEVICE_METHOD int tile() const { return task % tiles(); }
  M3_DEVICE_METHOD int first_column() const { return pass * kPassColumns; }
  M3_DEVICE_METHOD int count(int slot) const { return columns_of_pass(*shared, slot, first_column()); }
  M3_DEVICE_METHOD bool is_last_pass(int slot) const {
    return Shape::kMostRows <= kPassColumns || first_column() + kPassColumns >= slot_columns(*shared, slot);
  }
  M3_DEVICE_METHOD void advance() {
    const bool last = is_last_pass(slot());
    pass = last ? 0 : pass + 1;
    if (last) task += tasks.stride;
  }
};

// A wave's shares of the tasks of stage down that its block takes together: a slot of a task each, slot by slot, to the waves in turn.
template <class Shape>
struct DownShares {
  const Shared<Shape>* shared;
  int first_task, task_stride, together;
  int slots, slot, which, pass;
  int next_slot, next_which;  // from a share to the wave's next one

  // No shares.
  M3_DEVICE_METHOD DownShares()
      : shared(nullptr), first_task(0), task_stride(0), together(0), slots(0), slot(0), which(0), pass(0), next_slot(0), next_which(0) {}

  M3_DEVICE_METHOD DownShares(const Context<Shape>& context, int wave, const Tasks& tasks, int first) : DownShares() {
    if (first >= tasks.count) return;
    shared = &context.shared;
    first_task = first;
    task_stride = tasks.stride;
    together = tasks_together(tasks, first);
    slots = shared->slot_count;
    // Slot 0 has no columns when every row is padded.
    const int share = wave + (slot_columns(*shared, 0) == 0 ? together : 0);
    slot = share / together;
    which = share % together;
    next_slot = platform::wave_count() / together;
    next_which = platform::wave_count() % together;
  }

  M3_DEVICE_METHOD bool valid() const { return slot < slots; }
  M3_DEVICE_METHOD int task() const { return first_task + which * task_stride; }
  M3_DEVICE_METHOD int first_column() const { return pass * kPassColumns; }
  M3_DEVICE_METHOD int count() const { return columns_of_pass(*shared, slot, first_column()); }
  M3_DEVICE_METHOD void advance() {
    if (Shape::kMostRows > kPassColumns && first_column() + kPassColumns < slot_columns(*shared, slot)) {
      ++pass;
      return;
    }
    pass = 0;
    slot += next_slot;
    which += next_which;
    if (which >= together) {
      which -= together;
      ++slot;
    }
  }
};

// What a wave asks for next, in shared memory: a look at it is rare, and registers hold what is multiplied.
template <class Shape>
struct Asking {
  UpTasks<Shape> up;
  DownShares<Shape> down;
};

template <class Format, class Shape>
struct RingStorage {
  static constexpr int kWaves = platform::kMostWaves, kPlaces = platform::kCopyPlaces;
  static constexpr int kPlaceBytes = steps_of_copy<Shape>() * Format::kStepBytes;

  alignas(16) unsigned char place[kWaves][kPlaces][kPlaceBytes];
  platform::CopyBarrier full[kWaves][kPlaces];
  Asking<Shape> asking[kWaves];
};

struct NoRing {};

// A block's shared memory for one format.
template <class Format, class Shape, bool kCopied = Format::kCopied>
struct BlockShared : Shared<Shape> {
  NoRing ring;
};
template <class Format, class Shape>
struct BlockShared<Format, Shape, true> : Shared<Shape> {
  RingStorage<Format, Shape> ring;
};

// Makes the barriers of all rings; a block barrier follows before the first copy.
template <class Format, class Shape>
M3_DEVICE_INLINE void prepare_ring(Context<Shape>& context) {
  if constexpr (Format::kCopied) {
    auto& ring = static_cast<BlockShared<Format, Shape>&>(context.shared).ring;
    platform::CopyBarrier* barriers = &ring.full[0][0];
    for (int i = platform::thread_index(); i < ring.kWaves * ring.kPlaces; i += platform::block_threads()) platform::prepare_copies(barriers + i);
    platform::prepared_copies();
  }
}

// The weights of a wave, group by group, in the order of its gate and up tasks and then of its shares of stage down.
template <class Format, class Shape>
class CopiedWeights {
 public:
  static constexpr int kGroup = steps_of_copy<Shape>();
  static constexpr int kGroupBytes = kGroup * Format::kStepBytes;

  // For a wave that takes `steps` steps of every gate and up tile from `first_step` on.
  M3_DEVICE_METHOD CopiedWeights(Context<Shape>& context, int wave, int first_step, int steps)
      : arguments_(context.arguments),
        places_(&static_cast<BlockShared<Format, Shape>&>(context.shared).ring.place[wave][0][0]),
        full_(&static_cast<BlockShared<Format, Shape>&>(context.shared).ring.full[wave][0]),
        asking_(static_cast<BlockShared<Format, Shape>&>(context.shared).ring.asking[wave]),
        first_step_(first_step),
        up_steps_(steps),
        up_blocks_(blocks_of(context.shape.hidden())),
        down_blocks_(blocks_of(context.shape.intermediate())),
        down_tiles_(protocol::down_tasks(context.shape.hidden())) {}

  // Weights of further gate and up tasks, or shares, where none are asked for any more.
  M3_DEVICE_METHOD void go_on_with(const UpTasks<Shape>& up, const DownShares<Shape>& down) {
    platform::wave_barrier();
    if (platform::lane_index() == 0) asking_ = {up, down};
    platform::wave_barrier();
  }

  // Asks for copies until the ring is full or nothing is left.
  M3_DEVICE_METHOD void fill() {
    while (asked_ < kPlaces) {
      const int place = place_ + asked_ < kPlaces ? place_ + asked_ : place_ + asked_ - kPlaces;
      if (!ask(place)) return;
      ++asked_;
    }
  }

  // The next group's bytes: they are there.
  M3_DEVICE_METHOD const unsigned char* take() const {
    platform::wait_for_copy(full_ + place_, phase_);
    return places_ + place_ * kGroupBytes;
  }
  // Every lane has what it wants of the group: its place is filled with what comes next.
  M3_DEVICE_METHOD void give_back() {
    platform::wave_barrier();
    if (!ask(place_)) --asked_;
    if (++place_ == kPlaces) {
      place_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  static constexpr int kPlaces = platform::kCopyPlaces;

  M3_DEVICE_METHOD bool ask(int place) {
    if (left_ <= 0 && !find_next()) return false;
    platform::copy_streamed(places_ + place * kGroupBytes, next_, kGroupBytes, full_ + place);
    next_ += kGroupBytes;
    left_ -= kGroup;
    return true;
  }
  M3_DEVICE_METHOD bool find_next() {
    const bool first = platform::lane_index() == 0;
    if (asking_.up.valid() && up_steps_ > 0) {
      UpTasks<Shape> up = asking_.up;
      const int slot = up.slot();
      const long long tile = static_cast<long long>(up.shared->slot_expert[slot]) * up.tiles() + up.tile();
      next_ = arguments_.w13 + (tile * up_blocks_ + first_step_) * Format::kStepBytes;
      left_ = up_steps_;
      up.advance();
      platform::wave_barrier();
      if (first) asking_.up.task = up.task;
      if (first) asking_.up.pass = up.pass;
      platform::wave_barrier();
      return true;
    }
    if (!asking_.down.valid()) return false;
    DownShares<Shape> down = asking_.down;
    const long long tile = static_cast<long long>(down.shared->slot_expert[down.slot]) * down_tiles_ + down.task();
    next_ = arguments_.w2 + tile * down_blocks_ * Format::kStepBytes;
    left_ = down_blocks_;
    down.advance();
    platform::wave_barrier();
    if (first) asking_.down.slot = down.slot;
    if (first) asking_.down.which = down.which;
    if (first) asking_.down.pass = down.pass;
    platform::wave_barrier();
    return true;
  }

  const Arguments& arguments_;
  unsigned char* places_;
  platform::CopyBarrier* full_;
  Asking<Shape>& asking_;
  const unsigned char* next_ = nullptr;
  int left_ = 0;  // steps from there on
  int first_step_, up_steps_, up_blocks_, down_blocks_, down_tiles_;
  // What is taken next, and how often the ring has gone round, odd or even; groups asked for and not taken.
  int place_ = 0, phase_ = 0, asked_ = 0;
};

// Adds the products of steps `first` to `end_step` - 1 of a run that ends with `last`. The first step's activations are in columns[0], and those
// of the step that follows are there afterwards, if there is one.
template <class Format, class Shape>
M3_DEVICE_INLINE void multiply_copied(platform::Accumulator& sum, CopiedWeights<Format, Shape>& weights, const Activations& activations,
                                      platform::ColumnsBf16 (&columns)[CopiedWeights<Format, Shape>::kGroup][4], int first, int end_step, int last,
                                      int count, int end) {
  constexpr int kGroup = CopiedWeights<Format, Shape>::kGroup;
  M3_ROLLED for (int step = first; step < end_step; step += kGroup) {
    typename Format::Block block[kGroup];
    const unsigned char* bytes = weights.take();
    M3_UNROLL for (int i = 0; i < kGroup; ++i) Format::read(block[i], bytes + i * Format::kStepBytes);
    weights.give_back();
    M3_UNROLL for (int i = 0; i < kGroup; ++i) {
      // The following step's activations are on their way while this step's are multiplied, unless they come into the same place.
      const bool more = i + 1 < kGroup || step + kGroup < last;
      if (kGroup > 1 && more) activations.load<Format>(columns[(i + 1) % kGroup], step + i + 1, end, whole_steps<Shape>());
      platform::RowsBf16 rows[4];
      Format::widen(block[i], rows);
      platform::multiply_bf16(sum, rows, columns[i], count);
      if (kGroup == 1 && more) activations.load<Format>(columns[0], step + 1, end, whole_steps<Shape>());
    }
  }
}

}  // namespace m3::ffn
