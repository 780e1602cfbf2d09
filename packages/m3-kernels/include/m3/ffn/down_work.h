// A wave's shares of stage down.
#pragma once
#include "m3/ffn/expert.h"

namespace m3::ffn {

// A wave's place in the tasks that its block takes together: a slot, a task, a pass over some of the slot's columns, a group of K blocks.
// Shares, a slot of a task, go to the waves in turn, slot by slot.
template <class Format, class Shape>
struct DownWork {
  M3_DEVICE_METHOD static constexpr int group_of_shape() {
    if constexpr (Shape::kIsStatic) return group_of((Shape::intermediate() + kBlockK - 1) / kBlockK, Format::kDepth);
    return Format::kDepth;
  }
  static constexpr int kGroup = group_of_shape();

  const Shared<Shape>* shared;
  int first_task, task_stride, together;
  int share, shares, pass, group;
  int intermediate;

  M3_DEVICE_METHOD DownWork(Context<Shape>& context, int wave, int task, int stride, int count)
      : shared(&context.shared),
        first_task(task),
        task_stride(stride),
        together(count),
        share(wave),
        shares(count * context.shared.slot_count),
        pass(0),
        group(0),
        intermediate(context.shape.intermediate()) {
    // Slot 0 has no columns when every row is padded.
    while (valid() && slot() == 0 && slot_columns(*shared, 0) == 0) share += platform::wave_count();
  }

  M3_DEVICE_METHOD int slot() const { return share / together; }
  M3_DEVICE_METHOD int which() const { return share % together; }
  M3_DEVICE_METHOD int task() const { return first_task + which() * task_stride; }
  M3_DEVICE_METHOD int first_column() const { return pass * kPassColumns; }
  M3_DEVICE_METHOD int count() const {
    const int left = slot_columns(*shared, slot()) - first_column();
    return left < kPassColumns ? left : kPassColumns;
  }

  M3_DEVICE_METHOD int blocks() const { return protocol::ceil_div(intermediate, kBlockK); }
  M3_DEVICE_METHOD int groups() const { return (blocks() + kGroup - 1) / kGroup; }
  M3_DEVICE_METHOD bool whole() const { return blocks() % kGroup == 0; }
  M3_DEVICE_METHOD int steps() const {
    const int left = blocks() - group * kGroup;
    return whole() || left > kGroup ? kGroup : left;
  }

  M3_DEVICE_METHOD bool valid() const { return share < shares; }
  M3_DEVICE_METHOD bool ends_pass() const { return group == groups() - 1; }
  M3_DEVICE_METHOD void advance() {
    if (++group < groups()) return;
    group = 0;
    const bool last = Shape::kMostRows <= kPassColumns || first_column() + kPassColumns >= slot_columns(*shared, slot());
    pass = last ? 0 : pass + 1;
    if (last) share += platform::wave_count();
  }
  M3_DEVICE_METHOD typename Format::Tile tile(const typename Format::Matrices& matrices) const {
    return matrices.tile(platform::uniform(shared->slot_expert[slot()]), task() * kTile, kTile / 2, group * kGroup, kGroup % 2 == 0 || groups() == 1);
  }
};

template <class Format, class Shape>
M3_DEVICE_INLINE typename Format::Matrices down_matrices(const Context<Shape>& context) {
  return {context.arguments.w2, context.arguments.s2, context.shape.hidden(), context.shape.intermediate()};
}

}  // namespace m3::ffn
