// The largest products of a few rows with a matrix, without reading all of it.
//
// An int8 copy of the matrix gives each product but for a bounded error: with the inequality of Cauchy and Schwarz, the norms of
// what the copy lacks and of what a quantized row lacks bound it. Only panels with a product that may be among a row's largest
// are then multiplied as they are.
#pragma once

#include "linear.h"

namespace quire {

constexpr int64_t kMaxShortlistRows = 5;  // more take about as long to screen as to multiply
constexpr int64_t kShortlistPause = 32;   // calls without one after it was too long to be of use

struct ShortlistCall {
  // Of a matrix in floating point, into float32, without a bias. Its scratch memory is not looked at.
  LinearCall exact;
  const PackedWeight* screen;  // the same matrix in kInt8
  // For each of its rows, padded to whole panels: the norm of the screen's row, and after those of all rows, that of what it lacks.
  const float* norms;
  int64_t num_largest;  // at least 1
  char* scratch;        // ShortlistScratch::total bytes, aligned to 64
};

// Where the parts of the scratch memory of a call begin, in bytes.
struct ShortlistScratch {
  int64_t rows = 0;   // two for each: quantized, and what that lacks, likewise
  int64_t row_bytes;  // from one of these to the next
  int64_t floats;     // [num_rows, in_features], what the first lacks
  int64_t scales;     // [num_rows, 2]
  int64_t factors;    // [num_rows, 2], of the norms of both kinds: their sum bounds the error of a product
  int64_t lowest;     // [num_rows, panels], what the largest product with a panel is at least
  int64_t highest;    // likewise, at most
  int64_t order;      // [panels], to find the num_largest-th of them
  int64_t panels;     // [panels] int32, those that are multiplied
  int64_t linear;     // of the product
  int64_t total;
  int64_t floats_of_row, numbers_of_row;  // in `floats`, and in `lowest` and `highest`; whole lines

  ShortlistScratch(const PackedWeight& exact, const PackedWeight& screen, int64_t num_rows) {
    const LinearScratch of_rows(screen, 2 * num_rows);
    const int64_t float_bytes = round_up(screen.in_features * 4, kLine);
    const int64_t number_bytes = round_up(screen.num_panels() * 4, kLine);
    floats_of_row = float_bytes / 4;
    numbers_of_row = number_bytes / 4;
    row_bytes = of_rows.row_bytes;
    floats = 2 * num_rows * row_bytes;
    scales = floats + num_rows * float_bytes;
    factors = scales + round_up(num_rows * 8, kLine);
    lowest = factors + round_up(num_rows * 8, kLine);
    highest = lowest + num_rows * number_bytes;
    order = highest + num_rows * number_bytes;
    panels = order + number_bytes;
    linear = panels + number_bytes;
    total = linear + LinearScratch(exact, num_rows).total;
  }
};

}  // namespace quire
