// Which experts compute a row, and how much each counts.
#pragma once

#include <cstdint>

#include "thread_pool.h"
#include "types.h"

namespace quire {

constexpr int kMaxExperts = 1024;

enum class Scoring : int { kSoftmax = 0, kSigmoid = 1, kSparsemixer = 2 };

// See Mixture in quire.kernels.layers.experts.
struct Routing {
  Scoring scoring;
  int64_t num_experts;  // at most kMaxExperts
  int64_t num_chosen;   // of a row
  bool normalize;
  float jitter;
  const float* correction;  // [num_experts] or null
  int64_t num_groups;       // divides num_experts
  int64_t num_chosen_groups;
  float scale;
  const float* expert_scales;  // [num_experts] or null

  // Whether experts are chosen by the softmax of their scores, and nothing else.
  bool is_plain() const {
    return scoring == Scoring::kSoftmax && correction == nullptr && num_groups == 1 && scale == 1.0f && expert_scales == nullptr;
  }
};

// Of each row the best experts come first, and of equals the first; whatever the scores are, they are different ones. A row's
// choice depends on its scores alone.
struct RoutingCall {
  const Routing* routing;
  const void* scores;  // [num_rows, num_experts]
  DType score_type;
  int64_t score_stride;
  int64_t num_rows;
  int64_t* chosen;  // [num_rows, num_chosen]
  float* weights;   // likewise
};

}  // namespace quire
