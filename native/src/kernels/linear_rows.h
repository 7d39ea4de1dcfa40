// The rows of a product: read as the format of the weights wants them, and written in the type that the caller wants.
#pragma once

#include "activations.h"
#include "linear_formats.h"

namespace quire::QUIRE_ISA {

// Sixteen numbers of a row of `count`, with zeros after its end.
template <class T>
QUIRE_INLINE f32x16 load_inputs(const T* row, int64_t input, int64_t count) {
  const int64_t left = count - input;
  return left >= kLanes ? load(row + input) : load_some(row + input, static_cast<int>(left > 0 ? left : 0));
}

// A row with 127 for its largest magnitude, rounded to nearest, plus kOffset, in bytes; zeros up to `padded`. Returns the scale.
template <int kOffset, class T>
float quantize_inputs(const T* row, int64_t num_inputs, void* to, int64_t padded) {
  f32x16 largest = {}, unsound = {};
  for (int64_t input = 0; input < num_inputs; input += kLanes) {
    const f32x16 values = load_inputs(row, input, num_inputs);
    largest = maximum(largest, maximum(values, -values));
    unsound += values * 0.0f;
  }
  const float limit = max_of_lanes(largest);
  const float scale = limit / 127.0f + sum_of_lanes(unsound);  // NaN if the row holds one or an infinity
  const float inverse = limit > 0.0f ? 127.0f / limit : 0.0f;
  // Adding 1.5 * 2^23 rounds to a whole number, ties to even, and leaves it in the low bits.
  constexpr float kRound = 12582912.0f;
  for (int64_t input = 0; input < padded; input += kLanes) {
    const f32x16 values = load_inputs(row, input, num_inputs);
    const i32x16 rounded = bits_as<i32x16>(values * inverse + kRound) - bits_as<i32x16>(splat(kRound));
    const i8x16 bytes = low_bytes(rounded + kOffset);
    std::memcpy(static_cast<char*>(to) + input, &bytes, min(padded - input, kLanes));
  }
  return scale;
}

template <int kOffset>
float quantize_row(const LinearCall& call, int64_t row, void* to, int64_t padded) {
  const int64_t place = row * call.row_stride, count = call.weight->in_features;
  switch (call.row_type) {
    case DType::kBFloat16: return quantize_inputs<kOffset>(static_cast<const bf16*>(call.rows) + place, count, to, padded);
    case DType::kFloat16: return quantize_inputs<kOffset>(static_cast<const fp16*>(call.rows) + place, count, to, padded);
    default: return quantize_inputs<kOffset>(static_cast<const float*>(call.rows) + place, count, to, padded);
  }
}

// A row in another type, with zeros up to `padded`.
template <class T>
void convert_row(const LinearCall& call, int64_t row, T* to, int64_t padded) {
  const int64_t place = row * call.row_stride, count = call.weight->in_features;
  const auto convert = [&](auto* from) {
    int64_t input = 0;
    for (; input + kLanes <= count; input += kLanes) store(to + input, load(from + input));
    for (; input < padded; input += kLanes) {
      store_some(to + input, load_inputs(from, input, count), static_cast<int>(min(padded - input, kLanes)));
    }
  };
  switch (call.row_type) {
    case DType::kBFloat16: return convert(static_cast<const bf16*>(call.rows) + place);
    case DType::kFloat16: return convert(static_cast<const fp16*>(call.rows) + place);
    default: return convert(static_cast<const float*>(call.rows) + place);
  }
}

template <class T>
QUIRE_INLINE void store_columns(T* to, f32x16 (&values)[2], int64_t count) {
  if (count >= kPanelColumns) {
    store(to, values[0]);
    store(to + kLanes, values[1]);
    return;
  }
  store_some(to, values[0], static_cast<int>(min(count, kLanes)));
  if (count > kLanes) store_some(to + kLanes, values[1], static_cast<int>(count - kLanes));
}

QUIRE_INLINE void load_bias(const float* bias, int64_t column, int64_t count, f32x16 (&values)[2]) {
  for (int half = 0; half < 2; ++half) {
    const int64_t left = count - half * kLanes;
    values[half] = bias == nullptr || left <= 0 ? f32x16{}
                   : left >= kLanes             ? load(bias + column + half * kLanes)
                                                : load_some(bias + column + half * kLanes, static_cast<int>(left));
  }
}

// A panel of a weight, and the rows that it is multiplied with.
struct PanelTask {
  const char* panel;
  int64_t column;  // its first
  int64_t count;   // of its columns
  int64_t first_row, last_row;
  f32x16 bias[2];
};

QUIRE_INLINE PanelTask panel_task(const LinearCall& call, int64_t panel, ExpertRows::Block rows) {
  const PackedWeight& weight = *call.weight;
  const int64_t column = panel * kPanelColumns;
  const char* panels = call.experts == nullptr ? weight.panels : call.experts->panels[rows.expert];
  const float* bias = call.bias == nullptr ? nullptr : call.bias + rows.expert * weight.out_features;
  PanelTask task = {panels + panel * weight.panel_bytes(),
                    column,
                    min(weight.out_features - column, kPanelColumns),
                    rows.first_row,
                    rows.last_row,
                    {}};
  load_bias(bias, column, task.count, task.bias);
  return task;
}

// Calls multiply(task) for all panels and rows, on all threads.
template <class Multiply>
void for_each_task(const LinearCall& call, ThreadPool& pool, int rows_together, const Multiply& multiply) {
  const int64_t num_panels = call.weight->num_panels();
  if (call.experts != nullptr) {
    parallel_for(pool, num_panels * call.experts->num_blocks, [&](int64_t task, int) {
      multiply(panel_task(call, task % num_panels, call.experts->blocks[task / num_panels]));
    });
    return;
  }
  const int64_t row_bytes = LinearScratch(*call.weight, call.num_rows).row_bytes;
  const ListedPanels& listed = call.listed;
  const int64_t num_multiplied = listed.panels == nullptr ? num_panels : listed.count;
  const Split split = split_rows(call.num_rows, row_bytes, num_multiplied, pool.num_threads(), rows_together);
  parallel_for(pool, num_multiplied * split.num_row_tasks, [&](int64_t task, int) {
    const int64_t first_row = task / num_multiplied * split.rows_per_task, place = task % num_multiplied;
    const int64_t panel = listed.panels == nullptr ? place : listed.panels[place];
    multiply(panel_task(call, panel, {0, first_row, min(first_row + split.rows_per_task, call.num_rows)}));
  });
}

// Calls prepare(from, row) for each of the call's rows and the first row of the product that is made of it, and copy(row, other) for
// each other one.
template <class Prepare, class Copy>
void prepare_rows(const LinearCall& call, ThreadPool& pool, const Prepare& prepare, const Copy& copy) {
  if (call.experts == nullptr || call.experts->places == nullptr) {
    return parallel_for(pool, call.num_rows, [&](int64_t row, int) { prepare(row, row); });
  }
  const int64_t copies = call.experts->copies;
  parallel_for(pool, call.num_rows / copies, [&](int64_t from, int) {
    const int64_t* places = call.experts->places + from * copies;
    prepare(from, places[0]);
    for (int64_t i = 1; i < copies; ++i) copy(places[0], places[i]);
  });
}

// Fetches the lines that store_row() will write. Rows a power of two apart share a set of the first-level cache.
QUIRE_INLINE void prefetch_results(const LinearCall& call, const PanelTask& task, int64_t first_row, int num_rows) {
  const int64_t number_bytes = call.out_type == DType::kFloat32 ? 4 : 2;
  const int64_t column = call.activation == nullptr ? task.column : task.column / 2;
  const char* first = static_cast<const char*>(call.out) + (first_row * call.out_stride + column) * number_bytes;
  for (int row = 0; row < num_rows; ++row) __builtin_prefetch(first + row * call.out_stride * number_bytes, 1, 2);
}

QUIRE_INLINE void store_row(const LinearCall& call, int64_t row, const PanelTask& task, f32x16 (&values)[2]) {
  const int64_t column = call.activation == nullptr ? task.column : task.column / 2;
  const int64_t count = call.activation == nullptr ? task.count : kGatedColumns;
  if (call.activation != nullptr) values[0] = gated(*call.activation, values[0], values[1]);
  const int64_t place = row * call.out_stride + column;
  switch (call.out_type) {
    case DType::kFloat32: return store_columns(static_cast<float*>(call.out) + place, values, count);
    case DType::kBFloat16: return store_columns(static_cast<bf16*>(call.out) + place, values, count);
    case DType::kFloat16: return store_columns(static_cast<fp16*>(call.out) + place, values, count);
    case DType::kInt4:
    case DType::kInt8:
    case DType::kUInt8: return;  // not for results
  }
}

}  // namespace quire::QUIRE_ISA
