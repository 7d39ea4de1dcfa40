// Convolutions over tokens, and the gated delta rule: see recurrence.h. Compiled once for each instruction set.
#include "recurrence.h"

#include <math.h>

#include "rows.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {
namespace {

int64_t first_row(const SequenceRows& sequences, int64_t index) { return index == 0 ? 0 : sequences.ends[index - 1]; }

// -- convolution -------------------------------------------------------------------------------------------------------------

constexpr int64_t kFeaturesPerTask = 256;

// Sixteen features of one sequence. The inputs of the taps before the token's own wait in a ring.
template <class T>
QUIRE_INLINE void convolve_lanes(const ConvCall& call, int64_t index, int64_t feature) {
  const SequenceRows& sequences = call.sequences;
  const int64_t before = call.num_taps - 1;
  const int64_t left = call.num_features - feature;
  T* state = static_cast<T*>(call.state) + sequences.states[index] * call.state_stride + feature;
  const bool begins = sequences.num_before[index] == 0;
  f32x16 ring[kMaxTaps];
  for (int64_t tap = 0; tap < before; ++tap) {
    ring[tap] = begins ? f32x16{} : load_left(state + tap * call.num_features, left);
  }
  const f32x16 bias = call.bias == nullptr ? f32x16{} : load_left(call.bias + feature, left);
  int64_t oldest = 0;
  for (int64_t row = first_row(sequences, index); row < sequences.ends[index]; ++row) {
    const f32x16 input = load_left(static_cast<const T*>(call.rows) + row * call.row_stride + feature, left);
    f32x16 total = bias;
    int64_t place = oldest;
    for (int64_t tap = 0; tap < before; ++tap) {
      total += ring[place] * load_left(call.weight + tap * call.num_features + feature, left);
      if (++place == before) place = 0;
    }
    total += input * load_left(call.weight + before * call.num_features + feature, left);
    if (call.has_silu) total = total / (exp(-total) + 1.0f);
    store_left(static_cast<T*>(call.out) + row * call.num_features + feature, total, left);
    ring[oldest] = input;
    if (++oldest == before) oldest = 0;
  }
  for (int64_t tap = 0; tap < before; ++tap) {
    store_left(state + tap * call.num_features, ring[(oldest + tap) % before], left);
  }
}

template <class T>
void convolve(const ConvCall& call, ThreadPool& pool) {
  const int64_t num_parts = ceil_div(call.num_features, kFeaturesPerTask);
  parallel_for(pool, call.sequences.num_seqs * num_parts, [&](int64_t task, int) {
    const int64_t start = task % num_parts * kFeaturesPerTask;
    const int64_t end = min(start + kFeaturesPerTask, call.num_features);
    for (int64_t feature = start; feature < end; feature += kLanes) convolve_lanes<T>(call, task / num_parts, feature);
  });
}

// -- delta rule --------------------------------------------------------------------------------------------------------------

constexpr int64_t kColumnsPerTask = 32;  // of a head's values: their memory stays in the first cache
constexpr int kVectors = kColumnsPerTask / kLanes;
constexpr int kPartialSums = 2;

// Writes numbers as floats, divided by their length and times `scale`.
template <class T>
QUIRE_INLINE void unit_vector(const T* from, int64_t count, float scale, float* to) {
  f32x16 squares = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const f32x16 values = load_left(from + i, count - i);
    squares += values * values;
    store(to + i, values);
  }
  const float factor = scale / __builtin_sqrtf(sum_of_lanes(squares) + 1e-6f);
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(to + i) * factor);
}

QUIRE_INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// The memory of some columns of a head, and what passes through it.
struct Columns {
  alignas(kLine) float memory[kMaxKeyDim][kColumnsPerTask];
  alignas(kLine) float key[kMaxKeyDim];
  alignas(kLine) float query[kMaxKeyDim];

  // Returns the product of a vector with the memory; the rows are added in `kPartialSums` turns.
  QUIRE_INLINE void recall(const float* vector, int64_t count, f32x16 (&result)[kVectors]) const {
    f32x16 sums[kPartialSums][kVectors] = {};
    for (int64_t row = 0; row < count; row += kPartialSums) {
#pragma GCC unroll 2
      for (int part = 0; part < kPartialSums; ++part) {
        const f32x16 factor = splat(vector[row + part]);
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; ++i) sums[part][i] += factor * load(memory[row + part] + i * kLanes);
      }
    }
    for (int i = 0; i < kVectors; ++i) result[i] = sums[0][i] + sums[1][i];
  }

  // Lets the memory decay, adds what is to be written at the key, and returns what the query recalls.
  QUIRE_INLINE void update(float decay, const f32x16 (&written)[kVectors], int64_t count, f32x16 (&result)[kVectors]) {
    f32x16 sums[kPartialSums][kVectors] = {};
    for (int64_t row = 0; row < count; row += kPartialSums) {
#pragma GCC unroll 2
      for (int part = 0; part < kPartialSums; ++part) {
        float* place = memory[row + part];
        const f32x16 key_factor = splat(key[row + part]), query_factor = splat(query[row + part]);
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; ++i) {
          const f32x16 kept = load(place + i * kLanes) * decay + key_factor * written[i];
          store(place + i * kLanes, kept);
          sums[part][i] += query_factor * kept;
        }
      }
    }
    for (int i = 0; i < kVectors; ++i) result[i] = sums[0][i] + sums[1][i];
  }
};

template <class T>
void delta_columns(const DeltaRuleCall& call, int64_t index, int64_t head, int64_t column, Columns& columns) {
  const SequenceRows& sequences = call.sequences;
  const int64_t key_size = call.num_key_heads * call.key_dim, value_size = call.num_value_heads * call.value_dim;
  const int64_t width = min(kColumnsPerTask, call.value_dim - column);
  const int64_t num_rows = round_up(call.key_dim, kPartialSums);
  const int64_t key_head = head / (call.num_value_heads / call.num_key_heads);
  const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(call.key_dim));
  float* state = call.state + sequences.states[index] * call.state_stride + head * call.key_dim * call.value_dim + column;
  const bool begins = sequences.num_before[index] == 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const bool is_there = row < call.key_dim && !begins;
    for (int i = 0; i < kVectors; ++i) {
      const int64_t left = max(width - i * kLanes, 0);
      const f32x16 values = is_there ? load_left(state + row * call.value_dim + i * kLanes, left) : f32x16{};
      store(columns.memory[row] + i * kLanes, values);
    }
    columns.key[row] = columns.query[row] = 0.0f;
  }
  for (int64_t token = first_row(sequences, index); token < sequences.ends[index]; ++token) {
    const T* qkv = static_cast<const T*>(call.qkv) + token * (2 * key_size + value_size);
    const T* gates = static_cast<const T*>(call.gates) + token * 2 * call.num_value_heads;
    unit_vector(qkv + key_head * call.key_dim, call.key_dim, query_scale, columns.query);
    unit_vector(qkv + key_size + key_head * call.key_dim, call.key_dim, 1.0f, columns.key);
    const float time = to_float(gates[call.num_value_heads + head]) + call.time_bias[head];
    const float decay = expf(call.decay[head] * softplus(time));
    const float strength = 1.0f / (1.0f + expf(-to_float(gates[head])));
    f32x16 written[kVectors], result[kVectors];
    columns.recall(columns.key, num_rows, written);
    const T* values = qkv + 2 * key_size + head * call.value_dim + column;
    for (int i = 0; i < kVectors; ++i) {
      const int64_t left = max(width - i * kLanes, 0);
      written[i] = (load_left(values + i * kLanes, left) - written[i] * decay) * strength;
    }
    columns.update(decay, written, num_rows, result);
    T* out = static_cast<T*>(call.out) + token * value_size + head * call.value_dim + column;
    for (int i = 0; i < kVectors; ++i) store_left(out + i * kLanes, result[i], max(width - i * kLanes, 0));
  }
  for (int64_t row = 0; row < call.key_dim; ++row) {
    for (int i = 0; i < kVectors; ++i) {
      store_left(state + row * call.value_dim + i * kLanes, load(columns.memory[row] + i * kLanes), max(width - i * kLanes, 0));
    }
  }
}

template <class T>
void apply_delta_rule(const DeltaRuleCall& call, ThreadPool& pool) {
  const int64_t num_parts = ceil_div(call.value_dim, kColumnsPerTask);
  const int64_t tasks_per_seq = call.num_value_heads * num_parts;
  parallel_for(pool, call.sequences.num_seqs * tasks_per_seq, [&](int64_t task, int) {
    Columns columns;
    const int64_t of_seq = task % tasks_per_seq;
    delta_columns<T>(call, task / tasks_per_seq, of_seq / num_parts, of_seq % num_parts * kColumnsPerTask, columns);
  });
}

}  // namespace

void conv(const ConvCall& call, ThreadPool& pool) {
  switch (call.type) {
    case DType::kBFloat16: return convolve<bf16>(call, pool);
    case DType::kFloat16: return convolve<fp16>(call, pool);
    default: return convolve<float>(call, pool);
  }
}

void delta_rule(const DeltaRuleCall& call, ThreadPool& pool) {
  switch (call.type) {
    case DType::kBFloat16: return apply_delta_rule<bf16>(call, pool);
    case DType::kFloat16: return apply_delta_rule<fp16>(call, pool);
    default: return apply_delta_rule<float>(call, pool);
  }
}

}  // namespace quire::QUIRE_ISA
