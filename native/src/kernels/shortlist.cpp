// See shortlist.h. Compiled once for each instruction set.
#include "shortlist.h"

#include "linear_rows.h"
#include "linear_tiles.h"
#include "sampling.h"

namespace quire::QUIRE_ISA {

void linear(const LinearCall& call, ThreadPool& pool);  // linear.cpp

namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kSlack = 1.001f;  // for the rounding of norms and bounds themselves
constexpr float kLeast = 1e-30f;  // of a bound: products below the smallest normal number may be taken for 0
constexpr int64_t kMaxShare = 2;  // one panel of so many: with more, all are multiplied

struct Memory {
  uint8_t* rows;
  int64_t row_bytes;
  float *floats, *scales, *factors, *lowest, *highest, *order;
  int32_t* panels;
  char* linear;
  int64_t floats_of_row, numbers_of_row;

  explicit Memory(const ShortlistCall& call) {
    const ShortlistScratch scratch(*call.exact.weight, *call.screen, call.exact.num_rows);
    const auto floats_at = [&](int64_t place) { return reinterpret_cast<float*>(call.scratch + place); };
    rows = reinterpret_cast<uint8_t*>(call.scratch + scratch.rows);
    row_bytes = scratch.row_bytes;
    floats = floats_at(scratch.floats);
    scales = floats_at(scratch.scales);
    factors = floats_at(scratch.factors);
    lowest = floats_at(scratch.lowest);
    highest = floats_at(scratch.highest);
    order = floats_at(scratch.order);
    panels = reinterpret_cast<int32_t*>(call.scratch + scratch.panels);
    linear = call.scratch + scratch.linear;
    floats_of_row = scratch.floats_of_row;
    numbers_of_row = scratch.numbers_of_row;
  }
};

// Quantizes a row x in two steps: x = s q + s' q' + d, where no number of d is above s' / 2.
void quantize_twice(const ShortlistCall& call, const Memory& memory, int64_t row) {
  const int64_t count = call.screen->in_features;
  uint8_t* bytes = memory.rows + 2 * row * memory.row_bytes;
  float* lacking = memory.floats + row * memory.floats_of_row;
  const float scale = quantize_row<Int8Format::kOffset>(call.exact, row, bytes, memory.row_bytes);
  convert_row(call.exact, row, lacking, count);
  double squares = 0.0;
  for (int64_t input = 0; input < count; ++input) {
    squares += static_cast<double>(lacking[input]) * lacking[input];
    lacking[input] -= scale * static_cast<float>(static_cast<int8_t>(bytes[input] - Int8Format::kOffset));
  }
  const float rest_scale = quantize_inputs<Int8Format::kOffset>(lacking, count, bytes + memory.row_bytes, memory.row_bytes);
  memory.scales[2 * row] = scale;
  memory.scales[2 * row + 1] = rest_scale;
  // A sum of n products in float32 is off by up to n u of the sum of their magnitudes (Higham, Accuracy and Stability of Numerical
  // Algorithms, 3.1), which is at most the product of both norms; u is 2^-24, twice that where pairs are rounded first.
  const float norm =
      squares < kLeast ? __builtin_nanf("") : static_cast<float>(__builtin_sqrt(squares));  // too small to be quantized
  const float rounding = static_cast<float>(count + 16) * 0x1p-23f;
  const float rest = 0.51f * rest_scale * __builtin_sqrtf(static_cast<float>(count));
  memory.factors[2 * row] = kSlack * (rest + rounding * norm);
  memory.factors[2 * row + 1] = kSlack * (1.0f + rounding) * norm;
}

// What products with a panel are at least and at most.
void screen_panel(const ShortlistCall& call, const Memory& memory, int64_t panel) {
  const PackedWeight& weight = *call.screen;
  const int64_t num_steps = ceil_div(weight.in_features, Int8Format::kInputs);
  const int64_t num_rows = call.exact.num_rows, column = panel * kPanelColumns;
  const char* start = weight.panels + panel * weight.panel_bytes();
  const Int8Columns columns(start + num_steps * Int8Format::kStepBytes);
  const float* norms = call.norms + column;
  const float* lacking = norms + weight.num_panels() * kPanelColumns;
  f32x16 products[2 * kMaxShortlistRows][2];
  multiply_panel<Int8Format>(memory.rows, memory.row_bytes, 0, 2 * num_rows, num_steps, start, weight.panel_bytes(),
                             [&](int64_t row, i32x16(&sums)[2]) {
                               for (int half = 0; half < 2; ++half) {
                                 products[row][half] = columns.numbers(half, sums[half], memory.scales[row]);
                               }
                             });
  const int64_t count = min(weight.out_features - column, kPanelColumns);
  for (int64_t row = 0; row < num_rows; ++row) {
    float* out = static_cast<float*>(call.exact.out) + row * call.exact.out_stride + column;
    f32x16 nothing[2] = {splat(-kInfinity), splat(-kInfinity)};
    store_columns(out, nothing, count);
    f32x16 lowest = splat(-kInfinity), highest = splat(-kInfinity);
    f32x16 unsound = {};
    for (int half = 0; half < 2; ++half) {
      const int64_t left = count - half * kLanes;
      if (left <= 0) break;
      const f32x16 product = products[2 * row][half] + products[2 * row + 1][half];
      const f32x16 error = load(norms + half * kLanes) * memory.factors[2 * row] +
                           load(lacking + half * kLanes) * memory.factors[2 * row + 1] + kLeast;
      f32x16 lower = product - error, upper = product + error;
      // Where the sum of the magnitudes could be infinite, so could the product.
      const f32x16 magnitude = load(norms + half * kLanes) * (2.0f * memory.factors[2 * row + 1]) + error;
      unsound += (lower + upper + magnitude) * 0.0f;
      if (left < kLanes) {
        lower = load_some(reinterpret_cast<const float*>(&lower), static_cast<int>(left), -kInfinity);
        upper = load_some(reinterpret_cast<const float*>(&upper), static_cast<int>(left), -kInfinity);
      }
      lowest = maximum(lowest, lower);
      highest = maximum(highest, upper);
    }
    const bool is_sound = sum_of_lanes(unsound) == 0.0f;
    memory.lowest[row * memory.numbers_of_row + panel] = is_sound ? max_of_lanes(lowest) : -kInfinity;
    memory.highest[row * memory.numbers_of_row + panel] = is_sound ? max_of_lanes(highest) : kInfinity;
  }
}

// Lists the panels with a product that may be among the largest of a row; returns their number.
int64_t list_panels(const ShortlistCall& call, const Memory& memory) {
  const int64_t num_rows = call.exact.num_rows, num_panels = call.screen->num_panels();
  float least[kMaxShortlistRows];
  for (int64_t row = 0; row < num_rows; ++row) {
    // Each of so many panels has a product that is no smaller.
    std::memcpy(memory.order, memory.lowest + row * memory.numbers_of_row, num_panels * 4);
    least[row] = call.num_largest > num_panels ? -kInfinity : nth_largest(memory.order, num_panels, call.num_largest);
  }
  int64_t count = 0;
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    bool is_listed = false;
    for (int64_t row = 0; row < num_rows; ++row) {
      is_listed = is_listed || memory.highest[row * memory.numbers_of_row + panel] >= least[row];
    }
    if (is_listed) memory.panels[count++] = static_cast<int32_t>(panel);
  }
  return count;
}

}  // namespace

bool shortlist(const ShortlistCall& call, ThreadPool& pool) {
  const Memory memory(call);
  parallel_for(pool, call.exact.num_rows, [&](int64_t row, int) { quantize_twice(call, memory, row); });
  parallel_for(pool, call.screen->num_panels(), [&](int64_t panel, int) { screen_panel(call, memory, panel); });
  LinearCall exact = call.exact;
  exact.scratch = memory.linear;
  const int64_t count = list_panels(call, memory);
  const bool is_short = count * kMaxShare <= call.screen->num_panels();
  if (is_short) exact.listed = {memory.panels, count};
  linear(exact, pool);
  return is_short;
}

}  // namespace quire::QUIRE_ISA
