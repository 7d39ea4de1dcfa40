// Loops over rows and over the columns of one, for kernels that work row by row.
#pragma once

#include "simd.h"
#include "thread_pool.h"

namespace quire::QUIRE_ISA {

// A task's numbers: enough that waking a thread for it pays.
constexpr int64_t kNumbersPerTask = 1 << 14;

// Sixteen numbers, or as many as are left with zeros after them.
template <class T>
QUIRE_INLINE f32x16 load_left(const T* from, int64_t left) {
  return left >= kLanes ? load(from) : load_some(from, static_cast<int>(left));
}

template <class T>
QUIRE_INLINE void store_left(T* to, f32x16 values, int64_t left) {
  if (left >= kLanes) {
    store(to, values);
  } else {
    store_some(to, values, static_cast<int>(left));
  }
}

// Calls visit(row) for all rows: on the calling thread if that is little work, else on all.
template <class Visit>
void for_each_row(ThreadPool& pool, int64_t num_rows, int64_t numbers_per_row, const Visit& visit) {
  const int64_t rows_per_task = numbers_per_row >= kNumbersPerTask ? 1 : kNumbersPerTask / numbers_per_row;
  const int64_t num_tasks = ceil_div(num_rows, rows_per_task);
  parallel_for(pool, num_tasks, [&](int64_t task, int) {
    const int64_t end = (task + 1) * rows_per_task;
    for (int64_t row = task * rows_per_task; row < end && row < num_rows; ++row) visit(row);
  });
}

// Returns the factor that gives a row a root mean square of 1.
template <class T>
QUIRE_INLINE float norm_factor(const T* row, int64_t count, float eps) {
  f32x16 sums[4] = {};
  int64_t column = 0;
  for (; column + 4 * kLanes <= count; column += 4 * kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const f32x16 values = load(row + column + i * kLanes);
      sums[i] += values * values;
    }
  }
  for (; column < count; column += kLanes) {
    const f32x16 values = load_left(row + column, count - column);
    sums[0] += values * values;
  }
  const float total = sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(count) + eps);
}

// `out` may be `row` itself.
template <class T>
QUIRE_INLINE void normalize(const T* row, const float* weight, int64_t count, float eps, T* out) {
  const float factor = norm_factor(row, count, eps);
  for (int64_t column = 0; column < count; column += kLanes) {
    const int64_t left = count - column;
    store_left(out + column, load_left(row + column, left) * factor * load_left(weight + column, left), left);
  }
}

// The layer norm; `out` may be `row` itself.
template <class T>
QUIRE_INLINE void normalize_layer(const T* row, const float* weight, const float* bias, int64_t count, float eps, T* out) {
  const auto load_or = [](const T* from, int64_t left, float fill) {
    return left >= kLanes ? load(from) : load_some(from, static_cast<int>(left), fill);
  };
  f32x16 sum = {}, squares = {};
  for (int64_t column = 0; column < count; column += kLanes) sum += load_left(row + column, count - column);
  const float mean = sum_of_lanes(sum) / static_cast<float>(count);
  for (int64_t column = 0; column < count; column += kLanes) {
    const f32x16 centered = load_or(row + column, count - column, mean) - mean;
    squares += centered * centered;
  }
  const float factor = 1.0f / __builtin_sqrtf(sum_of_lanes(squares) / static_cast<float>(count) + eps);
  for (int64_t column = 0; column < count; column += kLanes) {
    const int64_t left = count - column;
    const f32x16 normed = (load_left(row + column, left) - mean) * factor;
    store_left(out + column, normed * load_left(weight + column, left) + load_left(bias + column, left), left);
  }
}

}  // namespace quire::QUIRE_ISA
