// Turning weights as checkpoints hold them into panels.
#pragma once

#include <cstdint>

#include "linear.h"

namespace quire {

// Blocks of numbers in rows of GGUF files, by ggml's numbers; see kernels/ggml_blocks.h.
enum class GgmlBlock : int {
  kNone = 0,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kMXFP4 = 39
};

// Some of the rows [num_rows, in_features] of a weight matrix; the numbers of a row are adjacent.
//   kFloat32, kBFloat16, kFloat16: fit every format but kGroupedInt8 and kMxfp4; int8 and int4 ones are quantized on the way.
//   kInt8:  for kInt8, with `scales` [num_rows].
//   kUInt8: for kInt4, kInt6 and kGroupedInt8, one weight in each byte, with `scales` and `zeros` [num_rows, in_features /
//           group_size], for kInt6 zeros of 32;
//           for kMxfp4 likewise, where weights less zeros are twice what E2M1 has, and scales powers of two.
//           In blocks: for the same formats, of which one must have the groups and the bits of the blocks.
struct WeightSource {
  const void* rows;
  DType type;
  int64_t num_rows;
  const float* scales;
  const float* zeros;
  GgmlBlock block = GgmlBlock::kNone;
};

// Fills `panels`, weight.bytes() aligned to 64 bytes, with the sources one below the other; together they have
// weight.out_features rows. weight.panels is not looked at.
//
// int8: a row's largest magnitude becomes 127, int6: a group's 31. int4: 16 steps span a group's weights and 0, or 0.9 or 0.8 of
// that range, whichever has the least squared error.
//
// `pack` returns whether the scales of all blocks are finite; panels are not to be used if not.
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
