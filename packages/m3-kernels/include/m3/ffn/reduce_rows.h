// Stages reduce and norm in one, a row a block: where one multiprocessor reads a row's words faster than its blocks can tell each other.
// Waits for the ranks' triples. References: m3_kernels.reference.reduce and norm; the order of every sum is theirs.
#pragma once
#include "m3/ffn/norm.h"

namespace m3::ffn {

// A thread's triples of a row: every block_threads-th one, this many at a time.
constexpr int kTriplesTogether = 4;

// The stream's values of a thread's triples, and their squares.
struct ReducedTriples {
  float stream[kTriplesTogether][protocol::COLUMNS_A_TRIPLE];
};

// Reduces the triples of a row that begin with `first`, writes the new residual, and leaves the sums of squares of their tasks in shared memory.
template <class Shape>
M3_DEVICE_INLINE void reduce_triples(Context<Shape>& context, int row, int first, ReducedTriples& reduced, bool& came) {
  constexpr int kColumns = protocol::COLUMNS_A_TRIPLE;
  const Shape& shape = context.shape;
  const int hidden = shape.hidden(), triples = protocol::triples(hidden), threads = platform::block_threads();
  const auto column_of = [&](int i, int column) { return (first + i * threads) * kColumns + column; };
  Bits32 residual[kTriplesTogether][kColumns];
  M3_UNROLL for (int i = 0; i < kTriplesTogether; ++i) {
    M3_UNROLL for (int c = 0; c < kColumns; ++c) {
      residual[i][c] = column_of(i, c) < hidden ? context.arguments.residual[row * hidden + column_of(i, c)] : 0;
    }
  }
  Bits64 word[kTriplesTogether][Shape::kMostRanks];
  came &= wait_until(context.line, Site::REDUCE, Source::rank_of_word, [&] {
    M3_UNROLL for (int i = 0; i < kTriplesTogether; ++i) {
      M3_UNROLL for (int source = 0; source < Shape::kMostRanks; ++source) {
        if (source >= shape.world() || first + i * threads >= triples) continue;
        word[i][source] = platform::load_system(context.attention_pair(context.line.rank, source, row, first + i * threads));
      }
    }
    int absent = -1;
    M3_UNROLL for (int i = 0; i < kTriplesTogether; ++i) {
      M3_UNROLL for (int source = 0; source < Shape::kMostRanks; ++source) {
        if (source < shape.world() && first + i * threads < triples && !context.triple_tag.matches(word[i][source])) absent = source;
      }
    }
    return absent;
  });
  M3_UNROLL for (int i = 0; i < kTriplesTogether; ++i) {
    float squares = 0.0f;
    M3_UNROLL for (int c = 0; c < kColumns; ++c) {
      if (column_of(i, c) >= hidden) continue;
      float sum = bf16_to_float(protocol::triple_word_value(word[i][0], c));
      M3_UNROLL for (int source = 1; source < Shape::kMostRanks; ++source) {
        if (source < shape.world()) sum += bf16_to_float(protocol::triple_word_value(word[i][source], c));
      }
      const float s = round_to_bf16(sum) + bf16_to_float(residual[i][c]);
      context.arguments.residual_out[row * hidden + column_of(i, c)] = static_cast<Bits16>(float_to_bf16(s));
      reduced.stream[i][c] = s;
      squares += s * s;
    }
    M3_UNROLL for (int distance = protocol::PUSH_TRIPLES / 2; distance > 0; distance /= 2) squares += platform::shuffle_xor(squares, distance);
    const int triple = first + i * threads;
    if (triple < triples && triple % protocol::PUSH_TRIPLES == 0) context.shared.square[triple / protocol::PUSH_TRIPLES] = squares;
  }
}

// The sum of a row's squares; see row_sum_of_squares.
template <class Shape>
M3_DEVICE_INLINE float sum_of_shared_squares(const Context<Shape>& context) {
  const int count = protocol::push_tasks(context.shape.hidden());
  float sum = 0.0f;
  for (int task = platform::lane_index() % kNormStrands; task < count; task += kNormStrands) sum += context.shared.square[task];
  M3_UNROLL for (int distance = kNormStrands / 2; distance > 0; distance /= 2) sum += platform::shuffle_xor(sum, distance);
  return sum;
}

template <class Format, class Shape>
M3_DEVICE_INLINE void reduce_rows(Context<Shape>& context) {
  constexpr int kColumns = protocol::COLUMNS_A_TRIPLE;
  constexpr int kMostRounds = (protocol::triples(Shape::kMostHidden) + kTriplesTogether * platform::kLeastWaves * platform::kWaveWidth - 1) /
                              (kTriplesTogether * platform::kLeastWaves * platform::kWaveWidth);
  const int hidden = context.shape.hidden(), stride = protocol::hidden_stride(hidden), triples = protocol::triples(hidden);
  const int threads = platform::block_threads(), rounds = protocol::ceil_div(triples, kTriplesTogether * threads);
  const Tasks tasks = tasks_of_block(protocol::NORM_START, context.shape.rows());
  for (int row = tasks.first; row < tasks.count; row += tasks.stride) {
    bool came = true;
    ReducedTriples reduced[kMostRounds];
    for (int round = 0; round < rounds; ++round) {
      reduce_triples(context, row, round * kTriplesTogether * threads + platform::thread_index(), reduced[round], came);
    }
    context.note(came);
    platform::block_barrier();
    const float mean = sum_of_shared_squares(context) / static_cast<float>(hidden);
    const float rstd = platform::reciprocal_root(mean + context.arguments.constants.rms_norm_eps);
    Bits16* x = context.x + protocol::x_index(hidden, row, 0);
    for (int round = 0; round < rounds; ++round) {
      M3_UNROLL for (int i = 0; i < kTriplesTogether; ++i) {
        M3_UNROLL for (int c = 0; c < kColumns; ++c) {
          const int column = (round * kTriplesTogether * threads + platform::thread_index() + i * threads) * kColumns + c;
          if (column >= hidden) continue;
          const float weight = bf16_to_float(platform::load_kept(context.arguments.post_norm + column));
          x[column / kRun * kRun + place_in_run<Format>(column % kRun)] =
              static_cast<Bits16>(float_to_bf16((reduced[round].stream[i][c] * rstd) * (1.0f + weight)));
        }
      }
    }
    // X is zero between the row's end and the next row's start: matrix steps read whole runs.
    for (int column = hidden + platform::thread_index(); column < stride; column += threads) x[column / kRun * kRun + place_in_run<Format>(column % kRun)] = 0;
    announce_data(context, Site::ROUTER, context.x_ready_pairs + row);
  }
  context.record(protocol::FLIGHT_DONE, Site::REDUCE, context.flight_outcome());
}

}  // namespace m3::ffn
