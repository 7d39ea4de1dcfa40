// Convolutions over tokens, the gated delta rule, and the selective scan: see recurrence.h. Compiled once for each instruction set.
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
    if (row + 1 != sequences.state_ends[index]) continue;
    for (int64_t tap = 0; tap < before; ++tap) {
      store_left(state + tap * call.num_features, ring[(oldest + tap) % before], left);
    }
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

// -- memories of heads -------------------------------------------------------------------------------------------------------

constexpr int64_t kColumnsPerTask = 32;  // of a head's values: their memory stays in the first cache
constexpr int kVectors = kColumnsPerTask / kLanes;
constexpr int kPartialSums = 2;

QUIRE_INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

QUIRE_INLINE float clamp(float x, float least, float most) { return x < least ? least : x > most ? most : x; }

// What the rows of a memory are multiplied by: all by one number, or each by its own.
struct OneDecay {
  float value;
  QUIRE_INLINE float of_row(int64_t) const { return value; }
};

struct RowDecays {
  const float* values;
  QUIRE_INLINE float of_row(int64_t row) const { return values[row]; }
};

// The memory of some columns of a head, and what passes through it.
struct Columns {
  alignas(kLine) float memory[kMaxKeyDim][kColumnsPerTask];
  alignas(kLine) float key[kMaxKeyDim];
  alignas(kLine) float query[kMaxKeyDim];
  alignas(kLine) float decays[kMaxKeyDim];       // of rows that decay by themselves
  alignas(kLine) float decayed_key[kMaxKeyDim];  // the key times those

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
  template <class Decay>
  QUIRE_INLINE void update(const Decay& decay, const f32x16 (&written)[kVectors], int64_t count, f32x16 (&result)[kVectors]) {
    f32x16 sums[kPartialSums][kVectors] = {};
    for (int64_t row = 0; row < count; row += kPartialSums) {
#pragma GCC unroll 2
      for (int part = 0; part < kPartialSums; ++part) {
        float* place = memory[row + part];
        const f32x16 key_factor = splat(key[row + part]), query_factor = splat(query[row + part]);
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; ++i) {
          const f32x16 kept = load(place + i * kLanes) * decay.of_row(row + part) + key_factor * written[i];
          store(place + i * kLanes, kept);
          sums[part][i] += query_factor * kept;
        }
      }
    }
    for (int i = 0; i < kVectors; ++i) result[i] = sums[0][i] + sums[1][i];
  }
};

// Heads with a memory [rows, columns] each, of every state.
struct Memories {
  float* state;
  int64_t state_stride;
  int64_t num_heads;
  int64_t num_rows;
  int64_t num_columns;
  const SequenceRows& sequences;
};

// Some columns of a head of one sequence.
struct Share {
  int64_t index;
  int64_t head;
  int64_t column;
  int64_t width;  // columns

  QUIRE_INLINE int64_t left(int vector) const { return max(width - vector * kLanes, 0); }
};

// Calls visit(token) for each token of a share's sequence behind loading its memory, which is stored where its state ends.
template <class Visit>
QUIRE_INLINE void with_memory(const Memories& memories, const Share& share, Columns& columns, const Visit& visit) {
  const SequenceRows& sequences = memories.sequences;
  float* state = memories.state + sequences.states[share.index] * memories.state_stride +
                 share.head * memories.num_rows * memories.num_columns + share.column;
  const bool begins = sequences.num_before[share.index] == 0;
  for (int64_t row = 0; row < round_up(memories.num_rows, kPartialSums); ++row) {
    const bool is_there = row < memories.num_rows && !begins;
    for (int i = 0; i < kVectors; ++i) {
      const float* place = state + row * memories.num_columns + i * kLanes;
      store(columns.memory[row] + i * kLanes, is_there ? load_left(place, share.left(i)) : f32x16{});
    }
    columns.key[row] = columns.query[row] = columns.decays[row] = columns.decayed_key[row] = 0.0f;
  }
  for (int64_t token = first_row(sequences, share.index); token < sequences.ends[share.index]; ++token) {
    visit(token);
    if (token + 1 != sequences.state_ends[share.index]) continue;
    for (int64_t row = 0; row < memories.num_rows; ++row) {
      for (int i = 0; i < kVectors; ++i) {
        store_left(state + row * memories.num_columns + i * kLanes, load(columns.memory[row] + i * kLanes), share.left(i));
      }
    }
  }
}

// Calls visit(share, columns) for all columns of all heads and sequences.
template <class Visit>
void for_each_share(const Memories& memories, ThreadPool& pool, const Visit& visit) {
  const int64_t num_parts = ceil_div(memories.num_columns, kColumnsPerTask);
  const int64_t tasks_per_seq = memories.num_heads * num_parts;
  parallel_for(pool, memories.sequences.num_seqs * tasks_per_seq, [&](int64_t task, int) {
    Columns columns;
    const int64_t of_seq = task % tasks_per_seq, column = of_seq % num_parts * kColumnsPerTask;
    visit(Share{task / tasks_per_seq, of_seq / num_parts, column, min(kColumnsPerTask, memories.num_columns - column)}, columns);
  });
}

// -- delta rule --------------------------------------------------------------------------------------------------------------

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

// Writes what each row of a memory is multiplied by, and the key times that.
template <class T>
QUIRE_INLINE void row_decays(const DeltaRuleCall& call, const T* times, int64_t head, Columns& columns) {
  const float* bias = call.time_bias + head * call.key_dim;
  for (int64_t row = 0; row < call.key_dim; row += kLanes) {
    const int64_t left = call.key_dim - row;
    const f32x16 time = QUIRE_ISA::softplus(load_left(times + row, left) + load_left(bias + row, left));
    const f32x16 decay = exp(time * call.decay[head]);
    store_left(columns.decays + row, decay, left);
    store_left(columns.decayed_key + row, decay * load(columns.key + row), left);
  }
}

// Decays the memory, writes what it does not recall of the values, and returns what the query recalls.
template <class T, class Decay>
QUIRE_INLINE void apply_token(const DeltaRuleCall& call, const Share& share, const T* values, float strength, const float* key,
                              float key_decay, const Decay& decay, Columns& columns, f32x16 (&result)[kVectors]) {
  const int64_t num_rows = round_up(call.key_dim, kPartialSums);
  f32x16 written[kVectors];
  columns.recall(key, num_rows, written);
  for (int i = 0; i < kVectors; ++i) {
    written[i] = (load_left(values + i * kLanes, share.left(i)) - written[i] * key_decay) * strength;
  }
  columns.update(decay, written, num_rows, result);
}

template <class T>
void delta_columns(const DeltaRuleCall& call, const Memories& memories, const Share& share, Columns& columns) {
  const int64_t key_size = call.num_key_heads * call.key_dim, value_size = call.num_value_heads * call.value_dim;
  const int64_t key_head = share.head / (call.num_value_heads / call.num_key_heads);
  const int64_t first_value = share.head * call.value_dim + share.column;
  const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(call.key_dim));
  with_memory(memories, share, columns, [&](int64_t token) {
    const T* qkv = static_cast<const T*>(call.qkv) + token * (2 * key_size + value_size);
    const T* times = static_cast<const T*>(call.times) + token * call.time_stride + share.head * call.times_per_head;
    unit_vector(qkv + key_head * call.key_dim, call.key_dim, query_scale, columns.query);
    unit_vector(qkv + key_size + key_head * call.key_dim, call.key_dim, 1.0f, columns.key);
    const float raw_strength = to_float(static_cast<const T*>(call.strengths)[token * call.strength_stride + share.head]);
    const float strength = call.max_strength / (1.0f + expf(-raw_strength));
    const T* values = qkv + 2 * key_size + first_value;
    f32x16 result[kVectors];
    if (call.times_per_head == 1) {
      const float decay = expf(call.decay[share.head] * softplus(to_float(times[0]) + call.time_bias[share.head]));
      apply_token(call, share, values, strength, columns.key, decay, OneDecay{decay}, columns, result);
    } else {
      row_decays(call, times, share.head, columns);
      apply_token(call, share, values, strength, columns.decayed_key, 1.0f, RowDecays{columns.decays}, columns, result);
    }
    T* out = static_cast<T*>(call.out) + token * value_size + first_value;
    for (int i = 0; i < kVectors; ++i) store_left(out + i * kLanes, result[i], share.left(i));
  });
}

template <class T>
void apply_delta_rule(const DeltaRuleCall& call, ThreadPool& pool) {
  const Memories memories{call.state, call.state_stride, call.num_value_heads, call.key_dim, call.value_dim, call.sequences};
  for_each_share(memories, pool, [&](const Share& share, Columns& columns) { delta_columns<T>(call, memories, share, columns); });
}

// -- selective scan ----------------------------------------------------------------------------------------------------------

template <class T>
QUIRE_INLINE void to_floats(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load_left(from + i, count - i));
}

template <class T>
void scan_columns(const ScanCall& call, const Memories& memories, const Share& share, Columns& columns) {
  const int64_t value_size = call.num_heads * call.head_dim, key_size = call.num_groups * call.state_size;
  const int64_t num_rows = round_up(call.state_size, kPartialSums);
  const int64_t first_key = share.head / (call.num_heads / call.num_groups) * call.state_size;
  const int64_t first_value = share.head * call.head_dim + share.column;
  with_memory(memories, share, columns, [&](int64_t token) {
    const T* values = static_cast<const T*>(call.inputs) + token * (value_size + 2 * key_size);
    to_floats(values + value_size + first_key, call.state_size, columns.key);
    to_floats(values + value_size + key_size + first_key, call.state_size, columns.query);
    const float raw_time = to_float(static_cast<const T*>(call.times)[token * call.time_stride + share.head]);
    const float time = clamp(softplus(raw_time + call.time_bias[share.head]), call.least_time, call.most_time);
    f32x16 inputs[kVectors], written[kVectors], result[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      inputs[i] = load_left(values + first_value + i * kLanes, share.left(i));
      written[i] = inputs[i] * time;
    }
    columns.update(OneDecay{expf(call.decay[share.head] * time)}, written, num_rows, result);
    T* out = static_cast<T*>(call.out) + token * call.out_stride + first_value;
    for (int i = 0; i < kVectors; ++i) {
      store_left(out + i * kLanes, result[i] + inputs[i] * call.skip[share.head], share.left(i));
    }
  });
}

template <class T>
void apply_scan(const ScanCall& call, ThreadPool& pool) {
  const Memories memories{call.state, call.state_stride, call.num_heads, call.state_size, call.head_dim, call.sequences};
  for_each_share(memories, pool, [&](const Share& share, Columns& columns) { scan_columns<T>(call, memories, share, columns); });
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

void scan(const ScanCall& call, ThreadPool& pool) {
  switch (call.type) {
    case DType::kBFloat16: return apply_scan<bf16>(call, pool);
    case DType::kFloat16: return apply_scan<fp16>(call, pool);
    default: return apply_scan<float>(call, pool);
  }
}

}  // namespace quire::QUIRE_ISA
