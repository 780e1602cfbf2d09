// The sizes of a launch, behind one set of accessors: launch parameters where one build serves all shapes (DynamicShape), constants where a
// code object is compiled for one shape (StaticShape). The kMost... constants bound arrays in shared memory.
#pragma once
#include "m3/platform.h"

namespace m3 {

struct Sizes {
  int rows;          // 1 .. max_rows
  int hidden;        // even
  int intermediate;  // of an expert on this rank
  int experts;       // routed, without the shared one
  int top_k;
  int world;     // ranks
  int max_rows;  // row stride of the peer buffer
};

class DynamicShape {
 public:
  static constexpr int kMostRows = protocol::MAX_ROWS;
  static constexpr int kMostTopK = protocol::MAX_TOP_K;
  static constexpr int kMostExperts = protocol::MAX_EXPERTS;
  static constexpr int kMostRanks = 8;
  static constexpr int kMostHidden = protocol::MAX_HIDDEN;
  static constexpr bool kIsStatic = false;

  M3_DEVICE_METHOD explicit DynamicShape(const Sizes& sizes) : sizes_(sizes) {}
  M3_DEVICE_METHOD int rows() const { return sizes_.rows; }
  M3_DEVICE_METHOD int hidden() const { return sizes_.hidden; }
  M3_DEVICE_METHOD int intermediate() const { return sizes_.intermediate; }
  M3_DEVICE_METHOD int experts() const { return sizes_.experts; }
  M3_DEVICE_METHOD int top_k() const { return sizes_.top_k; }
  M3_DEVICE_METHOD int world() const { return sizes_.world; }
  M3_DEVICE_METHOD int max_rows() const { return sizes_.max_rows; }

 private:
  Sizes sizes_;
};

// Rows and their stride vary up to a bound; the model's sizes are constants.
template <int kRows, int kHidden, int kIntermediate, int kExperts, int kTopK, int kWorld>
class StaticShape {
 public:
  static constexpr int kMostRows = kRows;
  static constexpr int kMostTopK = kTopK;
  static constexpr int kMostExperts = kExperts;
  static constexpr int kMostRanks = kWorld;
  static constexpr int kMostHidden = kHidden;
  static constexpr bool kIsStatic = true;

  M3_DEVICE_METHOD explicit StaticShape(const Sizes& sizes) : rows_(sizes.rows), max_rows_(sizes.max_rows) {}
  M3_DEVICE_METHOD int rows() const { return kRows == 1 ? 1 : rows_; }
  M3_DEVICE_METHOD static constexpr int hidden() { return kHidden; }
  M3_DEVICE_METHOD static constexpr int intermediate() { return kIntermediate; }
  M3_DEVICE_METHOD static constexpr int experts() { return kExperts; }
  M3_DEVICE_METHOD static constexpr int top_k() { return kTopK; }
  M3_DEVICE_METHOD static constexpr int world() { return kWorld; }
  M3_DEVICE_METHOD int max_rows() const { return max_rows_; }

 private:
  int rows_, max_rows_;
};

}  // namespace m3
