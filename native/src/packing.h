// Turning weights as checkpoints hold them into panels.
#pragma once

#include <cstdint>

#include "linear.h"

namespace quire {

// Some of the rows [num_rows, in_features] of a weight matrix; the numbers of a row are adjacent.
//   kFloat32, kBFloat16, kFloat16: fit every format but kGroupedInt8 and kMxfp4; int8 and int4 ones are quantized on the way.
//   kInt8:  for kInt8, with `scales` [num_rows].
//   kUInt8: for kInt4, kInt6 and kGroupedInt8, one weight in each byte, with `scales` and `zeros` [num_rows, in_features /
//           group_size], for kInt6 zeros of 32;
//           for kMxfp4 likewise, where weights less zeros are twice what E2M1 has, and scales powers of two.
struct WeightSource {
  const void* rows;
  DType type;
  int64_t num_rows;
  const float* scales;
  const float* zeros;
};

// Fills `panels`, weight.bytes() aligned to 64 bytes, with the sources one below the other; together they have
// weight.out_features rows. weight.panels is not looked at.
//
// int8: a row's largest magnitude becomes 127, int6: a group's 31. int4: 16 steps span a group's weights and 0, or 0.9 or 0.8 of
// that range, whichever has the least squared error.
struct PackCall {
  const PackedWeight* weight;
  char* panels;
  const WeightSource* sources;
  int64_t num_sources;
  char* scratch;  // Kernels::pack_scratch bytes, aligned to 64
  // Half the rows of a matrix of gates and, below them, of what they are multiplied with. Both take turns in the panels,
  // kGatedColumns of each, with zeros after the last. 0: rows stay in order.
  int64_t gated_features = 0;
  float* norms = nullptr;  // those of ShortlistCall, of a kInt8 matrix made of floating-point numbers; null: they are not needed
};

}  // namespace quire
