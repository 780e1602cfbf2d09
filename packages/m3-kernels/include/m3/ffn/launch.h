// The FFN half of one sparse layer as one launch a rank.
//
// A block walks through the stages in this order and in each takes the tasks that fall to it. A wait of a stage is only ever for what
// earlier stages announce, on this rank or on a peer; so with every block of every rank running, the stages complete one after another
// whatever the grid.
#pragma once
#include "m3/ffn/copied.h"
#include "m3/ffn/down.h"
#include "m3/ffn/final.h"
#include "m3/ffn/finish.h"
#include "m3/ffn/gate_up.h"
#include "m3/ffn/norm.h"
#include "m3/ffn/prefetch.h"
#include "m3/ffn/push.h"
#include "m3/ffn/reduce.h"
#include "m3/ffn/reduce_rows.h"
#include "m3/ffn/route.h"
#include "m3/ffn/router.h"
#include "m3/ffn/table.h"

namespace m3::ffn {

template <class Format, class Shape>
M3_DEVICE_INLINE void launch(const Arguments& arguments, BlockShared<Format, Shape>& shared) {
  if (arguments.mode == static_cast<int>(Mode::skip)) return;
  Context<Shape> context(arguments, shared);
  prefetch_known<Format>(context);
  if (begin(context)) {
    context.stamp(0);
    context.record(protocol::FLIGHT_LAUNCH);
    push(context);
    context.stamp(1);
    list_valid_rows(context);
    prepare_ring<Format>(context);
    if constexpr (platform::kWholeRows) {
      context.stamp(2);
      reduce_rows<Format>(context);
    } else {
      reduce(context);
      context.stamp(2);
      norm<Format>(context);
    }
    context.stamp(3);
    router<Format>(context);
    context.stamp(4);
    route(context);
    platform::block_barrier();
    context.stamp(5);
    if constexpr (Format::kCopied) {
      copied_experts<Format>(context);
    } else {
      shared_up_table_up<Format>(context);
      context.stamp(8);
      if (context.flight_outcome() == 0) context.record(protocol::FLIGHT_DOWN);
      down<Format>(context);
    }
    context.stamp(9);
    final(context);
    context.stamp(10);
    advance_epoch(context);
    context.stamp(11);
    context.record(protocol::FLIGHT_END, Site::HOST, context.flight_outcome());
  }
  if (arguments.handshake != 0) trade_fault_flags(context);
}

}  // namespace m3::ffn
