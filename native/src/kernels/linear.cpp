// See linear.h. Compiled once for each instruction set.
#include "linear.h"

#include "linear_formats.h"
#include "linear_rows.h"
#if defined(__AMX_BF16__)
#include "linear_amx.h"
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "linear_row_pairs.h"
#endif

namespace quire::QUIRE_BASE_ISA {

void multiply_groups(const LinearCall& call, ThreadPool& pool);       // linear_groups.cpp
void multiply_groups_int8(const LinearCall& call, ThreadPool& pool);  // linear_groups_int8.cpp

}  // namespace quire::QUIRE_BASE_ISA

namespace quire::QUIRE_ISA {
namespace {

// -- tiles: R rows times one panel --------------------------------------------------------------------------------------

// Adds `num_steps` steps to the sums. `ahead`: memory that will be needed next, of which each step fetches kLines lines.
template <class Format, int R, int kLines>
QUIRE_INLINE void add_steps(typename Format::Sum (&sums)[R][2], const typename Format::Row* rows, int64_t row_stride,
                            int64_t num_steps, const char* panel, const char* ahead) {
  for (int64_t step = 0; step < num_steps; ++step) {
    typename Format::Column columns[2];
    Format::weights(panel + step * Format::kStepBytes, columns);
#pragma GCC unroll 2
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(ahead + (step * kLines + line) * kLine, 0, 2);
#pragma GCC unroll 12
    for (int row = 0; row < R; ++row) {
      const auto input = Format::input(rows + row * row_stride, step);
      Format::add(sums[row][0], input, columns[0]);
      Format::add(sums[row][1], input, columns[1]);
    }
  }
}

template <class Format, int R, int kLines>
void multiply_tile(typename Format::Sum* sums_out, const typename Format::Row* rows, int64_t row_stride, int64_t num_steps,
                   const char* panel, const char* ahead) {
  typename Format::Sum sums[R][2];
#pragma GCC unroll 12
  for (int row = 0; row < R; ++row) sums[row][0] = sums[row][1] = typename Format::Sum{};
  add_steps<Format, R, kLines>(sums, rows, row_stride, num_steps, panel, ahead);
#pragma GCC unroll 12
  for (int row = 0; row < R; ++row) {
    sums_out[2 * row] = sums[row][0];
    sums_out[2 * row + 1] = sums[row][1];
  }
}

template <class Format>
using MultiplyTile = void (*)(typename Format::Sum*, const typename Format::Row*, int64_t, int64_t, const char*, const char*);

// Rows that have their sums in vector registers together.
template <class Format>
constexpr int kVectorRows = Format::kHasTiles ? kTileRows : Format::kRowsTogether;

template <class Format, int kLines, int R = kVectorRows<Format> >
MultiplyTile<Format> tile_function(int num_rows, int64_t num_steps) {
  if constexpr (R == 1) {
    return multiply_tile<Format, 1, kLines>;
  } else {
    if (num_rows < R) return tile_function<Format, kLines, R - 1>(num_rows, num_steps);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (Format::kRowsTogether == kPairedRows) {
      if (num_steps % 2 == 0) return multiply_row_pairs<Format, R, kLines>;
    }
#endif
    return multiply_tile<Format, R, kLines>;
  }
}

// One panel times rows first_row to last_row; finish(row, sums) takes the 32 sums of a row.
template <class Format, class Finish>
QUIRE_INLINE void multiply_panel(const typename Format::Row* rows, int64_t row_stride, int64_t first_row, int64_t last_row,
                                 int64_t num_steps, const char* panel, int64_t panel_bytes, const Finish& finish) {
#if defined(__AMX_BF16__)
  if constexpr (Format::kHasTiles) {
    return multiply_amx_panel<Format>(rows, row_stride, first_row, last_row, num_steps, panel, panel_bytes, finish);
  }
#endif
  const char* next = panel + panel_bytes;
  const int64_t half = num_steps * kLine;  // bytes of the next panel that a pass with one line for each step fetches
  for_each_tile<kVectorRows<Format> >(first_row, last_row, [&](int64_t row, int count, int64_t tile, int64_t num_tiles) {
    typename Format::Sum sums[kVectorRows<Format>][2];
    const auto multiply = num_tiles == 1 ? tile_function<Format, 2>(count, num_steps)
                          : tile < 2     ? tile_function<Format, 1>(count, num_steps)
                                         : tile_function<Format, 0>(count, num_steps);
    multiply(&sums[0][0], rows + row * row_stride, row_stride, num_steps, panel, tile == 1 ? next + half : next);
    for (int i = 0; i < count; ++i) finish(row + i, sums[i]);
  });
}

// Whether rows can be multiplied where they are.
template <class Format>
bool is_direct(const LinearCall& call) {
  if (call.row_type != Format::kRowType || (call.experts != nullptr && call.experts->places != nullptr)) return false;
  if constexpr (Format::kHasTiles) {
    return call.num_rows <= Format::kRowsTogether && call.weight->in_features * sizeof(typename Format::Row) % kLine == 0;
  }
  return call.weight->in_features % Format::kInputs == 0;
}

template <class Format>
void multiply_float(const LinearCall& call, ThreadPool& pool) {
  using Row = typename Format::Row;
  const PackedWeight& weight = *call.weight;
  const int64_t num_steps = ceil_div(weight.in_features, Format::kInputs);
  const Row* rows = static_cast<const Row*>(call.rows);
  int64_t row_stride = call.row_stride;
  if (!is_direct<Format>(call)) {
    const LinearScratch scratch(weight, call.num_rows);
    Row* converted = reinterpret_cast<Row*>(call.scratch + scratch.rows);
    row_stride = scratch.row_bytes / sizeof(Row);
    prepare_rows(
        call, pool, [&](int64_t from, int64_t row) { convert_row(call, from, converted + row * row_stride, row_stride); },
        [&](int64_t row, int64_t other) {
          std::memcpy(converted + other * row_stride, converted + row * row_stride, row_stride * sizeof(Row));
        });
    rows = converted;
  }
  for_each_task(call, pool, Format::kRowsTogether, [&](const PanelTask& task) {
    multiply_panel<Format>(rows, row_stride, task.first_row, task.last_row, num_steps, task.panel, weight.panel_bytes(),
                           [&](int64_t row, f32x16(&sums)[2]) {
                             f32x16 values[2] = {sums[0] + task.bias[0], sums[1] + task.bias[1]};
                             store_row(call, row, task, values);
                           });
  });
}

void multiply_int8(const LinearCall& call, ThreadPool& pool) {
  const PackedWeight& weight = *call.weight;
  const int64_t num_steps = ceil_div(weight.in_features, Int8Format::kInputs);
  const LinearScratch scratch(weight, call.num_rows);
  const int64_t row_stride = scratch.row_bytes;
  float* scales = reinterpret_cast<float*>(call.scratch + scratch.row_numbers);
  uint8_t* rows = reinterpret_cast<uint8_t*>(call.scratch + scratch.rows);
  prepare_rows(
      call, pool,
      [&](int64_t from, int64_t row) {
        scales[row] = quantize_row<Int8Format::kOffset>(call, from, rows + row * row_stride, row_stride);
      },
      [&](int64_t row, int64_t other) {
        std::memcpy(rows + other * row_stride, rows + row * row_stride, row_stride);
        scales[other] = scales[row];
      });
  for_each_task(call, pool, Int8Format::kRowsTogether, [&](const PanelTask& task) {
    const char* tail = task.panel + num_steps * Int8Format::kStepBytes;
    f32x16 column_scale[2];
    i32x16 column_sum[2];
    for (int half = 0; half < 2; ++half) {
      column_scale[half] = load_bits<f32x16>(tail + half * kLine);
      column_sum[half] = load_bits<i32x16>(tail + kPanelColumns * 4 + half * kLine);
    }
    multiply_panel<Int8Format>(rows, row_stride, task.first_row, task.last_row, num_steps, task.panel, weight.panel_bytes(),
                               [&](int64_t row, i32x16(&sums)[2]) {
                                 f32x16 values[2];
                                 for (int half = 0; half < 2; ++half) {
                                   const f32x16 exact = convert<f32x16>(sums[half] - column_sum[half] * Int8Format::kOffset);
                                   values[half] = exact * (column_scale[half] * scales[row]) + task.bias[half];
                                 }
                                 store_row(call, row, task, values);
                               });
  });
}

}  // namespace

void linear(const LinearCall& call, ThreadPool& pool) {
  if (call.num_rows == 0) return;
  switch (call.weight->format) {
    case WeightFormat::kFloat32: return multiply_float<Float32Format>(call, pool);
    case WeightFormat::kBFloat16: return multiply_float<BFloat16Format>(call, pool);
    case WeightFormat::kFloat16: return multiply_float<Float16Format>(call, pool);
    case WeightFormat::kInt8: return multiply_int8(call, pool);
    case WeightFormat::kInt4:
    case WeightFormat::kInt6:
    case WeightFormat::kGroupedInt8:
    case WeightFormat::kMxfp4:
      return call.weight->has_int8_rows ? QUIRE_BASE_ISA::multiply_groups_int8(call, pool)
                                        : QUIRE_BASE_ISA::multiply_groups(call, pool);
  }
}

}  // namespace quire::QUIRE_ISA
