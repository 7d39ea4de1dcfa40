// Layers with a state. Tokens of a sequence are taken in order, and each by the same operations on the same numbers, so that the
// bits do not depend on how a sequence is divided into steps, nor on the tasks.
#pragma once

#include <cstdint>

#include "thread_pool.h"
#include "types.h"

namespace quire {

// Which tokens of a step are whose, and which states the sequences have.
struct SequenceRows {
  int64_t num_seqs;
  const int64_t* states;      // [num_seqs]
  const int64_t* ends;        // [num_seqs] of their tokens in the step's rows, which follow each other
  const int64_t* state_ends;  // [num_seqs] of those that the state takes in: the first ones, of each at least one
  const int64_t* num_before;  // [num_seqs] tokens before the step; 0: the state counts as zeros
};

// out = activation(sum over taps of weight * input + bias) for each feature: the oldest tap first, the last one is the token's.
// The state has the `num_taps - 1` inputs before the step, and gets the last ones of those that it takes in.
struct ConvCall {
  const void* rows;  // [tokens, num_features]
  void* out;         // [tokens, num_features], adjacent
  DType type;        // of both, and of the state
  int64_t row_stride;
  int64_t num_features;
  int64_t num_taps;
  const float* weight;  // [num_taps, num_features]
  const float* bias;    // [num_features] or null
  bool has_silu;
  void* state;  // [states, num_taps - 1, num_features], the last two adjacent
  int64_t state_stride;
  SequenceRows sequences;
};

constexpr int kMaxTaps = 64;

// The gated delta rule (Yang et al. 2024) with queries and keys of length 1; see KernelSet.gated_delta_rule.
struct DeltaRuleCall {
  const void* qkv;        // [tokens, (2 * num_key_heads) * key_dim + num_value_heads * value_dim], adjacent
  const void* strengths;  // [tokens, num_value_heads]
  int64_t strength_stride;
  const void* times;  // [tokens, num_value_heads, times_per_head], the last two adjacent
  int64_t time_stride;
  void* out;   // [tokens, num_value_heads, value_dim], adjacent
  DType type;  // of all four
  int64_t num_key_heads;
  int64_t num_value_heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t times_per_head;  // 1, or key_dim: each row of a memory decays by itself
  const float* decay;      // [num_value_heads]
  const float* time_bias;  // [num_value_heads, times_per_head]
  float max_strength;      // multiplies the sigmoid of the strength
  float* state;            // [states, num_value_heads, key_dim, value_dim], the last three adjacent
  int64_t state_stride;
  SequenceRows sequences;
};

constexpr int kMaxKeyDim = 256;

// The selective scan of Mamba-2 (Dao and Gu 2024); see KernelSet.selective_scan.
struct ScanCall {
  const void* inputs;  // [tokens, num_heads * head_dim + 2 * num_groups * state_size], adjacent: values, keys, queries
  const void* times;   // [tokens, num_heads]
  int64_t time_stride;
  void* out;  // [tokens, num_heads * head_dim]
  int64_t out_stride;
  DType type;  // of all three
  int64_t num_heads;
  int64_t head_dim;
  int64_t num_groups;
  int64_t state_size;      // at most kMaxKeyDim
  const float* decay;      // [num_heads]
  const float* time_bias;  // [num_heads]
  const float* skip;       // [num_heads]
  float least_time;
  float most_time;
  float* state;  // [states, num_heads, state_size, head_dim], the last three adjacent
  int64_t state_stride;
  SequenceRows sequences;
};

}  // namespace quire
