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
constexpr int kUsualTaps = 4;

// Sixteen features of one sequence. With kTaps, which is the number of taps unless it is 0, all inputs are in registers.
template <class T, int kTaps>
QUIRE_INLINE void convolve_lanes(const ConvCall& call, int64_t index, int64_t feature) {
  constexpr int kMost = kTaps == 0 ? kMaxTaps : kTaps;
  const SequenceRows& sequences = call.sequences;
  const int64_t before = (kTaps == 0 ? call.num_taps : kTaps) - 1;
  const int64_t left = call.num_features - feature;
  T* state = static_cast<T*>(call.state) + sequences.states[index] * call.state_stride + feature;
  const bool begins = sequences.num_before[index] == 0;
  f32x16 weights[kMost], inputs[kMost];
  for (int64_t tap = 0; tap <= before; ++tap) weights[tap] = load_left(call.weight + tap * call.num_features + feature, left);
  for (int64_t tap = 0; tap < before; ++tap) {
    inputs[tap] = begins ? f32x16{} : load_left(state + tap * call.num_features, left);
  }
  const f32x16 bias = call.bias == nullptr ? f32x16{} : load_left(call.bias + feature, left);
  for (int64_t row = first_row(sequences, index); row < sequences.ends[index]; ++row) {
    inputs[before] = load_left(static_cast<const T*>(call.rows) + row * call.row_stride + feature, left);
    f32x16 total = bias;
    for (int64_t tap = 0; tap <= before; ++tap) total += inputs[tap] * weights[tap];
    if (call.has_silu) total = total / (exp(-total) + 1.0f);
    store_left(static_cast<T*>(call.out) + row * call.num_features + feature, total, left);
    for (int64_t tap = 0; tap < before; ++tap) inputs[tap] = inputs[tap + 1];
    if (row + 1 != sequences.state_ends[index]) continue;
    for (int64_t tap = 0; tap < before; ++tap) store_left(state + tap * call.num_features, inputs[tap], left);
  }
}

template <class T, int kTaps>
void convolve_all(const ConvCall& call, ThreadPool& pool) {
  const int64_t num_seqs = call.sequences.num_seqs;
  parallel_for(pool, ceil_div(call.num_features, kFeaturesPerTask) * num_seqs, [&](int64_t task, int) {
    const int64_t start = task / num_seqs * kFeaturesPerTask;
    const int64_t end = min(start + kFeaturesPerTask, call.num_features);
    for (int64_t feature = start; feature < end; feature += kLanes) {
      convolve_lanes<T, kTaps>(call, task % num_seqs, feature);
    }
  });
}

template <class T>
void convolve(const ConvCall& call, ThreadPool& pool) {
  return call.num_taps == kUsualTaps ? convolve_all<T, kUsualTaps>(call, pool) : convolve_all<T, 0>(call, pool);
}

// -- memories of heads -------------------------------------------------------------------------------------------------------

constexpr int kCopiedVectors = 2;   // of a head's values: a copy of their memory stays in the first cache
constexpr int kVectorsInPlace = 4;  // whole lines beside each other, which are fetched ahead
constexpr int64_t kColumnsPerTask = kVectorsInPlace * kLanes;
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
template <int kVectors>
struct Columns {
  float* memory;
  int64_t num_columns;  // of the head
  alignas(kLine) float key[kMaxKeyDim];
  alignas(kLine) float query[kMaxKeyDim];
  alignas(kLine) float decays[kMaxKeyDim];       // of rows that decay by themselves
  alignas(kLine) float decayed_key[kMaxKeyDim];  // the key times those

  QUIRE_INLINE float* row_at(int64_t row) const {
    return memory + row * (kVectors == kCopiedVectors ? kCopiedVectors * kLanes : num_columns);
  }

  // Returns the product of a vector with the memory; the rows are added in `kPartialSums` turns.
  QUIRE_INLINE void recall(const float* vector, int64_t count, f32x16 (&result)[kVectors]) const {
    f32x16 sums[kPartialSums][kVectors] = {};
    for (int64_t row = 0; row < count; row += kPartialSums) {
#pragma GCC unroll 2
      for (int part = 0; part < kPartialSums; ++part) {
        const float* place = row_at(row + part);
        const f32x16 factor = splat(vector[row + part]);
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) sums[part][i] += factor * load(place + i * kLanes);
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
        float* place = row_at(row + part);
        const f32x16 key_factor = splat(key[row + part]), query_factor = splat(query[row + part]);
#pragma GCC unroll 4
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

QUIRE_INLINE float* place_of(const Memories& memories, const Share& share) {
  return memories.state + memories.sequences.states[share.index] * memories.state_stride +
         share.head * memories.num_rows * memories.num_columns + share.column;
}

// Whether a share's memory passes one token, so that a copy would not pay.
QUIRE_INLINE bool is_in_place(const Memories& memories, const Share& share) {
  const SequenceRows& sequences = memories.sequences;
  const int64_t end = sequences.ends[share.index];
  return first_row(sequences, share.index) + 1 == end && sequences.state_ends[share.index] == end &&
         sequences.num_before[share.index] != 0 && memories.num_rows % kPartialSums == 0 && share.width == kColumnsPerTask;
}

// Calls visit(token, share, columns) for each token of a share's sequence with a copy of its memory, which is stored where its state
// ends.
template <class Visit>
void with_copy(const Memories& memories, const Share& share, const Visit& visit) {
  const SequenceRows& sequences = memories.sequences;
  alignas(kLine) float memory[kMaxKeyDim][kCopiedVectors * kLanes];
  Columns<kCopiedVectors> columns;
  columns.memory = memory[0];
  float* state = place_of(memories, share);
  const bool begins = sequences.num_before[share.index] == 0;
  for (int64_t row = 0; row < round_up(memories.num_rows, kPartialSums); ++row) {
    const bool is_there = row < memories.num_rows && !begins;
    for (int i = 0; i < kCopiedVectors; ++i) {
      const float* place = state + row * memories.num_columns + i * kLanes;
      store(memory[row] + i * kLanes, is_there ? load_left(place, share.left(i)) : f32x16{});
    }
    columns.key[row] = columns.query[row] = columns.decays[row] = columns.decayed_key[row] = 0.0f;
  }
  for (int64_t token = first_row(sequences, share.index); token < sequences.ends[share.index]; ++token) {
    visit(token, share, columns);
    if (token + 1 != sequences.state_ends[share.index]) continue;
    for (int64_t row = 0; row < memories.num_rows; ++row) {
      for (int i = 0; i < kCopiedVectors; ++i) {
        store_left(state + row * memories.num_columns + i * kLanes, load(memory[row] + i * kLanes), share.left(i));
      }
    }
  }
}

// Calls visit(token, share, columns) for all tokens, and all columns of all heads.
template <class Visit>
void for_each_token(const Memories& memories, ThreadPool& pool, const Visit& visit) {
  const int64_t num_parts = ceil_div(memories.num_columns, kColumnsPerTask);
  const int64_t tasks_per_seq = memories.num_heads * num_parts;
  parallel_for(pool, memories.sequences.num_seqs * tasks_per_seq, [&](int64_t task, int) {
    const int64_t of_seq = task % tasks_per_seq, first = of_seq % num_parts * kColumnsPerTask;
    const int64_t end = min(first + kColumnsPerTask, memories.num_columns);
    Share share{task / tasks_per_seq, of_seq / num_parts, first, end - first};
    if (is_in_place(memories, share)) {
      Columns<kVectorsInPlace> columns;
      columns.memory = place_of(memories, share);
      columns.num_columns = memories.num_columns;
      return visit(first_row(memories.sequences, share.index), share, columns);
    }
    for (; share.column < end; share.column += share.width) {
      share.width = min(kCopiedVectors * kLanes, end - share.column);
      with_copy(memories, share, visit);
    }
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
template <class T, int kVectors>
QUIRE_INLINE void row_decays(const DeltaRuleCall& call, const T* times, int64_t head, Columns<kVectors>& columns) {
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
template <class T, class Decay, int kVectors>
QUIRE_INLINE void apply_token(const DeltaRuleCall& call, const Share& share, const T* values, float strength, const float* key,
                              float key_decay, const Decay& decay, Columns<kVectors>& columns, f32x16 (&result)[kVectors]) {
  const int64_t num_rows = round_up(call.key_dim, kPartialSums);
  f32x16 written[kVectors];
  columns.recall(key, num_rows, written);
  for (int i = 0; i < kVectors; ++i) {
    written[i] = (load_left(values + i * kLanes, share.left(i)) - written[i] * key_decay) * strength;
  }
  columns.update(decay, written, num_rows, result);
}

template <class T, int kVectors>
QUIRE_INLINE void delta_columns(const DeltaRuleCall& call, int64_t token, const Share& share, Columns<kVectors>& columns) {
  const int64_t key_size = call.num_key_heads * call.key_dim, value_size = call.num_value_heads * call.value_dim;
  const int64_t key_head = share.head / (call.num_value_heads / call.num_key_heads);
  const int64_t first_value = share.head * call.value_dim + share.column;
  const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(call.key_dim));
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
}

template <class T>
void apply_delta_rule(const DeltaRuleCall& call, ThreadPool& pool) {
  const Memories memories{call.state, call.state_stride, call.num_value_heads, call.key_dim, call.value_dim, call.sequences};
  for_each_token(memories, pool,
                 [&](int64_t token, const Share& share, auto& columns) { delta_columns<T>(call, token, share, columns); });
}

// -- selective scan ----------------------------------------------------------------------------------------------------------

template <class T>
QUIRE_INLINE void to_floats(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load_left(from + i, count - i));
}

template <class T, int kVectors>
QUIRE_INLINE void scan_columns(const ScanCall& call, int64_t token, const Share& share, Columns<kVectors>& columns) {
  const int64_t value_size = call.num_heads * call.head_dim, key_size = call.num_groups * call.state_size;
  const int64_t num_rows = round_up(call.state_size, kPartialSums);
  const int64_t first_key = share.head / (call.num_heads / call.num_groups) * call.state_size;
  const int64_t first_value = share.head * call.head_dim + share.column;
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
}

template <class T>
void apply_scan(const ScanCall& call, ThreadPool& pool) {
  const Memories memories{call.state, call.state_stride, call.num_heads, call.state_size, call.head_dim, call.sequences};
  for_each_token(memories, pool,
                 [&](int64_t token, const Share& share, auto& columns) { scan_columns<T>(call, token, share, columns); });
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
