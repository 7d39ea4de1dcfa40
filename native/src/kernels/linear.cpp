// See linear.h. Compiled once for each instruction set.
#include "linear.h"

#include "linear_rows.h"
#include "linear_tiles.h"

namespace quire::QUIRE_BASE_ISA {

void multiply_groups(const LinearCall& call, ThreadPool& pool);       // linear_groups.cpp
void multiply_groups_int8(const LinearCall& call, ThreadPool& pool);  // linear_groups_int8.cpp

}  // namespace quire::QUIRE_BASE_ISA

namespace quire::QUIRE_ISA {
namespace {

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
    const Int8Columns columns(task.panel + num_steps * Int8Format::kStepBytes);
    multiply_panel<Int8Format>(rows, row_stride, task.first_row, task.last_row, num_steps, task.panel, weight.panel_bytes(),
                               [&](int64_t row, i32x16(&sums)[2]) {
                                 f32x16 values[2];
                                 for (int half = 0; half < 2; ++half) {
                                   values[half] = columns.numbers(half, sums[half], scales[row]) + task.bias[half];
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
