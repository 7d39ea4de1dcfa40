// What is computed number by number or row by row between the products: norms, activations, what becomes of queries, keys and
// values before attention, and sums of rows. The numbers of a row are adjacent; strides are in elements. But for sums, a row's
// result depends on that row alone, and the tasks are whole rows, so it has the same bits in any company.
#pragma once

#include <cstdint>

#include "thread_pool.h"
#include "types.h"

namespace quire {

// out = x / sqrt(mean(x^2) + eps) * weight for each row x. With `delta`, rows += scale * delta comes first, in place and
// rounded to the type. Without `weight` nothing follows that. With `bias` it is a layer norm: the mean of x is subtracted first,
// and `bias` added last.
struct NormCall {
  void* rows;
  const void* delta;    // as `rows`, or null
  const float* weight;  // [num_features] or null
  void* out;
  DType type;
  int64_t num_rows;
  int64_t num_features;
  int64_t row_stride;
  int64_t delta_stride;
  int64_t out_stride;
  float scale;
  float eps;
  const float* bias = nullptr;  // [num_features] or null
};

enum class Activation : int { kSilu = 0, kGeluTanh = 1, kGelu = 2, kRelu2 = 3, kClampedSwiglu = 4 };

// out [num_rows, num_features] = activation(gate) * up, with `gate_up` [num_rows, 2 * num_features], gate first. Without `up`,
// there are only gates, and nothing is multiplied.
struct GatedActivationCall {
  const void* gate_up;
  void* out;
  DType type;
  Activation activation;
  int64_t num_rows;
  int64_t num_features;
  int64_t row_stride;
  int64_t out_stride;
  bool has_up = true;
};

// rows *= activation(gate), behind their norm (as NormCall's, without `bias`) where there is a weight for it; rounded once.
struct GateCall {
  void* rows;  // [num_tokens, num_heads, num_features], adjacent
  const void* gate;
  DType type;     // of both
  bool has_silu;  // else the activation is the sigmoid
  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_features;
  int64_t gate_strides[3];   // of a token, a head, a feature; the last 1, or 0 if a head has one gate
  const float* norm_weight;  // [num_features] or null
  float eps;
};

// numbers = cap * tanh(numbers / cap).
struct SoftCapCall {
  float* numbers;
  int64_t count;
  float cap;
};

// out [num_rows, num_features]: of each row, the sum of parts in float32, in order, each times its weight.
struct CombineCall {
  const float* parts;     // [any number, num_features]
  const int64_t* places;  // [num_rows, num_parts] which of them a row has
  const float* weights;   // [num_rows, num_parts]
  int64_t num_parts;      // of a row
  void* out;
  DType out_type;
  int64_t num_rows;
  int64_t num_features;
  int64_t out_stride;
};

// sums[place] += the rows of a piece, each times its share and rounded to a multiple of `unit`, a power of two. So sums are exact
// as long as they stay below 2^53 units, and do not depend on the order of what is added.
struct SumRowsCall {
  struct Piece {
    int64_t first_row;
    int64_t num_rows;
    int64_t place;
    int64_t begins;  // not 0: the sum is 0 before
  };
  const void* rows;
  DType type;
  int64_t row_stride;
  int64_t num_features;
  const Piece* pieces;
  int64_t num_pieces;
  const double* shares;  // of each row, or null
  double* sums;          // [any number, num_features]
  double unit;
};

// Keys or values of one layer, each head of a token in one piece. With scales the numbers are int8, or int4 of which two are an
// element, and to be multiplied by those.
struct CachePart {
  void* numbers;
  float* scales;             // or null
  int64_t strides[3];        // of a block, a head, a token, in elements
  int64_t scale_strides[3];  // the same
};

// Queries and keys of each row are normalized if there are weights, and rotated by the angles of the row's token; keys and
// values then go to the row's place in the cache. All of it is rounded to `type` and written back to `qkv` on the way.
struct RotaryCall {
  void* qkv;  // [num_rows, (num_heads + num_kv_heads) * head_dim + num_kv_heads * value_dim]: queries, keys, and values unless
              // the keys are these
  DType type;
  int64_t num_rows;
  int64_t row_stride;
  int64_t num_heads;
  int64_t num_kv_heads;  // 0: there are queries only, and no cache
  int64_t head_dim;
  int64_t value_dim;
  const float* cos;  // [num_rows, half]; feature i of a head turns with feature i + half; null: no rotation
  const float* sin;
  int64_t half;
  const float* q_norm;  // [q_norm_size] or null
  const float* k_norm;
  int64_t q_norm_size;  // features that are normalized together: those of a head, or of all heads
  int64_t k_norm_size;
  float eps;
  DType cache_type;
  CachePart keys;
  CachePart values;
  const int64_t* blocks;   // [num_rows] where each token goes
  const int64_t* offsets;  // [num_rows]
};

}  // namespace quire
