// Stages reduce and norm in one, a row a block: where one multiprocessor reads a row's words faster than its blocks can tell each other.
// Waits for the ranks' triples. References: m3_kernels.reference.reduce and norm; the order of every sum is theirs.
#pragma once
#include "m3/ffn/norm.h"

namespace m3::ffn {

// A thread's neighbouring triples of a row, and their columns: a quarter of a task's, so that four lanes sum a task's squares.
constexpr int kTriplesTogether = 4;
constexpr int kColumnsTogether = kTriplesTogether * protocol::COLUMNS_A_TRIPLE;
static_assert(protocol::PUSH_TRIPLES == 4 * kTriplesTogether);

// Whether a thread's columns move as whole words: rows then begin and end with a thread's columns.
M3_DEVICE_INLINE constexpr bool moves_words(int hidden) { return hidden % kColumnsTogether == 0; }

// bf16 columns `column` and following of a row of `hidden`, two a word; 0 past its end.
M3_DEVICE_INLINE void load_columns(const Bits16* row, int column, int hidden, Bits32 (&pair)[kColumnsTogether / 2]) {
  if (moves_words(hidden)) {
    M3_UNROLL for (int i = 0; i < kColumnsTogether / 4; ++i) {
      const Bytes8 two = column < hidden ? reinterpret_cast<const Bytes8*>(row + column)[i] : Bytes8{};
      pair[2 * i] = two.word[0];
      pair[2 * i + 1] = two.word[1];
    }
    return;
  }
  M3_UNROLL for (int i = 0; i < kColumnsTogether / 2; ++i) {
    pair[i] = column + 2 * i < hidden ? row[column + 2 * i] : 0;
    if (column + 2 * i + 1 < hidden) pair[i] |= static_cast<Bits32>(row[column + 2 * i + 1]) << 16;
  }
}
M3_DEVICE_INLINE void store_columns(Bits16* row, int column, int hidden, const Bits32 (&pair)[kColumnsTogether / 2]) {
  if (moves_words(hidden)) {
    M3_UNROLL for (int i = 0; i < kColumnsTogether / 4; ++i) {
      if (column < hidden) reinterpret_cast<Bytes8*>(row + column)[i] = Bytes8{{pair[2 * i], pair[2 * i + 1]}};
    }
    return;
  }
  M3_UNROLL for (int i = 0; i < kColumnsTogether; ++i) {
    if (column + i < hidden) row[column + i] = static_cast<Bits16>(pair[i / 2] >> (16 * (i % 2)));
  }
}
M3_DEVICE_INLINE float column_of_pairs(const Bits32 (&pair)[kColumnsTogether / 2], int i) {
  return i % 2 == 0 ? lower_bf16(pair[i / 2]) : upper_bf16(pair[i / 2]);
}

// Reduces a thread's triples of a row from `first` on, writes the new residual, and leaves the sum of squares of their task in shared memory.
template <class Shape>
M3_DEVICE_INLINE void reduce_triples(Context<Shape>& context, int row, int first, float (&stream)[kColumnsTogether], bool& came) {
  constexpr int kColumns = protocol::COLUMNS_A_TRIPLE;
  const Shape& shape = context.shape;
  const int hidden = shape.hidden(), triples = protocol::triples(hidden), column = first * kColumns;
  Bits32 residual[kColumnsTogether / 2];
  load_columns(context.arguments.residual + row * hidden, column, hidden, residual);
  Bits64 word[kTriplesTogether][Shape::kMostRanks];
  came &= wait_until(context.line, Site::REDUCE, Source::rank_of_word, [&] {
    int absent = -1;
    M3_UNROLL for (int source = 0; source < Shape::kMostRanks; ++source) {
      if (source >= shape.world()) continue;
      const Bits64* words = context.attention_pair(context.rank(), source, row, first);
      M3_UNROLL for (int i = 0; i < kTriplesTogether; ++i) {
        if (first + i < triples) word[i][source] = platform::load_system(words + i);
      }
    }
    M3_UNROLL for (int source = 0; source < Shape::kMostRanks; ++source) {
      if (source >= shape.world()) continue;
      Bits32 differs = 0;
      M3_UNROLL for (int i = 0; i < kTriplesTogether; ++i) {
        if (first + i < triples) differs |= static_cast<Bits32>(protocol::triple_word_tag(word[i][source])) ^ context.triple_tag.tag;
      }
      if (differs != 0) absent = source;
    }
    return absent;
  });
  Bits32 rounded[kColumnsTogether / 2]{};
  float squares[kTriplesTogether];
  M3_UNROLL for (int i = 0; i < kTriplesTogether; ++i) {
    squares[i] = 0.0f;
    M3_UNROLL for (int c = 0; c < kColumns; ++c) {
      const int place = kColumns * i + c;
      stream[place] = 0.0f;
      if (column + place >= hidden) continue;
      float sum = bf16_to_float(protocol::triple_word_value(word[i][0], c));
      M3_UNROLL for (int source = 1; source < Shape::kMostRanks; ++source) {
        if (source < shape.world()) sum += bf16_to_float(protocol::triple_word_value(word[i][source], c));
      }
      const float s = round_to_bf16(sum) + column_of_pairs(residual, place);
      stream[place] = s;
      squares[i] += s * s;
    }
  }
  M3_UNROLL for (int i = 0; i < kColumnsTogether / 2; ++i) rounded[i] = floats_to_bf16(stream[2 * i], stream[2 * i + 1]);
  store_columns(context.arguments.residual_out + row * hidden, column, hidden, rounded);
  // Pairwise over the task's sixteen triples at distances 8 and 4, which are other lanes', then 2 and 1.
  M3_UNROLL for (int distance = 2; distance > 0; distance /= 2) {
    M3_UNROLL for (int i = 0; i < kTriplesTogether; ++i) squares[i] += platform::shuffle_xor(squares[i], distance);
  }
  if (first < triples && first % protocol::PUSH_TRIPLES == 0) {
    context.shared.square[first / protocol::PUSH_TRIPLES] = (squares[0] + squares[2]) + (squares[1] + squares[3]);
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

// A thread's columns of X.
template <class Format>
M3_DEVICE_INLINE void store_x(Bits16* x, int column, int hidden, const Bits32 (&pair)[kColumnsTogether / 2]) {
  if constexpr (place_of<Format>(1) == 1) {
    store_columns(x, column, hidden, pair);
  } else {
    M3_UNROLL for (int i = 0; i < kColumnsTogether; ++i) {
      const int place = column + i;
      if (place < hidden) x[place / kRun * kRun + place_in_run<Format>(place % kRun)] = static_cast<Bits16>(pair[i / 2] >> (16 * (i % 2)));
    }
  }
}

template <class Format, class Shape>
M3_DEVICE_INLINE void reduce_rows(Context<Shape>& context) {
  constexpr int kAtLeast = kTriplesTogether * platform::kLeastWaves * platform::kWaveWidth;
  constexpr int kMostRounds = (protocol::triples(Shape::kMostHidden) + kAtLeast - 1) / kAtLeast;
  const int hidden = context.shape.hidden(), stride = protocol::hidden_stride(hidden), triples = protocol::triples(hidden);
  const int threads = platform::block_threads(), rounds = protocol::ceil_div(triples, kTriplesTogether * threads);
  const Tasks tasks = tasks_of_block(protocol::NORM_START, context.shape.rows());
  M3_ROLLED for (int row = tasks.first; row < tasks.count; row += tasks.stride) {
    bool came = true;
    float stream[kMostRounds][kColumnsTogether];
    for (int round = 0; round < rounds; ++round) {
      reduce_triples(context, row, kTriplesTogether * (round * threads + platform::thread_index()), stream[round], came);
    }
    context.note(came);
    platform::block_barrier();
    const float mean = sum_of_shared_squares(context) / static_cast<float>(hidden);
    const float rstd = platform::reciprocal_root(mean + context.arguments.constants.rms_norm_eps);
    Bits16* x = context.x + protocol::x_index(hidden, row, 0);
    for (int round = 0; round < rounds; ++round) {
      const int column = kColumnsTogether * (round * threads + platform::thread_index());
      Bits32 weights[kColumnsTogether / 2], normed[kColumnsTogether / 2];
      load_columns(context.arguments.post_norm, column, hidden, weights);
      M3_UNROLL for (int i = 0; i < kColumnsTogether / 2; ++i) {
        normed[i] = floats_to_bf16((stream[round][2 * i] * rstd) * (1.0f + lower_bf16(weights[i])),
                                   (stream[round][2 * i + 1] * rstd) * (1.0f + upper_bf16(weights[i])));
      }
      store_x<Format>(x, column, hidden, normed);
    }
    // X is zero between the row's end and the next row's start: matrix steps read whole runs.
    for (int column = hidden + platform::thread_index(); column < stride; column += threads) x[column / kRun * kRun + place_in_run<Format>(column % kRun)] = 0;
    announce_data(context, Site::ROUTER, context.x_ready_pairs + row);
  }
  context.record(protocol::FLIGHT_DONE, Site::REDUCE, context.flight_outcome());
}

}  // namespace m3::ffn
