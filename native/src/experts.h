// A mixture of experts: feed-forward layers of one shape, of which each row goes through some.
#pragma once

#include <cstdint>

#include "dispatch.h"

namespace quire {

// out [num_rows, hidden]: of each row, the weighted sum of its experts' results, added in the order in which `chosen` names them.
// Pairs of a row and an expert are sorted by expert, so that each expert's panels are read once for many rows. What a pair
// becomes does not depend on the others.
struct ExpertsCall {
  const PackedWeight* gate_up;  // of one expert, without panels: gates and what they are multiplied with by turns, see PackCall
  const PackedWeight* down;
  const char* const* gate_up_panels;  // [num_experts]
  const char* const* down_panels;     // [num_experts]
  const float* gate_up_bias;          // [num_experts, gate_up->out_features], by turns, or null
  const float* down_bias;             // [num_experts, hidden] or null
  int64_t num_experts;
  Activation activation;
  const void* rows;  // [num_rows, hidden]
  DType row_type;    // of what is between the two products, too
  int64_t row_stride;
  int64_t num_rows;
  const int64_t* chosen;  // [num_rows, num_chosen] experts
  const float* weights;   // likewise
  int64_t num_chosen;
  void* out;
  DType out_type;
  int64_t out_stride;
  char* scratch;  // experts_scratch bytes, aligned to 64
};

int64_t experts_scratch(const ExpertsCall& call);
void experts(const ExpertsCall& call, const Kernels& kernels, ThreadPool& pool);

}  // namespace quire
