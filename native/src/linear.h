// Products of a few or many rows with a packed weight matrix.
#pragma once

#include <cstdint>

#include "elementwise.h"
#include "thread_pool.h"
#include "types.h"

namespace quire {

// How a weight matrix [out_features, in_features] is stored. A panel is read from its start to its end once.
enum class WeightFormat : int {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kInt8 = 3,
  kInt4 = 4,
  kGroupedInt8 = 5,
  kMxfp4 = 6,
  kInt6 = 7
};

constexpr int kPanelColumns = 32;
constexpr int kGatedColumns = kPanelColumns / 2;  // of a panel, if its other half has their gates

// A matrix in panels of kPanelColumns output features each, the last one padded with zeros. A panel holds, in this order:
//   kFloat32, kFloat16: [in][32]
//   kBFloat16:          [in / 2][32][2], `in` rounded up
//   kInt8:              [in / 4][32][4], `in` rounded up; then float32 scale [32], int32 sum of the column [32]
//   kInt4:              for each group of `group_size` inputs: float16 scale [32], float16 zero [32], then
//                       [group_size / 8][32][2] of 16 bits: of eight inputs of a column, the first of the two has those
//                       with even numbers, the second those with odd ones, four bits each from the lowest up;
//                       after the last group, float32 unit [32]
//   kGroupedInt8:       likewise, with [group_size / 4][32][4] bytes
//   kMxfp4:             for each group of 32 inputs: the exponent of a scale [32], 127 added, in bytes; then zeros up to a whole
//                       line; then the groups' weights, as those of kInt4, in E2M1: sign, two bits of exponent, one of mantissa
//   kInt6:              for each group: float16 scale [32]; then for sixteen inputs of sixteen columns three lines of [16][4] bytes:
//                       the lower four bits of inputs 0 to 3 and, above them, of 4 to 7; those of 8 to 15 likewise; and the higher
//                       two bits of all, those of inputs 0 to 3 lowest; after the last group, float32 unit [32]
// A weight in groups is (q - zero) * scale * unit with q in 0..15, 0..63 (and a zero of 32) or 0..255, an int8 weight q * scale.
// Units are powers of two, so that scales which float16 can hold, times a power of two, are held exactly.
struct PackedWeight {
  WeightFormat format;
  int64_t out_features;
  int64_t in_features;
  int64_t group_size;          // in_groups() only: a multiple of 16 that divides in_features
  const char* panels;          // aligned to 64 bytes
  bool has_int8_rows = false;  // in_groups() only: rows are quantized as for kInt8, instead of being rounded to bf16

  bool in_groups() const { return format >= WeightFormat::kInt4; }
  int64_t num_groups() const { return in_groups() ? in_features / group_size : 0; }
  int64_t group_bytes() const;
  int64_t exponent_bytes() const { return format == WeightFormat::kMxfp4 ? round_up(num_groups() * kPanelColumns, kLine) : 0; }
  int64_t num_panels() const { return ceil_div(out_features, kPanelColumns); }
  int64_t panel_bytes() const;
  int64_t bytes() const { return num_panels() * panel_bytes(); }
};

inline int64_t PackedWeight::group_bytes() const {
  if (format == WeightFormat::kMxfp4) return kPanelColumns * group_size / 2;
  if (format == WeightFormat::kInt6) return kPanelColumns * (2 + group_size * 6 / 8);
  return kPanelColumns * (4 + (format == WeightFormat::kInt4 ? group_size / 2 : group_size));
}

inline int64_t PackedWeight::panel_bytes() const {
  switch (format) {
    case WeightFormat::kFloat32: return in_features * kPanelColumns * 4;
    case WeightFormat::kBFloat16: return (in_features + 1) / 2 * kPanelColumns * 4;
    case WeightFormat::kFloat16: return in_features * kPanelColumns * 2;
    case WeightFormat::kInt8: return (in_features + 3) / 4 * kPanelColumns * 4 + kPanelColumns * 8;
    case WeightFormat::kInt4:
    case WeightFormat::kInt6:
    case WeightFormat::kGroupedInt8: return num_groups() * group_bytes() + kPanelColumns * 4;
    case WeightFormat::kMxfp4: return exponent_bytes() + num_groups() * group_bytes();
  }
  return 0;
}

// Which rows of a product are multiplied with which of several matrices of one format and shape.
struct ExpertRows {
  struct Block {
    int64_t expert;
    int64_t first_row, last_row;
  };

  const char* const* panels;  // of each expert, in place of those of the call's weight
  const Block* blocks;        // all rows, in order
  int64_t num_blocks;
  const int64_t*
      places;      // [num_rows]: the rows of the product that are made of each of the call's; null: each makes one, in order
  int64_t copies;  // rows of the product that each of the call's makes
};

// Some panels of a matrix; null: all.
struct ListedPanels {
  const int32_t* panels = nullptr;
  int64_t count = 0;
};

// out [num_rows, out_features] = rows [num_rows, in_features] x weight^T + bias. Strides are in elements between rows; the
// numbers of a row are adjacent. Sums are in float32 (kInt8, and groups with int8 rows: exact integers), in an order that
// depends on neither num_rows nor the number of threads.
struct LinearCall {
  const PackedWeight* weight;
  const void* rows;
  DType row_type;
  int64_t row_stride;
  int64_t num_rows;
  const float* bias;  // [out_features] or null
  void* out;
  DType out_type;
  int64_t out_stride;
  char* scratch;                        // LinearScratch::total bytes, aligned to 64
  const ExpertRows* experts = nullptr;  // `rows` has num_rows / copies then, `bias` is [experts, out_features]
  // kGatedColumns columns of gates and of what they are multiplied with take turns: half as many features come out.
  const Activation* activation = nullptr;
  ListedPanels listed = {};  // others are not computed; without `experts`
};

// Where the parts of the scratch memory of a call begin, in bytes.
struct LinearScratch {
  int64_t rows = 0;     // the rows as the format wants them
  int64_t row_bytes;    // from one row to the next
  int64_t row_numbers;  // kInt8: the scale of each row; groups: the scales of int8 rows, then the sums of each row's groups
  int64_t total;

  LinearScratch(const PackedWeight& weight, int64_t num_rows) {
    const bool is_float32 = weight.format == WeightFormat::kFloat32 || weight.format == WeightFormat::kFloat16;
    const bool is_int8 = weight.format == WeightFormat::kInt8 || weight.has_int8_rows;
    const int64_t input_bytes = is_float32 ? 4 : is_int8 ? 1 : 2;
    // An odd number of lines, so that the same place of many rows is not in the same few sets of a cache.
    row_bytes = (ceil_div(weight.in_features * input_bytes, kLine) | 1) * kLine;
    row_numbers = num_rows * row_bytes;
    total = row_numbers + num_rows * (weight.num_groups() + 1) * 4;
  }
};

}  // namespace quire
